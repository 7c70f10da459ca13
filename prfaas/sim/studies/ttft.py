"""Time to the first token at four rates, PrfaaS-PD against both baselines on common random numbers, and the egress near
the limit."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prfaas.sim.case_study_runs import WHOLE_OUTPUTS, scenario
from prfaas.sim.document import Block, Chart, Heading, Table, Text
from prfaas.sim.jobs import Job
from prfaas.sim.plots import Line, distribution, line_chart
from prfaas.sim.run import run
from prfaas.sim.studies.effort import Effort

RATES = ("0.5", "1.0", "1.5", "2.0")
FLEETS = ("prfaas_pd", "homogeneous", "naive")
#: Requests per second at which egress is measured.
NEAR_THE_LIMIT = "3.2"
#: The rate whose distributions are drawn.
DRAWN = "2.0"


class Measured(NamedTuple):
    """Of each request: its TTFT, the same without the way there and back and the first decode step, and its path."""

    ttft_s: npt.NDArray[np.float64]
    bare_s: npt.NDArray[np.float64]
    remote: npt.NDArray[np.bool_]
    egress_gbps: float
    slowest_tokens_per_s: float
    itl_s: Mapping[str, float | None]


def jobs(effort: Effort) -> list[Job]:
    cells = [(fleet, rate) for rate in RATES for fleet in FLEETS]
    cells += [("prfaas_pd", NEAR_THE_LIMIT), ("mixed", NEAR_THE_LIMIT)]
    return [
        Job(_name(fleet, rate, seed), measure, (fleet, float(rate), seed, effort.ttft_s))
        for fleet, rate in cells
        for seed in effort.seeds
    ]


def measure(fleet: str, rate_per_s: float, seed: int, duration_s: float) -> Measured:
    asked = scenario(fleet, rate_per_s).but(seed=seed, duration_s=duration_s, warm_up_s=duration_s / 12)
    result = run(asked.but(token_batch=WHOLE_OUTPUTS))
    rows = result.requests
    rows = rows[(rows["arrived_s"] >= duration_s / 12) & ~np.isnan(rows["ttft_s"])]
    bare_s = rows["ttft_s"] - rows["network_s"] - rows["first_step_s"]
    read_s = rows["finished_s"] - rows["arrived_s"] - rows["ttft_s"]
    return Measured(
        ttft_s=rows["ttft_s"],
        bare_s=bare_s,
        remote=rows["remote"],
        egress_gbps=result.summary["egress_gbps"],
        slowest_tokens_per_s=float(np.nanmin((rows["output_tokens"] - 1) / read_s)),
        itl_s=result.summary["itl_s"],
    )


def figures(results: Mapping[str, Any], effort: Effort) -> dict[str, Any]:
    """All seeds in one."""

    def cell(fleet: str, rate: str) -> dict[str, float]:
        of_seeds = [results[_name(fleet, rate, seed)] for seed in effort.seeds]
        ttft_s = np.concatenate([seen.ttft_s for seen in of_seeds])
        bare_s = np.concatenate([seen.bare_s for seen in of_seeds])
        return {
            "mean": float(ttft_s.mean()),
            "p90": float(np.percentile(ttft_s, 90)),
            "bare_mean": float(bare_s.mean()),
            "bare_p90": float(np.percentile(bare_s, 90)),
        }

    near = [results[_name("prfaas_pd", NEAR_THE_LIMIT, seed)].egress_gbps for seed in effort.seeds]
    mixed = [results[_name("mixed", NEAR_THE_LIMIT, seed)] for seed in effort.seeds]
    return {
        "ttft": {rate: {fleet: cell(fleet, rate) for fleet in FLEETS} for rate in RATES},
        "egress_gbps": float(np.mean(near)),
        "slowest_tokens_per_s": min(seen.slowest_tokens_per_s for seen in mixed),
        "itl_s": {q: float(np.mean([seen.itl_s[q] for seen in mixed])) for q in ("p50", "p99")},
    }


def blocks(found: Mapping[str, Any], results: Mapping[str, Any], effort: Effort) -> Iterator[Block]:
    yield Heading("Time to first token")
    yield Text(
        "Seconds, with queueing, transfer, round trips of the line and decode's first step; in brackets without the "
        "last two. The same arrivals and lengths for all fleets."
    )
    yield Table(
        ["req/s", *(f"{fleet} {which}" for fleet in FLEETS for which in ("mean", "P90"))],
        [
            [
                rate,
                *(
                    f"{cell[which]:.2f} ({cell[f'bare_{which}']:.2f})"
                    for cell in row.values()
                    for which in ("mean", "p90")
                ),
            ]
            for rate, row in found["ttft"].items()
        ],
    )
    rates = [float(rate) for rate in RATES]
    for which, title in (("mean", "Mean TTFT"), ("p90", "P90 TTFT")):
        lines = [
            Line(fleet, [(rate, found["ttft"][f"{rate:.1f}"][fleet][which]) for rate in rates]) for fleet in FLEETS
        ]
        yield Chart(f"ttft_{which}", f"{title} against load.", line_chart(title, "requests/s", "seconds", lines))
    yield Chart(
        "ttft_distribution",
        f"Share of requests whose first token came within a time, at {DRAWN} req/s.",
        line_chart(f"TTFT at {DRAWN} req/s", "seconds", "share", list(_distributions(results, effort)), log_x=True),
    )


def _distributions(results: Mapping[str, Any], effort: Effort) -> Iterator[Line]:
    def of(fleet: str) -> Measured:
        measured: Measured = results[_name(fleet, DRAWN, effort.seeds[0])]
        return measured

    ours, homogeneous = of("prfaas_pd"), of("homogeneous")
    yield Line("PrfaaS-PD, local", distribution(ours.ttft_s[~ours.remote].tolist()))
    yield Line("PrfaaS-PD, remote", distribution(ours.ttft_s[ours.remote].tolist()))
    yield Line("PrfaaS-PD, all", distribution(ours.ttft_s.tolist()))
    yield Line("homogeneous", distribution(homogeneous.ttft_s.tolist()), dashed=True)


def _name(fleet: str, rate: str, seed: int) -> str:
    return f"TTFT of {fleet} at {rate}/s, seed {seed}"
