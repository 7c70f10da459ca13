"""Costs learned from what nodes report."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.cluster import NodeId
from prfaas.curve import Curve
from prfaas.profile import CASE_STUDY, DecodeProfile, shipped
from prfaas.scheduling.calibration import (
    COLD_OBSERVATIONS,
    HALF_LIFE,
    NEEDED,
    WINDOW,
    CalibratedDecode,
    CalibratedPrefill,
    DecodeCalibration,
    PrefillCalibration,
    PrefillObservation,
    StepObservation,
)
from prfaas.scheduling.evidence import InsufficientData
from prfaas.scheduling.lengths import Lengths

H20 = shipped(CASE_STUDY, "h20")
LENGTHS = Lengths.log_normal(9.90, 1.00, 128, 131_072)
#: Where nine of ten prompts are.
USUAL_TOKENS = (5_000, 8_192, 13_000, 20_000, 32_768, 48_000, 64_000)
NODE = NodeId("pd-0")

Seconds = Callable[[float], float]


def warm(calibration: PrefillCalibration | DecodeCalibration) -> None:
    """A node that has been at work for a while."""
    for _ in range(COLD_OBSERVATIONS):
        if isinstance(calibration, PrefillCalibration):
            calibration.observe(NODE, PrefillObservation(1000, 0, 99.0))
        else:
            calibration.observe(NODE, StepObservation(1, 99.0))


def observe(
    calibration: PrefillCalibration, truth: Seconds, count: int, seed: int, outliers: float = 0.2, factor: float = 10.0
) -> None:
    """Prompts of the case study, two in five with a cached prefix, timed with 3 % of noise and with outliers."""
    chance = random.Random(seed)
    for _ in range(count):
        total = round(LENGTHS.quantile(chance.random()))
        cached = 0 if chance.random() < 0.6 else int(total * 0.8 * chance.random())
        noise = math.exp(chance.gauss(0, 0.03)) * (factor if chance.random() < outliers else 1)
        calibration.observe(NODE, PrefillObservation(total, cached, (truth(total) - truth(cached)) * noise))
        calibration.check()


def learned(calibration: PrefillCalibration) -> CalibratedPrefill:
    found = calibration.fit()
    assert isinstance(found, CalibratedPrefill)
    return found


def error(found: CalibratedPrefill, truth: Seconds) -> float:
    return max(abs(found.curve(tokens) / truth(tokens) - 1) for tokens in USUAL_TOKENS)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.3, 3.0), st.floats(0, 0.5), st.sampled_from([0.1, 10.0]))
def test_it_comes_within_5_percent_although_a_fifth_of_the_reports_is_ten_times_off(
    seed: int, speed: float, bend: float, factor: float
) -> None:
    """Whether the prior is too fast or too slow, and when the true curve bends more with length than the prior."""

    def truth(tokens: float) -> float:
        return speed * H20.prefill_s(tokens) * (1 + bend * tokens / 131_072)

    calibration = PrefillCalibration(H20.prefill)
    warm(calibration)
    observe(calibration, truth, 150, seed, factor=factor)
    assert error(learned(calibration), truth) < 0.05
    assert learned(calibration).masked_share > 0.05


def test_the_outliers_are_what_is_masked() -> None:
    """None where none is; about their share where they are."""
    shares = []
    for outliers in (0.0, 0.3):
        calibration = PrefillCalibration(H20.prefill)
        warm(calibration)
        observe(calibration, H20.prefill_s, WINDOW, 7, outliers=outliers)
        shares.append(learned(calibration).masked_share)
    assert shares[0] < 0.01
    assert 0.2 < shares[1] < 0.4


def test_drift_is_followed() -> None:
    """Two half-lives after the hardware became 40 % slower, the curve is too."""
    calibration = PrefillCalibration(H20.prefill)
    warm(calibration)
    observe(calibration, H20.prefill_s, WINDOW, 1)
    assert error(learned(calibration), H20.prefill_s) < 0.03

    def slower(tokens: float) -> float:
        return 1.4 * H20.prefill_s(tokens)

    observe(calibration, slower, 2 * HALF_LIFE, 2)
    assert error(learned(calibration), slower) < 0.05


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 200_000), st.floats(0, 0.99), st.floats(1e-4, 1e4)), min_size=NEEDED, max_size=60)
)
def test_whatever_is_reported_more_tokens_never_take_less_time(reports: list[tuple[int, float, float]]) -> None:
    """Nonsense in, a wrong curve out, but never one that is negative or falls."""
    calibration = PrefillCalibration(H20.prefill)
    warm(calibration)
    for total, cached_part, seconds in reports:
        calibration.observe(NODE, PrefillObservation(total, int(total * cached_part), seconds))
    curve = learned(calibration).curve
    times = [curve(tokens) for tokens in range(0, 2_000_000, 9_973)]
    assert times == sorted(times)
    assert times[0] == 0 < curve(1)


def test_where_nothing_was_observed_the_prior_gives_the_shape() -> None:
    """Only short prompts came, all half as fast as believed: then long ones are believed to be, too."""
    calibration = PrefillCalibration(H20.prefill)
    warm(calibration)
    for step in range(40):
        total = 2000 + 50 * step
        calibration.observe(NODE, PrefillObservation(total, 0, 2 * H20.prefill_s(total)))
    assert learned(calibration).curve(100_000) == pytest.approx(2 * H20.prefill_s(100_000), rel=0.1)


def test_a_prior_of_two_points_can_learn_to_bend() -> None:
    """Attention is quadratic whether or not the first guess was."""

    def truth(tokens: float) -> float:
        return 5e-5 * tokens + 5e-10 * tokens**2

    calibration = PrefillCalibration(Curve.through([(1000, 0.1), (128_000, 12.8)], from_zero=True))
    warm(calibration)
    observe(calibration, truth, 200, 3)
    assert error(learned(calibration), truth) < 0.05


def test_field_K4_a_cold_node_is_not_believed_and_too_little_is_said_to_be_too_little() -> None:
    """A node's first prefills compile kernels. After a start and after a change of role they are left out again."""
    calibration = PrefillCalibration(H20.prefill)
    for number in range(20):
        for _ in range(COLD_OBSERVATIONS):
            calibration.observe(NodeId(f"pd-{number}"), PrefillObservation(10_000, 0, 60.0))
    assert calibration.fit() == InsufficientData("prefill observations", 0, NEEDED)

    for report in range(NEEDED):
        assert isinstance(calibration.fit(), InsufficientData)
        calibration.observe(NodeId("pd-0"), PrefillObservation(10_000 + report, 0, H20.prefill_s(10_000 + report)))
    before = learned(calibration)
    calibration.started(NodeId("pd-0"))
    for _ in range(COLD_OBSERVATIONS):
        calibration.observe(NodeId("pd-0"), PrefillObservation(10_000, 0, 60.0))
    assert learned(calibration) == before
    calibration.left(NodeId("pd-0"))
    calibration.observe(NodeId("pd-0"), PrefillObservation(10_000, 0, 60.0))
    assert learned(calibration) == before


