"""Opposite `prfaas/node/telemetry.py`: rates between two readings of the pump's counters."""

from dataclasses import replace

import msgspec

from prfaas.cluster import Egress, NodeLoad, RegionId
from prfaas.node.telemetry import decode_busy, rates
from prfaas.transfer.pump.messages import Egress as Counters


def counters(sent: int, backlogged: float, backlogged_s: float, queued: int = 0) -> Counters:
    return Counters(
        region="b", queued_bytes=queued, sent_bytes=sent, backlogged_bytes=backlogged, backlogged_s=backlogged_s
    )


def test_rates_cover_the_time_between_two_readings():
    """What was sent over the time that has passed, and the goodput over the time that had a backlog."""
    found = rates(counters(100, 50, 1.0), counters(1100, 450, 1.5, queued=7), elapsed_s=2.0)
    assert found == Egress(RegionId("b"), 7, 500.0, 800.0, retransmitted_bytes_per_s=0.0)


def test_what_the_lanes_say_is_passed_on():
    """Retransmissions become a rate; the rest is as it was last seen."""
    before = msgspec.structs.replace(counters(0, 0, 0.0), retransmitted_bytes=1000, rtt_s=0.5, lanes=1)
    after = msgspec.structs.replace(
        counters(0, 0, 0.0),
        retransmitted_bytes=1600,
        rtt_s=0.03,
        lanes=4,
        congestion="bbr",
        queue_age_s=0.2,
        unsent_bytes=77,
        stalled_s=0.6,
    )
    found = rates(before, after, elapsed_s=2.0)
    assert (found.rtt_s, found.retransmitted_bytes_per_s, found.queue_age_s) == (0.03, 300.0, 0.2)
    assert (found.unsent_bytes, found.lanes, found.congestion, found.stalled_s) == (77, 4, "bbr", 0.6)


def test_who_uses_up_its_allowance_learns_nothing_of_the_line():
    """A line taken for as narrow as what the leader allows would make routing avoid it. One that does not even carry
    that much has shown what it is."""
    before, brief = counters(0, 0.0, 0.0), counters(950, 950.0, 1.0, queued=9)
    after = msgspec.structs.replace(brief, queue_age_s=1.0)
    assert rates(before, after, 1.0, allowed=1000.0).backlogged_bytes_per_s is None
    assert rates(before, after, 1.0, allowed=2000.0).backlogged_bytes_per_s == 950.0
    assert rates(before, brief, 1.0, allowed=2000.0).backlogged_bytes_per_s is None
    assert rates(before, brief, 1.0).backlogged_bytes_per_s == 950.0
    assert rates(before, brief, 1.0, allowed=4000.0).backlogged_bytes_per_s == 950.0, "far below, and all is on its way"
    assert rates(before, after, 1.0, allowed=1000.0).sent_bytes_per_s == 950.0


def test_without_a_backlog_nothing_is_known_of_the_line():
    """A moment of it says nothing either."""
    assert rates(counters(0, 0, 1.0), counters(10, 10, 1.01), 1.0).backlogged_bytes_per_s is None
    assert rates(counters(0, 0, 1.0), counters(10, 0, 1.0), 0.0).sent_bytes_per_s == 0.0


def test_a_line_that_takes_nothing_shows_a_goodput_of_nothing():
    """Not an unknown one."""
    assert rates(counters(5, 5, 1.0), counters(5, 5, 3.0, queued=99), 2.0).backlogged_bytes_per_s == 0.0


def test_decode_is_as_busy_as_what_runs_short_first():
    """Batch slots, or the memory that an engine has for sequences, as far as it tells; without sequences that memory
    is not decode's."""
    load = NodeLoad(decoding=8, max_batch=32)
    assert decode_busy(load) == 0.25
    assert decode_busy(replace(load, engine_kv_ratio=0.75)) == 0.75
    assert decode_busy(replace(load, engine_kv_ratio=0.1)) == 0.25
    assert decode_busy(replace(load, decoding=0, engine_kv_ratio=0.75)) == 0.0
    assert decode_busy(replace(load, decoding=40)) == 1.0
    assert decode_busy(NodeLoad(decoding=8)) is None
