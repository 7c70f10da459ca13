"""The paper's case study as constants, and the planner's figures for it.

A 1T hybrid model; 4 PrfaaS instances of 8 H200 and 8 PD instances of 8 H20 against 12 PD instances of 8 H20, and
against the first fleet without length routing: all prefill on PrfaaS, all PD nodes decode. Whole-node roles except
where a figure says mixed. Costs are averaged over the requests, so that a figure is what a queue can sustain; the
paper's mean-length approximation gives rates a few percent higher.
"""

import math
from dataclasses import dataclass, replace

from prfaas.profile import CASE_STUDY, GBPS, shipped
from prfaas.scheduling.evidence import InsufficientData
from prfaas.scheduling.lengths import Lengths
from prfaas.scheduling.planner import RolePlan, Roles, plan
from prfaas.scheduling.throughput import Approximation, Fleet, Throughput, evaluate

#: Input lengths: ln L normal, cut. The mean is about 27K.
LENGTHS = Lengths.log_normal(mu=9.90, sigma=1.00, low_tokens=128, high_tokens=131_072)
OUTPUT_TOKENS = 1024
#: 40 tokens/s for every request.
STEP_LIMIT_S = 0.025
LINK_GBPS = 100
#: Links at which bandwidth binds.
NARROW_LINKS_GBPS = (10, 8, 6, 4, 2)
#: Assumed: a mixed node prefills so many tokens between two decode steps. It sets the longest gap between tokens.
MIXED_CHUNK_TOKENS = 256

PRFAAS_PD = Fleet(
    n_prfaas=4,
    n_pd=8,
    prfaas=shipped(CASE_STUDY, "h200"),
    pd=shipped(CASE_STUDY, "h20"),
    link_bytes_per_s=LINK_GBPS * GBPS,
    output_tokens=OUTPUT_TOKENS,
    step_limit_s=STEP_LIMIT_S,
)
HOMOGENEOUS = replace(PRFAAS_PD, n_prfaas=0, n_pd=12)
#: The naive fleet is that of PrfaaS-PD; its threshold is 0 and no PD node prefills.
NAIVE = PRFAAS_PD


def link_of(gbps: float) -> Fleet:
    """The case study behind a narrower link."""
    return replace(PRFAAS_PD, link_bytes_per_s=gbps * GBPS)


def case_study_plan(fleet: Fleet, roles: Roles, approximation: Approximation = Approximation.INTEGRAL) -> RolePlan:
    found = plan(fleet, LENGTHS, roles, approximation)
    assert not isinstance(found, InsufficientData), "the case study has nodes, a link and lengths"
    return found


def naive_throughput(approximation: Approximation = Approximation.INTEGRAL) -> Throughput:
    return evaluate(NAIVE, LENGTHS, threshold_tokens=0, n_p=0, n_d=NAIVE.n_pd, approximation=approximation)


def planner_figures(approximation: Approximation = Approximation.INTEGRAL) -> dict[str, dict[str, dict[str, object]]]:
    """`planner` and `links` of `sim reproduce --json`. t is 0 where all cross and the longest length where none do."""

    def planned(fleet: Fleet, roles: Roles = Roles.WHOLE) -> RolePlan:
        return case_study_plan(fleet, roles, approximation)

    mixed, narrow = planned(PRFAAS_PD, Roles.MIXED), {gbps: planned(link_of(gbps)) for gbps in NARROW_LINKS_GBPS}
    gaps = token_gaps(PRFAAS_PD, mixed)
    return {
        "planner": {
            "prfaas_pd": _of_plan(planned(PRFAAS_PD)),
            "homogeneous": _of_plan(planned(HOMOGENEOUS)),
            "naive": _figures(0, 0, NAIVE.n_pd, naive_throughput(approximation)),
            "mixed": {
                **_of_plan(mixed),
                "share": mixed.mixed.prefill_share if mixed.mixed else 0.0,
                "itl_p50_s": gaps.quantile(0.50),
                "itl_p99_s": gaps.quantile(0.99),
                "chunk_tokens": MIXED_CHUNK_TOKENS,
                "unlimited_lambda_max": planned(PRFAAS_PD, Roles.UNLIMITED).throughput.lambda_max,
            },
        },
        "links": {
            str(gbps): {"lambda_max": found.throughput.lambda_max, "t": found.threshold_tokens}
            for gbps, found in narrow.items()
        },
    }


@dataclass(frozen=True, slots=True)
class TokenGaps:
    """Times between two tokens of one request, as (seconds, share of all gaps), rising."""

    gaps: tuple[tuple[float, float], ...]

    def quantile(self, q: float) -> float:
        """The gap that a share `q` of all gaps does not exceed."""
        seen = 0.0
        for seconds, share in self.gaps:
            seen += share
            if seen >= q:
                return seconds
        return self.gaps[-1][0]


def token_gaps(fleet: Fleet, roles: RolePlan) -> TokenGaps:
    """At full load. A decode node makes a step after another; a mixed node puts a chunk of prefill after every k steps,
    with k such that prefill takes its share: gaps are then a bare step, or a step and a chunk."""
    costs = roles.throughput.costs
    chunk_s = MIXED_CHUNK_TOKENS * costs.local_s / costs.local_tokens
    full = fleet.decode_batch
    step_s = fleet.decode.step_s(full)
    tokens_per_s = [(step_s, roles.n_d * full / step_s)]
    if (node := roles.mixed) is not None:
        bare_s = fleet.decode.step_s(node.decode_batch)
        steps_per_chunk = max(1.0, chunk_s * (1 - node.prefill_share) / (node.prefill_share * bare_s))
        rate = node.decode_batch * (1 - node.prefill_share) / bare_s
        tokens_per_s.append((bare_s, rate * (1 - 1 / steps_per_chunk)))
        tokens_per_s.append((bare_s + chunk_s, rate / steps_per_chunk))
    total = math.fsum(rate for _, rate in tokens_per_s)
    return TokenGaps(tuple(sorted((seconds, rate / total) for seconds, rate in tokens_per_s)))


def _of_plan(found: RolePlan) -> dict[str, object]:
    return _figures(found.threshold_tokens, found.n_p, found.n_d, found.throughput)


def _figures(t: int, n_p: int, n_d: int, rates: Throughput) -> dict[str, object]:
    return {
        "t": t,
        "n_p": n_p,
        "n_d": n_d,
        "theta_prfaas": rates.theta_prfaas,
        "theta_pdp": rates.theta_pdp,
        "theta_pdd": rates.theta_pdd,
        "lambda_max": rates.lambda_max,
        "egress_gbps": rates.egress_bytes_per_s / GBPS,
    }
