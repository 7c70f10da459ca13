"""What the reproduction has to show, as bounds on its figures. A figure that is not a number is never within them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

Figures = Mapping[str, Any]

#: What arithmetic alone may miss a bound by.
ROUNDING = 1e-9
#: How close "within" is.
NEAR = 0.03
#: Lambda_max behind narrow links, by the paper's model.
LINKS_REQUESTS_PER_S = {"10": 3.07, "8": 2.66, "6": 2.34, "4": 2.08, "2": 1.64}
#: Of the planner's Lambda_max, so that no fleet is weakened by how it is run.
SUSTAINED_SHARE = 0.94
#: Within this ratio two policies are as good as each other.
TIED = 1.02
#: Waiting so many times as long is a price; less than that is merely another policy that sends less.
DEAR = 2
#: What never sends says nothing of how little has to be sent.
NEVER_SENDS = "local_only"


@dataclass(frozen=True, slots=True)
class Check:
    """`why`: what we lose to and what that costs there; such a check is not ok, and yet nothing is missed."""

    item: str
    wanted: str
    measured: float
    ok: bool
    why: str = ""

    @property
    def missed(self) -> bool:
        return not self.ok and not self.why

    @property
    def verdict(self) -> str:
        if self.ok:
            return "yes"
        return f"not best: {self.why}" if self.why else "NO"


def checks(figures: Figures) -> list[Check]:
    return [
        *_planner(figures["planner"]),
        *_links(figures["links"]),
        *_sustained(figures["planner"], figures["simulated"]["sustained"]),
        *_ttft(figures["simulated"]["ttft"]),
        between("egress at 3.2 req/s, Gbps", figures["simulated"]["egress_gbps"], 11.5, 13.5),
        at_least(
            "mixed roles at 3.2 req/s: slowest request, tokens/s", figures["simulated"]["slowest_tokens_per_s"], 40
        ),
        *_changing(figures["changing"]),
        *_trace(figures["trace"]),
    ]


def at_least(item: str, measured: float, low: float) -> Check:
    return Check(item, f">= {low:.4g}", measured, measured >= low * (1 - ROUNDING))


def at_most(item: str, measured: float, high: float) -> Check:
    return Check(item, f"<= {high:.4g}", measured, measured <= high * (1 + ROUNDING))


def between(item: str, measured: float, low: float, high: float) -> Check:
    return Check(item, f"{low:g} to {high:g}", measured, low <= measured <= high)


def near(item: str, measured: float, expected: float) -> Check:
    ok = abs(measured - expected) <= NEAR * expected * (1 + ROUNDING)
    return Check(item, f"{expected:g} +- {NEAR:.0%}", measured, ok)


def equal(item: str, measured: int, expected: int) -> Check:
    return Check(item, str(expected), measured, measured == expected)


def _planner(planner: Figures) -> list[Check]:
    ours, mixed = planner["prfaas_pd"], planner["mixed"]
    return [
        between("planner: t", ours["t"], 19_000, 20_000),
        equal("planner: N_p", ours["n_p"], 3),
        equal("planner: N_d", ours["n_d"], 5),
        near("planner: Theta_prfaas", ours["theta_prfaas"], 1.61),
        near("planner: Theta_pdp", ours["theta_pdp"], 1.64),
        near("planner: Theta_pdd", ours["theta_pdd"], 3.91),
        near("planner: Lambda_max", ours["lambda_max"], 3.24),
        near("planner: homogeneous", planner["homogeneous"]["lambda_max"], 2.11),
        near("planner: naive", planner["naive"]["lambda_max"], 2.45),
        at_least("planner: mixed roles within the SLO", mixed["lambda_max"], 3.30),
    ]


def _links(links: Figures) -> list[Check]:
    return [
        near(f"planner: Lambda_max at {gbps} Gbps", links[gbps]["lambda_max"], expected)
        for gbps, expected in LINKS_REQUESTS_PER_S.items()
    ]


def _sustained(planner: Figures, sustained: Figures) -> list[Check]:
    ours, homogeneous = sustained["prfaas_pd"], sustained["homogeneous"]
    return [
        at_least("sustained: PrfaaS-PD over homogeneous", ours / homogeneous, 1.52),
        at_least("sustained: PrfaaS-PD over naive", ours / sustained["naive"], 1.30),
        at_least("sustained: mixed roles over homogeneous", sustained["mixed"] / homogeneous, 1.56),
        *(
            at_least(f"sustained over Lambda_max: {fleet}", rate / planner[fleet]["lambda_max"], SUSTAINED_SHARE)
            for fleet, rate in sustained.items()
        ),
    ]


def _ttft(ttft: Figures) -> list[Check]:
    found = []
    for rate, fleets in ttft.items():
        ours, homogeneous = fleets["prfaas_pd"], fleets["homogeneous"]
        saved = {which: 100 * (1 - ours[which] / homogeneous[which]) for which in ("mean", "p90")}
        found.append(at_least(f"TTFT at {rate} req/s: mean saved, %", saved["mean"], 46))
        found.append(at_least(f"TTFT at {rate} req/s: P90 saved, %", saved["p90"], 61))
    return found


def _changing(changing: Figures) -> list[Check]:
    found = []
    for name, row in changing.items():
        condition = name.replace("_", " ")
        found.append(at_most(f"{condition}: mean TTFT over the oracle's", row["ttft_ratio"], 1.10))
        found.append(at_least(f"{condition}: throughput over the oracle's", row["throughput_ratio"], 0.90))
        found.append(at_most(f"{condition}: plans that go back", row["turns"], 0))
    return found


def _trace(trace: Figures) -> list[Check]:
    """Best or tied, or it is said who is better and at what price."""
    ours = trace["prfaas"]
    others = {name: row for name, row in trace.items() if name != "prfaas"}
    found = []
    for which, title in (("mean", "mean TTFT"), ("p90", "P90 TTFT")):
        best = min(row[which] for row in others.values())
        found.append(at_most(f"trace: {title} over the best other", ours[which] / best, TIED))
    found.append(_egress(ours, others))
    most = max(row["skip_rate"] for row in others.values())
    found.append(at_least("trace: prefill skipped over the best other", ours["skip_rate"] / most, 1 / TIED))
    return found


def _egress(ours: Figures, others: Mapping[str, Figures]) -> Check:
    """Against those that serve as many: who leaves requests waiting has not sent their bytes yet. Who sends less and
    answers about as soon beats us; who sends less and answers far later pays another price, which is then stated."""
    rivals = {
        name: row for name, row in others.items() if name != NEVER_SENDS and row["unfinished"] <= ours["unfinished"]
    }
    least = min((row["egress_gb"] for row in rivals.values()), default=math.nan)
    check = at_most("trace: egress over the best other", ours["egress_gb"] / least, TIED)
    frugal = {name: row for name, row in rivals.items() if row["egress_gb"] * TIED < ours["egress_gb"]}
    slower = {
        name: row for name, row in frugal.items() if all(row[which] > DEAR * ours[which] for which in ("mean", "p90"))
    }
    if check.ok or not frugal or slower != frugal:
        return check
    why = "; ".join(
        f"{name} sends {row['egress_gb']:,.0f} GB to our {ours['egress_gb']:,.0f} GB, and its mean TTFT is "
        f"{row['mean'] / ours['mean']:.1f} times ours ({row['mean']:.2f} s to {ours['mean']:.2f} s)"
        for name, row in slower.items()
    )
    return replace(check, why=why)
