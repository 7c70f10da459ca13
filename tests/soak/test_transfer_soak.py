"""Two real pumps for minutes: what they deliver stays right, and nothing of what they use grows.

Not part of the ordinary tests: `make soak-transfer`.
"""

import random
import time
from collections import Counter

import pytest

from prfaas.transfer.frames import Cause
from prfaas.transfer.pump import messages as m
from tests.integration.kv_pumps import (
    LAYOUT,
    Line,
    Pump,
    assert_same_parts,
    end,
    kill,
    lost,
    parts_of,
    pumps,
    start_transfer,
)
from tests.integration.pump_load import abort_some, lose_a_lane, outcomes, time_wait, transfer_some, usage
from tests.integration.pump_storm import Storm
from tests.soak.conftest import Measured

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

TOKENS = 4000
PARTS = parts_of(TOKENS)
SIZE = LAYOUT.size_bytes(TOKENS)
SLOW = 20e6
TRANSFERS, ABORTS, STORM, IDLE_S, FLIPS, CUTS = 10_000, 1_000, 6_000, 60.0, 25, 20
BOTH = pytest.mark.parametrize("integrity", ["crc32c", "aes-gcm"])


@BOTH
def test_field_B1_nothing_wrong_is_delivered_in_a_storm(integrity: str, measured: Measured) -> None:
    """Transfers both ways over 8 lanes, 40 % aborted somewhere, connections cut, spans used again at once: every byte
    that is delivered is the one that was sent, and memory that was given back stays as it is."""
    settings = {"integrity": integrity, "min_lanes": 8, "max_lanes": 8}
    with pumps(settings, settings) as both:
        lines = {pump: Line(pump) for pump in both}
        storm = Storm(both, lines, random.Random(integrity))
        began = time.monotonic()
        storm.run(STORM)
        took_s = time.monotonic() - began
        for line in lines.values():
            line.close()
        measured(seconds=took_s, **{what.replace(" ", "_"): count for what, count in sorted(storm.seen.items())})
        assert storm.seen["delivered"] > STORM // 3


