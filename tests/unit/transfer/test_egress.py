"""Opposite `prfaas/transfer/egress.py`: a sender sees what the line carries only while something waits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.transfer.egress import SETTLE_S, EgressMeter, Sent


def test_the_goodput_of_a_backlog_is_the_rate_of_the_line():
    """A thousand bytes a second leave for ten seconds, and there is always more."""
    meter = EgressMeter()
    meter.queued("b", 11_000, 0.0)
    for second in range(1, 11):
        meter.sent("b", 1000, float(second))
    (sent,) = meter.readings(10.0)
    assert (sent.queued_bytes, sent.sent_bytes) == (1000, 10_000)
    assert sent.backlogged_bytes / sent.backlogged_s == pytest.approx(1000, rel=0.02)


def test_the_first_burst_into_the_buffers_of_a_line_does_not_count():
    """What leaves at once says how large buffers are."""
    meter = EgressMeter()
    meter.queued("b", 5000, 0.0)
    meter.sent("b", 4000, SETTLE_S)
    meter.sent("b", 500, SETTLE_S + 1.0)
    (sent,) = meter.readings(SETTLE_S + 1.0)
    assert (sent.sent_bytes, sent.backlogged_bytes) == (4500, 500)
    assert sent.backlogged_s == pytest.approx(1.0)


def test_a_line_that_takes_nothing_has_a_goodput_of_nothing():
    """Time counts also while no byte leaves, and it is not counted again when one does."""
    meter = EgressMeter()
    meter.queued("b", 100, 0.0)
    (stuck,) = meter.readings(SETTLE_S + 5.0)
    assert stuck.backlogged_bytes == 0 and stuck.backlogged_s == pytest.approx(5.0)
    meter.sent("b", 10, SETTLE_S + 10.0)
    (sent,) = meter.readings(SETTLE_S + 10.0)
    assert sent.backlogged_s == pytest.approx(10.0)


def test_time_without_a_backlog_counts_for_nothing():
    """A sender that waits for prefill has seen nothing of the line."""
    meter = EgressMeter()
    for second in range(0, 100, 10):
        meter.queued("b", 10, float(second))
        meter.sent("b", 10, second + SETTLE_S / 2)
    assert meter.readings(100.0) == (Sent("b", 0, 100, 0, 0.0),)


def test_a_transfer_that_is_given_up_waits_no_longer():
    """What will not be sent is no queue."""
    meter = EgressMeter()
    meter.queued("b", 100, 0.0)
    meter.dropped("b", 100, 3.0)
    (sent,) = meter.readings(9.0)
    assert sent.queued_bytes == 0 and sent.backlogged_s == pytest.approx(3.0 - SETTLE_S)


def test_regions_are_counted_apart():
    """In the order of their names."""
    meter = EgressMeter()
    for region in ("c", "b"):
        meter.queued(region, 5, 0.0)
    assert [sent.region for sent in meter.readings(1.0)] == ["b", "c"]


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(0, 5)), max_size=30))
def test_counters_only_grow(events: list[tuple[int, float]]):
    """Whatever the order of time stamps, differences of readings are never below 0."""
    meter, before = EgressMeter(), Sent("b", 0, 0, 0, 0.0)
    for nbytes, at in events:
        meter.queued("b", nbytes, at)
        if nbytes:
            meter.sent("b", nbytes // 2, at)
            (after,) = meter.readings(at)
            assert after.sent_bytes >= before.sent_bytes and after.backlogged_s >= before.backlogged_s
            assert after.backlogged_bytes >= before.backlogged_bytes
            before = after
        meter.check()
