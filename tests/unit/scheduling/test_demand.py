"""Counting what arrives: it fades, and several routers add up."""

import math
from dataclasses import replace

import pytest

from prfaas.scheduling.demand import Demand, DemandParams, DemandSnapshot, Fading
from prfaas.scheduling.evidence import InsufficientData
from prfaas.scheduling.histogram import LengthCounts

PARAMS = DemandParams(lengths_half_life_s=300.0, rate_half_life_s=30.0)


def steady(per_s: float, until_s: float, tokens: int = 1000) -> Demand:
    demand = Demand(PARAMS, now=0.0)
    for number in range(int(per_s * until_s)):
        demand.routed(tokens, number / per_s)
        demand.finished(100, number / per_s)
    return demand


@pytest.mark.parametrize("until_s", [10.0, 60.0, 1000.0])
def test_the_rate_is_right_from_the_beginning(until_s):
    """A short watch is not taken for a low rate."""
    assert steady(4.0, until_s).snapshot(until_s).arrivals_per_s == pytest.approx(4.0, rel=0.05)


def test_the_rate_follows_a_burst_and_its_end():
    """A rate of one half-life ago counts half."""
    demand = steady(2.0, 300.0)
    for number in range(600):
        demand.routed(1000, 300.0 + number / 10)
    assert demand.snapshot(360.0).arrivals_per_s == pytest.approx(2 / 4 + 10 * 3 / 4, rel=0.05)
    assert demand.snapshot(420.0).arrivals_per_s == pytest.approx(2 / 16 + 10 * 3 / 16, rel=0.05)


def test_lengths_need_enough_requests():
    """Too few are insufficient, which is not the same as none being long."""
    few = steady(1.0, 10.0).snapshot(10.0)
    assert isinstance(few.lengths(30), InsufficientData)
    lengths = steady(1.0, 100.0).snapshot(100.0).lengths(30)
    assert not isinstance(lengths, InsufficientData) and lengths.mean() == pytest.approx(1000, rel=0.05)


def test_outputs_are_averaged_over_what_has_finished():
    """Nothing has finished: nothing is known."""
    demand = Demand(PARAMS, now=0.0)
    demand.routed(1000, 0.0)
    assert demand.snapshot(1.0).output_tokens is None
    demand.finished(100, 1.0)
    demand.finished(300, 1.0)
    assert demand.snapshot(2.0).output_tokens == pytest.approx(200)


def test_routers_add_up():
    """Rates are summed, outputs weighed by them, and a report that is not a number is left out."""
    one = replace(steady(2.0, 600.0).snapshot(600.0), output_tokens=100.0)
    two = replace(steady(6.0, 600.0).snapshot(600.0), output_tokens=200.0)
    broken = replace(one, arrivals_per_s=math.nan)
    merged = DemandSnapshot.merged([one, two, broken])
    assert merged.arrivals_per_s == pytest.approx(8.0, rel=0.05)
    assert merged.output_tokens == pytest.approx(175.0, rel=0.02)
    assert merged.counts.total == pytest.approx(one.counts.total + two.counts.total)
    nobody = DemandSnapshot.merged([])
    assert (nobody.arrivals_per_s, nobody.output_tokens, nobody.counts) == (0.0, None, LengthCounts.merged([]))


def test_time_that_steps_back_adds_nothing():
    """Reports may come a little out of order."""
    fading = Fading(10.0)
    fading.add(1.0, 100.0)
    fading.add(1.0, 99.0)
    assert fading.at(100.0) == pytest.approx(2.0)
    assert fading.at(110.0) == pytest.approx(1.0)