def test_field_F6_many_transfers_leave_nothing_behind(measured: Measured) -> None:
    """10,000 transfers: connections, descriptors, threads, memory and TIME_WAIT are where they were after the first
    500."""
    with pumps({}, {}) as both:
        source, target = both
        for _ in range(50):
            transfer_some(source, target, 10)
        connections = source.assert_baseline().connections
        early, waiting, began = [usage(pump) for pump in both], time_wait(source, target), time.monotonic()
        for _ in range((TRANSFERS - 500) // 10):
            transfer_some(source, target, 10)
        took_s = time.monotonic() - began
        now = [usage(pump) for pump in both]
        grown = [[after - before for after, before in zip(*pair, strict=True)] for pair in zip(now, early, strict=True)]
        more = source.assert_baseline().connections - connections
        measured(transfers=TRANSFERS, per_s=(TRANSFERS - 500) / took_s, connections=connections, more_connections=more)
        measured(more_time_wait=time_wait(source, target) - waiting)
        for name, (fds, threads, resident) in zip(("source", "target"), grown, strict=True):
            measured(**{f"{name}_more_fds": fds, f"{name}_more_threads": threads, f"{name}_more_bytes": resident})
            assert fds <= 8 and threads <= 4 and resident < 16 << 20
        assert more <= max(0, 4 - connections) and time_wait(source, target) <= waiting + 8


def test_field_A5_aborts_at_any_point_leave_nothing_behind(measured: Measured) -> None:
    """1,000 attempts released by either side at a random point of their life: every counter is back at base line."""
    with pumps({}, {}) as both:
        source, target = both
        abort_some(source, target, random.Random(1), 80)
        early = [usage(pump) for pump in both]
        attempts = abort_some(source, target, random.Random(2), ABORTS)
        loads = [pump.assert_baseline() for pump in both]
        assert outcomes(target, attempts) == Counter(attempts), "every receive ends once"
        assert max(outcomes(source, attempts).values()) == 1, "no send ends twice"
        source.await_load(lambda load: not any(line.queued_bytes or line.unsent_bytes for line in load.egress))
        now = [usage(pump) for pump in both]
        measured(aborts=len(attempts), spans=sum(load.spans for load in loads))
        for name, before, after in zip(("source", "target"), early, now, strict=True):
            fds, threads, resident = (new - old for new, old in zip(after, before, strict=True))
            measured(**{f"{name}_more_fds": fds, f"{name}_more_threads": threads, f"{name}_more_bytes": resident})
            # Lanes are opened as there is work for them.
            assert threads <= 8 and fds <= 16 and resident < 16 << 20


def test_idle_lanes_carry_the_next_transfer_at_once(measured: Measured) -> None:
    """A minute without work: nobody hangs up, nothing is dialled, and what was open carries what comes next."""
    with pumps({}, {}) as (source, target):
        line = Line(target)
        took = [_timed(source, target, line) for _ in range(3)][-1]
        made, until = line.made, time.monotonic() + IDLE_S
        while time.monotonic() < until:
            for pump in (source, target):
                pump.load = None
                pump.await_load(lambda _: True)
        after = _timed(source, target, line)
        measured(idle_s=IDLE_S, connections=made, more_connections=line.made - made, before_s=took, after_s=after)
        assert line.made == made and len(line.open) == made
        line.close()


def _timed(source: Pump, target: Pump, line: Line) -> float:
    attempt, here, there = start_transfer(source, target, 64, address=line.address)
    began = time.monotonic()
    source.tell(m.PartsReady(attempt, parts_of(64)))
    assert isinstance(target.outcome(attempt), m.Received)
    took_s = time.monotonic() - began
    assert isinstance(source.outcome(attempt), m.Sent)
    assert_same_parts(source, here, target, there, 64)
    end(attempt, source, target)
    return took_s


@BOTH
def test_field_B5_a_lane_that_is_killed_costs_what_it_had_not_delivered(integrity: str, measured: Measured) -> None:
    """One connection ends, at any point of a transfer: what goes out twice is no more than what was not acknowledged
    then."""
    draw = random.Random(integrity)
    settings = {"integrity": integrity, "no_progress_s": 60.0}
    with pumps(settings, settings) as (source, target):
        line = Line(target, bytes_per_s=SLOW)
        sent = [lose_a_lane(source, target, line, TOKENS, draw.randrange(SIZE // 2)) for _ in range(CUTS)]
        lost, resent = [one.lost_bytes for one in sent], [one.resent_bytes for one in sent]
        measured(cuts=CUTS, connections=line.made, bytes=CUTS * SIZE)
        measured(unacknowledged_bytes=sum(lost), resent_bytes=sum(resent), most_unacknowledged_bytes=max(lost))
        line.close()


def test_field_C1_a_half_open_line_is_replaced(measured: Measured) -> None:
    """All connections swallow what is written to them and report nothing: new ones carry the rest."""
    settings = {"no_progress_s": 4.0}
    with pumps(settings, settings) as (source, target):
        line = Line(target, bytes_per_s=SLOW)
        attempt, here, there = start_transfer(source, target, TOKENS, address=line.address)
        source.tell(m.PartsReady(attempt, PARTS))
        target.await_load(lambda load: load.received_bytes_total > SIZE // 4)
        line.swallow()
        began = time.monotonic()
        sent = source.outcome(attempt)
        assert isinstance(sent, m.Sent) and isinstance(target.outcome(attempt), m.Received)
        assert_same_parts(source, here, target, there, TOKENS)
        measured(no_progress_s=4.0, done_after_s=time.monotonic() - began, resent_bytes=sent.resent_bytes, bytes=SIZE)
        end(attempt, source, target)
        line.close()


def test_field_A1_a_killed_peer_is_noticed(measured: Measured) -> None:
    """SIGKILL on either side in mid-transfer: the other one says so, and has everything back."""
    settings = {"no_progress_s": 2.0}
    for victim in ("source", "target"):
        with pumps(settings, settings) as (source, target):
            attempt, _, _ = start_transfer(source, target, TOKENS)
            source.tell(m.PartsReady(attempt, PARTS[:5]))
            target.await_load(lambda load: load.received_bytes_total > 0)
            dead, other = (source, target) if victim == "source" else (target, source)
            kill(dead)
            began = time.monotonic()
            assert lost(other, attempt).cause == Cause.PEER_GONE.value
            measured(no_progress_s=2.0, **{f"{victim}_killed_heard_after_s": time.monotonic() - began})
            other.release(attempt)
            other.assert_baseline()


@BOTH
def test_field_B3_a_flipped_byte_is_never_delivered(integrity: str, measured: Measured) -> None:
    """Anywhere in the stream, greeting and headers too: the transfer fails, or what the lane had goes over another."""
    draw = random.Random(3)
    settings = {"integrity": integrity, "no_progress_s": 2.0, "connect_s": 2.0}
    tokens = 300
    with pumps(settings, settings) as (source, target):
        ends: Counter[str] = Counter()
        for number in range(FLIPS):
            span_bytes = LAYOUT.size_bytes(tokens)
            at = draw.randrange(1000 if number % 4 == 0 else span_bytes)
            line = Line(target, lambda carried, data, at=at: _flipped(data, at - carried))
            attempt, here, there = start_transfer(source, target, tokens, address=line.address)
            source.tell(m.PartsReady(attempt, parts_of(tokens)))
            sent = source.outcome(attempt)
            if isinstance(sent, m.Sent):
                assert isinstance(target.outcome(attempt), m.Received)
                assert_same_parts(source, here, target, there, tokens)
                ends["delivered_after_all"] += 1
            else:
                ends[f"lost_{sent.cause}"] += 1
                target.tell(m.Stop(attempt))
                assert lost(target, attempt).boundary_tokens == 0
            end(attempt, source, target)
            line.close()
        measured(flips=FLIPS, **ends)
        assert sum(count for what, count in ends.items() if what != "delivered_after_all") > FLIPS // 2
        assert target.assert_baseline().refused[Cause.CHECKSUM.value] >= FLIPS // 2


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if 0 <= at < len(data) else data
