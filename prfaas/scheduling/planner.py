"""The best threshold and split of PD nodes for a fleet and a distribution of lengths, by search.

Where decode is the limit many thresholds are equally good. The one returned then balances the two ways of prefill
(equation 7): it leaves the more loaded of them as much room as can be had.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum

from prfaas.scheduling.evidence import InsufficientData
from prfaas.scheduling.lengths import Lengths
from prfaas.scheduling.throughput import (
    Approximation,
    CostModel,
    Fleet,
    StageCosts,
    Throughput,
    per_s,
    prefill_rates,
    throughput,
)

#: Thresholds of the first pass, evenly spaced in the logarithm of the length, and of each refinement around the best.
COARSE_STEPS, FINE_STEPS, REFINEMENTS = 160, 16, 2
#: Shares tried where no step limit holds.
UNLIMITED_SHARES = 100
#: A node shares its time only for a gain of more than this: its prefills take long.
SHARING_GAIN = 0.005
#: Rates that differ by less are equal, so that rounding does not choose.
DIGITS = 9


class Roles(Enum):
    """WHOLE: a PD node prefills or decodes. MIXED: one node may share its time, within the decode step limit.

    One is enough: a share costs decode in proportion, so spread over several nodes it gains nothing and makes each of
    their prefills slower. What more than one could give, a whole prefill node gives for less.
    UNLIMITED shares time as if a slower step did no harm: an upper bound for comparison, which breaks the SLO.
    """

    WHOLE = "whole"
    MIXED = "mixed"
    UNLIMITED = "unlimited"


@dataclass(frozen=True, slots=True)
class MixedShare:
    """A node that prefills for `prefill_share` of its time and decodes at most `decode_batch` sequences in the rest."""

    prefill_share: float
    decode_batch: int


#: Lambda_max, then the room in prefill, then the room inside the PD cluster. Compared in this order.
_Worth = tuple[float, float, float]
#: A way to share one node, with the part of a decode node that is left.
_Blend = tuple[MixedShare, float]


@dataclass(frozen=True, slots=True)
class Split:
    """Roles of all PD nodes: how many only prefill and only decode, and the one that does both. `prefill_nodes` and
    `decode_nodes` are what they amount to in whole nodes."""

    n_p: int
    n_d: int
    mixed: MixedShare | None
    prefill_nodes: float
    decode_nodes: float


@dataclass(frozen=True, slots=True)
class RolePlan:
    """`threshold_tokens` is the longest length where nothing should cross, and 0 where everything should.

    `n_p`, `n_d` count the nodes that only prefill and only decode; `mixed` is one more node.
    `throughput` says what the plan sustains and what limits it.
    """

    threshold_tokens: int
    n_p: int
    n_d: int
    mixed: MixedShare | None
    throughput: Throughput


def plan(
    fleet: Fleet, lengths: Lengths | InsufficientData, roles: Roles, approximation: Approximation
) -> RolePlan | InsufficientData:
    """The plan with the highest Lambda_max. A link rate that is not a number leaves the question open."""
    if isinstance(lengths, InsufficientData):
        return lengths
    if fleet.n_pd == 0:
        return InsufficientData("PD nodes", 0, 1)
    if fleet.link_bytes_per_s is not None and not fleet.link_bytes_per_s >= 0:
        return InsufficientData("link rates", 0, 1)
    model = CostModel.of(fleet, lengths, approximation)
    whole = _search(fleet, model, [])
    if roles is Roles.WHOLE:
        return whole
    shared = _search(fleet, model, _blends(fleet, roles))
    return shared if shared.throughput.lambda_max > whole.throughput.lambda_max * (1 + SHARING_GAIN) else whole


def _search(fleet: Fleet, model: CostModel, blends: list[_Blend]) -> RolePlan:
    """Every threshold of a coarse grid, then finer ones around the best."""
    tried: dict[int, tuple[_Worth, Split]] = {}
    thresholds = _coarse(model.lengths)
    for _ in range(1 + REFINEMENTS):
        for t in thresholds:
            if t not in tried:
                tried[t] = _best_split(fleet, model.at(t), blends)
        best = max(tried, key=lambda t: (tried[t][0], -t))
        thresholds = _around(best, sorted(tried))
    split = tried[best][1]
    rates = throughput(fleet, model.at(best), split.prefill_nodes, split.decode_nodes)
    return RolePlan(best, split.n_p, split.n_d, split.mixed, rates)


def _best_split(fleet: Fleet, costs: StageCosts, blends: list[_Blend]) -> tuple[_Worth, Split]:
    """At one threshold more prefill nodes raise the limit of local prefill and lower that of decode: the best split is
    next to where the two cross, so only its neighbours are tried."""
    p, rate = costs.offloaded_share, fleet.decode_requests_per_s
    remote, load_s = min(prefill_rates(fleet, costs)) / p if p > 0 else math.inf, (1 - p) * costs.local_s

    def worth(split: Split) -> _Worth:
        local, decode = per_s(split.prefill_nodes, load_s), split.decode_nodes * rate
        return _rounded(min(remote, local, decode)), _rounded(min(remote, local)), _rounded(min(local, decode))

    # Prefill nodes that keep one decode node's requests going.
    ratio = rate * load_s
    crossing = min(math.ceil(fleet.n_pd * ratio / (1 + ratio)), fleet.n_pd - 1)
    near = [
        split
        for n_p in range(max(0, crossing - 1), crossing + 1)
        for split in (_whole(fleet, n_p), *_blended(fleet, n_p, ratio, blends))
    ]
    return max(((worth(split), split) for split in near), key=lambda candidate: candidate[0])


def _whole(fleet: Fleet, n_p: int) -> Split:
    n_d = fleet.n_pd - n_p
    return Split(n_p, n_d, None, n_p, n_d)


def _blended(fleet: Fleet, n_p: int, ratio: float, blends: list[_Blend]) -> list[Split]:
    """With one node more that does both: the shares next to where prefill catches up with decode."""
    n_d = fleet.n_pd - n_p - 1
    splits = [Split(n_p, n_d, share, n_p + share.prefill_share, n_d + left) for share, left in blends]
    place = bisect_left(splits, True, key=lambda split: split.prefill_nodes >= split.decode_nodes * ratio)
    return splits[max(0, place - 1) : place + 1]


def _blends(fleet: Fleet, roles: Roles) -> list[_Blend]:
    """From a small share of prefill to a large one.

    A share s stretches each step to step(b) / (1 - s). Within the limit, a batch of b leaves s = 1 - step(b) / limit.
    """
    batch, limit_s = fleet.decode_batch, fleet.step_limit_s
    match roles:
        case Roles.WHOLE:
            return []
        case Roles.MIXED:
            whole_rate = batch / fleet.decode.step_s(batch)
            return [
                (MixedShare(1 - fleet.decode.step_s(smaller) / limit_s, smaller), smaller / limit_s / whole_rate)
                for smaller in range(batch - 1, 0, -1)
            ]
        case Roles.UNLIMITED:
            shares = (step / UNLIMITED_SHARES for step in range(1, UNLIMITED_SHARES))
            return [(MixedShare(share, batch), 1 - share) for share in shares]


def _coarse(lengths: Lengths) -> list[int]:
    """From everything crosses to nothing does."""
    low, high = max(1.0, lengths.shortest_tokens), max(1.0, lengths.longest_tokens)
    steps = (low * (high / low) ** (step / COARSE_STEPS) for step in range(COARSE_STEPS))
    return [0, *map(round, steps), math.ceil(lengths.longest_tokens)]


def _around(best: int, tried: list[int]) -> list[int]:
    """Evenly between the neighbours of the best."""
    place = tried.index(best)
    low, high = tried[max(0, place - 1)], tried[min(len(tried) - 1, place + 1)]
    return [round(low + (high - low) * step / FINE_STEPS) for step in range(FINE_STEPS + 1)]


def _rounded(rate: float) -> float:
    return float(f"{rate:.{DIGITS}g}")
