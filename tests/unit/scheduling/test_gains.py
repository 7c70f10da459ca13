"""What a change gains, and how much of that may be chance."""

import math
from dataclasses import replace

import pytest

from prfaas.scheduling.demand import DemandSnapshot
from prfaas.scheduling.gains import error, gain, prefill_gain
from prfaas.scheduling.histogram import LengthCounts
from prfaas.scheduling.throughput import Approximation, evaluate
from prfaas.sim.case_study import LENGTHS, PRFAAS_PD
from tests.unit.scheduling.steering_scenes import demand


def rates(t: float, n_p: int, n_d: int):
    return evaluate(PRFAAS_PD, LENGTHS, t, n_p, n_d, Approximation.INTEGRAL)


def test_a_gain_is_relative():
    """And without bound where nothing was served before."""
    before, after = rates(19_000, 1, 7), rates(19_000, 3, 5)
    assert gain(before, after) == pytest.approx(after.lambda_max / before.lambda_max - 1)
    assert gain(before, after) > 0.5
    assert gain(replace(before, lambda_max=0.0), after) == math.inf


def test_room_in_prefill_counts_where_decode_is_the_limit():
    """Requests/s stay the same there, whichever t balances the two ways of prefill."""
    before, after = rates(60_000, 7, 1), rates(20_000, 7, 1)
    assert gain(before, after) == 0
    assert prefill_gain(after, before) == pytest.approx(1 / (1 + prefill_gain(before, after)) - 1)
    assert prefill_gain(before, after) != 0


def test_four_times_the_requests_leave_half_of_the_error():
    seen = demand(4.0)
    fewer = replace(seen, counts=LengthCounts(tuple(count / 4 for count in seen.counts.counts)))
    assert error(fewer) == pytest.approx(2 * error(seen))
    assert 0.01 < error(seen) < 0.05


def test_without_requests_everything_may_be_chance():
    nothing = DemandSnapshot(counts=LengthCounts.merged(()), arrivals_per_s=1.0)
    assert error(None) == error(nothing) == math.inf
