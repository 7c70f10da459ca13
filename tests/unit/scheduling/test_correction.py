"""What busy stages say about a model that is wrong."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduling.correction import Correction, StageReading, mean, slowed
from tests.unit.scheduling.steering_scenes import PROFILES

FITS = StageReading(0.5, 0.5)


def corrected(reading: StageReading, rounds: int = 20) -> float:
    correction = Correction()
    for _ in range(rounds):
        correction = correction.towards(FITS, reading, FITS)
    assert (correction.remote, correction.decode) == (1.0, 1.0)
    return correction.prefill


def test_a_stage_as_busy_as_expected_is_not_corrected():
    assert corrected(FITS) == 1.0


def test_a_stage_busier_than_expected_costs_more():
    """Half again as busy: half again the cost, after some rounds."""
    assert corrected(StageReading(0.5, 0.75), rounds=1) == pytest.approx(1.25)
    assert corrected(StageReading(0.5, 0.75)) == pytest.approx(1.5, rel=0.01)
    assert corrected(StageReading(0.8, 0.6)) == pytest.approx(0.75, rel=0.01)


def test_the_correction_is_bounded():
    """A report may be wrong, too."""
    assert corrected(StageReading(0.25, 1.0)) == pytest.approx(2.0)
    assert corrected(StageReading(0.9, 0.0)) == pytest.approx(0.5, rel=0.01)


def test_a_long_queue_says_more_than_a_full_stage():
    """Full is all that a busy ratio can say; the queue says that it is asked for more."""
    full = corrected(StageReading(0.8, 1.0))
    queued = corrected(StageReading(0.8, 1.0, queue_s=40.0))
    assert full == pytest.approx(1.25, rel=0.01) and queued == pytest.approx(1.5 / 0.8, rel=0.01)
    assert corrected(StageReading(0.8, 0.8, queue_s=9.0)) == 1.0
    assert corrected(StageReading(0.8, None, queue_s=40.0)) == queued


@pytest.mark.parametrize(
    "silent",
    [
        StageReading(0.5, None),
        StageReading(0.5, math.nan),
        StageReading(math.nan, 0.5),
        StageReading(math.inf, 0.5),
        StageReading(0.1, 0.9),
        StageReading(1.3, 1.0),
    ],
    ids=[
        "not reported",
        "nan",
        "expected nan",
        "expected infinite",
        "hardly any load expected",
        "overfull as expected",
    ],
)
def test_what_says_nothing_corrects_nothing(silent):
    assert corrected(silent) == 1.0


def test_a_slowed_profile_takes_so_many_times_as_long():
    h20 = PROFILES["h20"]
    slow = slowed(h20, 1.5, 2.0)
    assert slow.prefill_s(20_000) == pytest.approx(1.5 * h20.prefill_s(20_000))
    assert slow.prefill_s(20_000, 3_000) == pytest.approx(1.5 * h20.prefill_s(20_000, 3_000))
    assert slow.kv_bytes(20_000) == h20.kv_bytes(20_000)
    assert slow.decode is not None and h20.decode is not None
    assert slow.decode.step_s(20) == pytest.approx(2 * h20.decode.step_s(20))


def test_a_mean_is_of_what_is_known():
    assert mean([0.2, None, math.nan, 0.4]) == pytest.approx(0.3)
    assert mean([None]) is None


@given(st.lists(st.tuples(st.floats(), st.one_of(st.none(), st.floats()), st.one_of(st.none(), st.floats()))))
def test_whatever_is_read_the_factor_stays_in_its_bounds(readings):
    correction = Correction()
    for expected, busy, queue in readings:
        reading = StageReading(expected, busy, queue)
        correction = correction.towards(reading, reading, reading)
        assert all(0.5 <= each <= 2.0 for each in (correction.remote, correction.prefill, correction.decode))
