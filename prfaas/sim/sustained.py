"""The highest Poisson rate that a cluster sustains: at which its backlog stays bounded.

A rate is bounded when over the second half of the run the number of requests in the cluster has no trend: the straight
line through it, averaged over the seeds, rises by no more than GROWTH of what arrives. A rate of C + x leaves x per
second behind where the capacity is C, so the answer is at most GROWTH too high, for every policy alike. Equal seeds
give all rates and all policies the same lengths in the same order.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from prfaas.sim.run import run_all
from prfaas.sim.scenario import Scenario

GROWTH = 0.01
#: The answer is known to this ratio.
PRECISION = 0.01
#: How far over the guess the search begins.
STEP = 0.03
HOURS = 2
SEEDS = (1, 2, 3, 4)
#: A cluster that a search cannot overload, or that sustains nothing, is not what was asked about.
MAX_PROBES = 24


@dataclass(frozen=True, slots=True)
class Probe:
    """At a nominal rate: what was offered and how the backlog grew, in requests/s, averaged over the seeds. Seeds are
    few enough for chance to offer a percent more or less than the nominal rate."""

    rate_per_s: float
    offered_per_s: float
    growth_per_s: float
    failed: int

    @property
    def bounded(self) -> bool:
        return self.failed == 0 and self.growth_per_s <= GROWTH * self.rate_per_s


@dataclass(frozen=True, slots=True)
class Sustained:
    """`rate_per_s` is what was offered at the highest nominal rate that was bounded."""

    rate_per_s: float
    probes: tuple[Probe, ...]


def sustained(
    scenario: Scenario,
    guess_per_s: float,
    *,
    seeds: Sequence[int] = SEEDS,
    hours: float = HOURS,
    processes: int | None = None,
    tell: Callable[[Probe], None] = lambda probe: None,
) -> Sustained:
    """Overload it first: what is left behind tells what it can do. Then look just below and just above that, further
    out until one rate is bounded and one is not, and halve what lies between."""
    probes: list[Probe] = []

    def bounded(rate_per_s: float) -> bool:
        probes.append(probe(scenario, rate_per_s, seeds, hours, processes))
        tell(probes[-1])
        assert len(probes) <= MAX_PROBES, f"no end to the search at {rate_per_s} requests/s"
        return probes[-1].bounded

    step = PRECISION
    if bounded(guess_per_s * (1 + STEP)):
        low, high = probes[-1].rate_per_s, probes[-1].rate_per_s * (1 + STEP)
    else:
        expected = (probes[-1].rate_per_s - probes[-1].growth_per_s) / (1 - GROWTH)
        low, high = expected * (1 - PRECISION / 2), expected * (1 + PRECISION / 2)
        while not bounded(low):
            low, high, step = low / (1 + step), low, 2 * step
    while high < _least_unbounded(probes) and bounded(high):
        low, high, step = high, high * (1 + step), 2 * step
    while high / low - 1 > PRECISION * 1.01:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if bounded(middle) else (low, middle)
    highest = next(probe for probe in probes if probe.rate_per_s == low)
    return Sustained(highest.offered_per_s, tuple(probes))


def _least_unbounded(probes: Sequence[Probe]) -> float:
    return min((probe.rate_per_s for probe in probes if not probe.bounded), default=math.inf)


def probe(
    scenario: Scenario, rate_per_s: float, seeds: Sequence[int], hours: float, processes: int | None = None
) -> Probe:
    """Every second seed has the lengths of the one before it mirrored: the scatter of lengths, which is as large as the
    differences that are asked for, then mostly cancels."""
    pairs = [(seed, seeds[place - 1] if place % 2 else None) for place, seed in enumerate(seeds)]
    runs = [
        scenario.at_rate(rate_per_s).but(
            workload=msgspec.structs.replace(scenario.at_rate(rate_per_s).workload, mirrors=mirrors),
            seed=seed,
            duration_s=3600.0 * hours,
            warm_up_s=600.0,
            drain_s=0.0,
            # How finely tokens are handed out changes nothing but the cost.
            token_batch=1 << 20,
        )
        for seed, mirrors in pairs
    ]
    summaries = [result.summary for result in run_all(runs, processes)]
    offered, growth = (
        sum(summary[figure] for summary in summaries) / len(summaries)
        for figure in ("offered_per_s", "backlog_growth_per_s")
    )
    return Probe(rate_per_s, offered, growth, sum(summary["failed"] for summary in summaries))
