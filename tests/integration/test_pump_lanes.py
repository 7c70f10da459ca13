"""Real pumps and their lanes: what is lost with one is sent again and no more, they are kept and not piled up, and what
is urgent does not wait behind what is not."""

import random
import signal
import time

import pytest

from prfaas.transfer.pump import messages as m
from tests.integration.kv_pumps import (
    LAYOUT,
    Line,
    Pump,
    assert_same_parts,
    await_true,
    end,
    kill,
    lost,
    parts_of,
    pumps,
    start_transfer,
)
from tests.integration.pump_load import lose_a_lane, time_wait, transfer_some, usage

TOKENS = 4000
PARTS = parts_of(TOKENS)
SIZE = LAYOUT.size_bytes(TOKENS)
SLOW = 20e6


def assert_delivered(
    source: Pump, here: m.Reserved, target: Pump, there: m.Reserved, attempt: str, tokens: int = TOKENS
) -> m.Sent:
    """Both ends hear of success, the bytes are the same, and everything is given back."""
    sent, received = source.outcome(attempt), target.outcome(attempt)
    assert isinstance(sent, m.Sent) and isinstance(received, m.Received), f"{sent} {received}"
    assert sent.payload_bytes == received.payload_bytes == LAYOUT.size_bytes(tokens)
    assert_same_parts(source, here, target, there, tokens)
    end(attempt, source, target)
    return sent


# ---- lanes that are lost -----------------------------------------------------


