"""Opposite `prfaas/node/telemetry.py`: rates between two readings of the pump's counters."""

from prfaas.cluster import Egress, RegionId
from prfaas.node.telemetry import rates
from prfaas.transfer.pump.messages import Egress as Counters


def counters(sent: int, backlogged: float, backlogged_s: float, queued: int = 0) -> Counters:
    return Counters(
        region="b", queued_bytes=queued, sent_bytes=sent, backlogged_bytes=backlogged, backlogged_s=backlogged_s
    )


def test_rates_cover_the_time_between_two_readings():
    """What was sent over the time that has passed, and the goodput over the time that had a backlog."""
    found = rates(counters(100, 50, 1.0), counters(1100, 450, 1.5, queued=7), elapsed_s=2.0)
    assert found == Egress(RegionId("b"), 7, 500.0, 800.0)


def test_without_a_backlog_nothing_is_known_of_the_line():
    """A moment of it says nothing either."""
    assert rates(counters(0, 0, 1.0), counters(10, 10, 1.01), 1.0).backlogged_bytes_per_s is None
    assert rates(counters(0, 0, 1.0), counters(10, 0, 1.0), 0.0).sent_bytes_per_s == 0.0


def test_a_line_that_takes_nothing_shows_a_goodput_of_nothing():
    """Not an unknown one."""
    assert rates(counters(5, 5, 1.0), counters(5, 5, 3.0, queued=99), 2.0).backlogged_bytes_per_s == 0.0