@pytest.mark.parametrize(
    "report",
    [
        PrefillObservation(1000, 0, math.nan),
        PrefillObservation(1000, 0, math.inf),
        PrefillObservation(1000, 0, 0.0),
        PrefillObservation(1000, 0, -1.0),
        PrefillObservation(1000, 1000, 1.0),
        PrefillObservation(1000, -1, 1.0),
    ],
)
def test_what_cannot_be_true_is_dropped(report: PrefillObservation) -> None:
    """A clock that jumped, a report that contradicts itself: neither counts, nor warms a node up."""
    calibration = PrefillCalibration(H20.prefill)
    for _ in range(5 * NEEDED):
        calibration.observe(NODE, report)
    calibration.check()
    assert calibration.fit() == InsufficientData("prefill observations", 0, NEEDED)
    for _ in range(COLD_OBSERVATIONS + NEEDED - 1):
        calibration.observe(NODE, PrefillObservation(1000, 0, 1.0))
    assert isinstance(calibration.fit(), InsufficientData)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.001, 0.03), st.floats(0.0001, 0.004))
def test_the_decode_step_is_learned_from_steps_of_many_batches(seed: int, base: float, per_sequence: float) -> None:
    """Within 5 % at every batch, with a fifth of the steps ten times too long."""
    truth, chance = DecodeProfile(base, per_sequence, 20), random.Random(seed)
    prior = H20.decode
    assert prior is not None
    calibration = DecodeCalibration(prior)
    warm(calibration)
    for _ in range(200):
        batch = chance.randint(1, 20)
        noise = math.exp(chance.gauss(0, 0.03)) * (10 if chance.random() < 0.2 else 1)
        calibration.observe(NODE, StepObservation(batch, truth.step_s(batch) * noise))
        calibration.check()
    found = calibration.fit()
    assert isinstance(found, CalibratedDecode)
    assert found.decode.max_batch == 20
    for batch in range(1, 21):
        assert found.decode.step_s(batch) == pytest.approx(truth.step_s(batch), rel=0.05)


def test_a_decode_step_that_is_always_the_same_does_not_become_negative_per_sequence() -> None:
    """Steps that get shorter with the batch are noise; the batch then costs nothing, and no more than memory holds
    fits."""
    prior = H20.decode
    assert prior is not None
    calibration = DecodeCalibration(prior)
    assert calibration.fit() == InsufficientData("decode observations", 0, NEEDED)
    warm(calibration)
    for step in range(100):
        calibration.observe(NODE, StepObservation(1 + step % 20, 0.020 - 0.0002 * (step % 20)))
    found = calibration.fit()
    assert isinstance(found, CalibratedDecode)
    assert found.decode.per_sequence_s >= 0
    assert found.decode.step_s(10) == pytest.approx(0.018, rel=0.1)