@pytest.mark.parametrize("integrity", ["crc32c", "aes-gcm"])
def test_field_B5_a_lane_that_is_killed_costs_what_it_had_not_delivered(integrity: str) -> None:
    """One of the connections ends in mid-transfer: the others and a new one carry the rest. Only what was not
    acknowledged goes out twice, and the outcome is the same."""
    with pumps({"integrity": integrity}, {"integrity": integrity}) as (source, target):
        line = Line(target, bytes_per_s=SLOW)
        sent = lose_a_lane(source, target, line, TOKENS, SIZE // 4)
        assert sent.lost_bytes < SIZE // 4, f"{sent.lost_bytes} of {SIZE} were with one lane"
        line.close()


def test_field_B5_a_transfer_resumes_when_the_line_is_back() -> None:
    """All connections end and for a while no new one can be made: what had been applied is not sent again."""
    with pumps({}, {}) as (source, target):
        line = Line(target, bytes_per_s=SLOW)
        attempt, here, there = start_transfer(source, target, TOKENS, address=line.address)
        source.tell(m.PartsReady(attempt, PARTS))
        target.await_load(lambda load: load.received_bytes_total > SIZE // 2)
        line.go_down()
        source.await_load(lambda load: load.connections == 0)
        line.heal()
        sent = assert_delivered(source, here, target, there, attempt)
        assert 0 < sent.resent_bytes < SIZE // 3, f"{sent.resent_bytes} of {SIZE} were on their way"
        line.close()


def test_lanes_that_are_cut_again_and_again_do_not_spoil_the_transfer() -> None:
    """Whatever is lost, whenever: every piece is applied exactly once, and counted once."""
    draw = random.Random(7)
    with pumps({}, {}) as (source, target):
        line = Line(target, bytes_per_s=SLOW)
        attempt, here, there = start_transfer(source, target, TOKENS, address=line.address)
        source.tell(m.PartsReady(attempt, PARTS))
        for _ in range(6):
            carried = line.carried
            await_true(lambda carried=carried: line.carried > carried + SIZE // 12, "the line carries nothing more")
            line.cut(draw.randrange(1, 3))
        assert_delivered(source, here, target, there, attempt)
        assert target.assert_baseline().received_bytes_total == SIZE
        line.close()


def test_field_C1_a_half_open_line_is_replaced() -> None:
    """The old connections swallow everything and report nothing; the transfer goes on over new ones."""
    with pumps({"no_progress_s": 4.0}, {"no_progress_s": 4.0}) as (source, target):
        line = Line(target, bytes_per_s=SLOW)
        attempt, here, there = start_transfer(source, target, TOKENS, address=line.address)
        source.tell(m.PartsReady(attempt, PARTS))
        target.await_load(lambda load: load.received_bytes_total > SIZE // 4)
        line.swallow()
        assert_delivered(source, here, target, there, attempt)
        line.close()


def test_field_C5_a_peer_that_comes_back_is_another() -> None:
    """The decode pump is killed and one starts on its port: the transfer to the old one ends, one to the new one goes
    through, on lanes of its own."""
    with pumps({"no_progress_s": 15.0}, {}) as (source, before):
        attempt, _, _ = start_transfer(source, before, TOKENS)
        source.tell(m.PartsReady(attempt, PARTS[:5]))
        before.await_load(lambda load: load.received_bytes_total > 0)
        kill(before)
        with pumps({"port": before.port}) as (after,):
            failure = lost(source, attempt)
            assert failure.cause == "incarnation", f"{failure}"
            source.release(attempt)
            attempt, here, there = start_transfer(source, after, TOKENS)
            source.tell(m.PartsReady(attempt, PARTS))
            assert_delivered(source, here, after, there, attempt)


def test_field_A5_what_was_written_for_nothing_does_not_count_as_waiting() -> None:
    """Released right after it was written, nobody acknowledges it any more: by what the kernel says it has left, and
    the scheduler sees no congestion where there is none."""
    tokens = 6  # few enough for the buffers of a peer that reads nothing
    size = LAYOUT.size_bytes(tokens)
    with pumps({"no_progress_s": 60.0}, {}) as (source, target):
        for number in range(1, 9):
            attempt, _, _ = start_transfer(source, target, tokens)
            received = target.look().received_bytes_total
            source.tell(m.PartsReady(attempt, parts_of(tokens)[:1]))
            target.await_load(lambda load, received=received: load.received_bytes_total > received)
            target.process.send_signal(signal.SIGSTOP)
            source.tell(m.PartsReady(attempt, parts_of(tokens)[1:]))
            source.await_load(lambda load, sent=size * number: load.sent_bytes_total == sent)
            source.release(attempt)
            target.process.send_signal(signal.SIGCONT)
            target.release(attempt)
            source.await_load(lambda load: not load.egress[0].queued_bytes)


# ---- lanes that are kept -----------------------------------------------------


def test_field_F6_many_transfers_share_a_few_connections() -> None:
    """2,000 transfers: connections, descriptors, threads, memory and TIME_WAIT stay where they were after the first
    hundred."""
    with pumps({"min_lanes": 4}, {}) as (source, target):
        for _ in range(10):
            transfer_some(source, target, 10)
        connections = source.assert_baseline().connections
        early, waiting = [usage(pump) for pump in (source, target)], time_wait(source, target)
        for _ in range(190):
            transfer_some(source, target, 10)
        assert source.assert_baseline().connections <= max(connections, 4)
        for pump, (fds, threads, resident) in zip((source, target), early, strict=True):
            now = usage(pump)
            assert now[0] <= fds + 8 and now[1] <= threads + 4, f"{now}, was {fds, threads}"
            assert now[2] - resident < 16 << 20, f"grew by {now[2] - resident}"
        assert time_wait(source, target) <= waiting + 8


def test_idle_lanes_are_kept_alive_and_used_again() -> None:
    """Several no-progress times without work: keepalives go both ways, and the next transfer dials nobody."""
    with pumps({"no_progress_s": 2.0}, {"no_progress_s": 2.0}) as (source, target):
        line = Line(target)
        for _ in range(2):
            attempt, here, there = start_transfer(source, target, TOKENS, address=line.address)
            source.tell(m.PartsReady(attempt, PARTS))
            assert_delivered(source, here, target, there, attempt)
            made, until = line.made, time.monotonic() + 4.0
            source.await_load(lambda _, until=until: time.monotonic() > until)
            assert line.made == made and len(line.open) == made
        line.close()


def test_lanes_without_work_are_closed_in_the_end() -> None:
    with pumps({"lane_idle_s": 0.5}, {}) as (source, target):
        attempt, here, there = start_transfer(source, target, TOKENS)
        source.tell(m.PartsReady(attempt, PARTS))
        assert_delivered(source, here, target, there, attempt)
        source.await_load(lambda load: load.connections == 0)
        target.await_load(lambda load: load.connections == 0)


# ---- sharing -----------------------------------------------------------------


def test_field_F1_an_urgent_transfer_overtakes_a_bulk_one() -> None:
    """A small transfer that a request waits for, begun behind a big one on the same lanes, is there long before it."""
    with pumps({}, {}) as (source, target):
        line = Line(target, bytes_per_s=SLOW)
        bulk, _, _ = start_transfer(source, target, TOKENS, address=line.address, urgency=3)
        source.tell(m.PartsReady(bulk, PARTS))
        target.await_load(lambda load: load.received_bytes_total > 0)
        urgent, here, there = start_transfer(source, target, 64, address=line.address, urgency=1)
        source.tell(m.PartsReady(urgent, parts_of(64)))
        assert_delivered(source, here, target, there, urgent, 64)
        assert not [sent for sent in source.pending(m.Sent) if sent.attempt == bulk], "the bulk was there first"
        assert isinstance(source.outcome(bulk), m.Sent)
        line.close()


def test_field_F11_tenants_share_a_line_by_weight() -> None:
    """Two tenants with 3:1 and more to send than the line carries: when the first has all of its own, the other has a
    third."""
    with pumps({}, {}) as (source, target):
        line = Line(target, bytes_per_s=SLOW)
        heavy, _, _ = start_transfer(source, target, 3000, address=line.address, tenant="a", weight=3.0)
        light, _, there = start_transfer(source, target, 3000, address=line.address, tenant="b", weight=1.0)
        target.span(there)[:] = bytes(there.nbytes)
        for attempt in (heavy, light):
            source.tell(m.PartsReady(attempt, parts_of(3000)))
        assert isinstance(target.outcome(heavy), m.Received)
        arrived = filled(target.span(there))
        assert 0.2 < arrived < 0.5, f"{arrived:.2f} of the light one"
        assert isinstance(source.outcome(light), m.Sent)
        line.close()


def filled(span: memoryview) -> float:
    """The share of a span of zeros that random bytes have taken the place of."""
    sample = span[:: 1 << 12]
    return sum(byte != 0 for byte in sample) / len(sample) * 256 / 255


def test_an_allowance_holds_over_all_lanes() -> None:
    """Several lanes together send no faster than their region may, and are told of a change at once."""
    allowed = 20e6
    with pumps({}, {}) as (source, target):
        source.tell(m.Allow("far", allowed))
        attempt, here, there = start_transfer(source, target, TOKENS, region="far")
        began = time.monotonic()
        source.tell(m.PartsReady(attempt, PARTS))
        assert_delivered(source, here, target, there, attempt)
        took_s = time.monotonic() - began
        assert took_s > 0.7 * SIZE / allowed, f"{SIZE / took_s / 1e6:.0f} MB/s"
        source.tell(m.Allow("far", None))
        attempt, here, there = start_transfer(source, target, TOKENS, region="far")
        began = time.monotonic()
        source.tell(m.PartsReady(attempt, PARTS))
        assert_delivered(source, here, target, there, attempt)
        assert time.monotonic() - began < took_s


def test_a_pump_reports_what_its_lines_do() -> None:
    """Round trip, lanes and congestion control of a region come from the kernel, once per report."""
    with pumps({"congestion": "cubic"}, {}) as (source, target):
        attempt, here, there = start_transfer(source, target, TOKENS, region="far")
        source.tell(m.PartsReady(attempt, PARTS))
        assert_delivered(source, here, target, there, attempt)
        load = source.await_load(lambda load: bool(load.egress and load.egress[0].sent_bytes >= SIZE))
        (line,) = load.egress
        assert line.region == "far" and line.lanes >= 1 and line.congestion == "cubic"
        assert line.rtt_s is not None and 0 < line.rtt_s < 1
        assert line.queued_bytes == 0 and line.queue_age_s == 0


def test_a_congestion_control_that_is_not_there_is_reported() -> None:
    """The lanes run with what the system has, and say so."""
    with pumps({"congestion": "nonesuch"}, {}) as (source, target):
        attempt, here, there = start_transfer(source, target, 64, region="far")
        source.tell(m.PartsReady(attempt, parts_of(64)))
        assert_delivered(source, here, target, there, attempt, 64)
        load = source.await_load(lambda load: bool(load.egress and load.egress[0].congestion))
        assert load.egress[0].congestion not in ("", "nonesuch")
