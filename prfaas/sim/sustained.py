"""The highest Poisson rate that a cluster sustains: at which its backlog stays bounded.

A rate is bounded when over the second half of the run the number of requests in the cluster has no trend: the straight
line through it, averaged over the seeds, rises by no more than GROWTH of what arrives. A rate of C + x leaves x per
second behind where the capacity is C, so the answer is at most GROWTH too high, for every policy alike.

Chance is kept out of comparisons in three ways. Equal seeds give all rates and all policies the same lengths in the
same order. Every second seed mirrors the lengths of the one before it, so that the scatter of lengths mostly cancels.
And what arrived is measured by the same straight line over the same samples as what stayed behind: a few thousand
arrivals are a per cent more or fewer than their rate says, but what was served is what arrived less what stayed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import msgspec

from prfaas.sim.case_study_runs import WHOLE_OUTPUTS
from prfaas.sim.run import run_all
from prfaas.sim.scenario import Scenario

GROWTH = 0.01
#: The answer is read off between a rate that is bounded and one that is not and is at most so much higher.
PRECISION = 0.015
#: How far beside the rate at which growth is expected to become too much the search looks.
BESIDE = 0.005
HOURS = 2
SEEDS = (1, 2, 3, 4)
#: A cluster that a search cannot overload, or that sustains nothing, is not what was asked about.
MAX_PROBES = 24


@dataclass(frozen=True, slots=True)
class Probe:
    """At a nominal rate: what was offered and how the backlog grew, in requests/s over the second half, averaged over
    the seeds. `served_per_s` is that of each pair of seeds."""

    rate_per_s: float
    offered_per_s: float
    growth_per_s: float
    served_per_s: tuple[float, ...]
    failed: int

    @property
    def excess_per_s(self) -> float:
        """Growth beyond what is tolerated."""
        return self.growth_per_s - GROWTH * self.rate_per_s

    @property
    def bounded(self) -> bool:
        return self.failed == 0 and self.excess_per_s <= 0


@dataclass(frozen=True, slots=True)
class Sustained:
    """`rate_per_s` is what was offered where growth becomes too much, between the highest rate that was bounded and the
    lowest that was not. `error_per_s` is its standard error by the pairs of seeds; 0 when there is one pair."""

    rate_per_s: float
    error_per_s: float
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
    """Simulate this scenario at one rate after another."""

    def look(rate_per_s: float) -> Probe:
        seen = probe(scenario, rate_per_s, seeds, hours, processes)
        tell(seen)
        return seen

    return search(look, guess_per_s)


def search(look: Callable[[float], Probe], guess_per_s: float) -> Sustained:
    """Look where growth is expected to become too much, until one rate is bounded and one close above is not."""
    probes: list[Probe] = []
    rate_per_s, step = guess_per_s, BESIDE
    while True:
        assert len(probes) < MAX_PROBES, f"no end to the search at {rate_per_s} requests/s"
        probes.append(look(rate_per_s))
        high = min((each for each in probes if not each.bounded), key=_rate, default=None)
        below = (each for each in probes if each.bounded and (high is None or each.rate_per_s < high.rate_per_s))
        low = max(below, key=_rate, default=None)
        if high is None:
            assert low is not None
            rate_per_s = max(_expected(low) * (1 + BESIDE), low.rate_per_s * (1 + step))
            step *= 2
        elif low is None:
            rate_per_s = high.rate_per_s * (1 - step) if high.excess_per_s <= 0 else _expected(high) * (1 - BESIDE)
            step *= 2
        elif high.rate_per_s > low.rate_per_s * (1 + PRECISION):
            rate_per_s = _between(low, high)
        else:
            offered = low.offered_per_s + _share(low, high) * (high.offered_per_s - low.offered_per_s)
            return Sustained(offered, _error(high), tuple(probes))


def _rate(probe: Probe) -> float:
    return probe.rate_per_s


def _expected(probe: Probe) -> float:
    """Where growth becomes too much, if what is beyond the capacity is what stays behind."""
    return (probe.rate_per_s - probe.growth_per_s) / (1 - GROWTH)


def _between(low: Probe, high: Probe) -> float:
    """The rate to look at next: just below where growth is expected to become too much, and then just above."""
    crossing = _expected(high)
    if high.excess_per_s > 0 and low.rate_per_s < crossing * (1 - BESIDE):
        return crossing * (1 - BESIDE)
    above = max(crossing, low.rate_per_s) * (1 + BESIDE)
    return above if high.excess_per_s > 0 and above < high.rate_per_s else (low.rate_per_s * high.rate_per_s) ** 0.5


def _share(low: Probe, high: Probe) -> float:
    """How far from `low` to `high` growth becomes too much, by the straight line between them."""
    return -low.excess_per_s / (high.excess_per_s - low.excess_per_s) if high.excess_per_s > 0 else 0.0


def _error(probe: Probe) -> float:
    """Of what was served, at a rate at which that is all that the cluster can."""
    pairs = probe.served_per_s
    return stdev(pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else 0.0


def probe(
    scenario: Scenario, rate_per_s: float, seeds: Sequence[int], hours: float, processes: int | None = None
) -> Probe:
    at_rate = scenario.at_rate(rate_per_s)
    runs = [
        at_rate.but(
            workload=msgspec.structs.replace(at_rate.workload, mirrors=seeds[place - 1] if place % 2 else None),
            seed=seed,
            duration_s=3600.0 * hours,
            warm_up_s=600.0,
            drain_s=0.0,
            token_batch=WHOLE_OUTPUTS,
        )
        for place, seed in enumerate(seeds)
    ]
    summaries = [result.summary for result in run_all(runs, processes)]
    offered = [summary["late_offered_per_s"] for summary in summaries]
    growth = [summary["backlog_growth_per_s"] for summary in summaries]
    served = [arrived - left for arrived, left in zip(offered, growth, strict=True)]
    return Probe(
        rate_per_s,
        fmean(offered),
        fmean(growth),
        tuple(fmean(served[place : place + 2]) for place in range(0, len(served), 2)),
        sum(summary["failed"] for summary in summaries),
    )
