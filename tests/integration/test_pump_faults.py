"""Two real pumps when the line, the peer or the sender is broken or hostile: never wrong bytes, never a leak, never a
hang."""

import random
import socket
import time
from collections import Counter

import pytest

from prfaas.kvcache.layout import chunk_ends
from prfaas.transfer import frames, greeting
from prfaas.transfer.frames import Cause, Kind, ProtocolError
from prfaas.transfer.pump import messages as m
from prfaas.transfer.replies import Progress
from tests.integration.kv_pumps import (
    CHUNK_TOKENS,
    LAYOUT,
    Line,
    Pump,
    WirePeer,
    assert_same_parts,
    assert_transfers,
    attempt_id,
    dial,
    end,
    kill,
    lost,
    parts_of,
    pumps,
    start_transfer,
)
from tests.integration.pump_load import abort_some, outcomes

TOKENS = 1000
PARTS = parts_of(TOKENS)
GIVEN_UP = {Cause.NO_PROGRESS.value, Cause.PEER_GONE.value}


# ---- the line ----------------------------------------------------------------


@pytest.mark.parametrize("integrity", ["crc32c", "aes-gcm"])
def test_field_B3_a_flipped_byte_fails_loudly(integrity: str) -> None:
    """One bit of one part changes on the way, on a lane that has proved itself: both nodes hear `checksum`, nobody
    decodes from it."""

    def flip(carried: int, data: bytes) -> bytes:
        at = 1_000_000 - carried
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if 0 <= at < len(data) else data

    with pumps({"integrity": integrity, "min_lanes": 1, "max_lanes": 1}, {"integrity": integrity}) as (source, target):
        line = Line(target, flip)
        attempt, _, _ = start_transfer(source, target, TOKENS, address=line.address)
        source.tell(m.PartsReady(attempt, PARTS))
        assert lost(target, attempt).cause == Cause.CHECKSUM.value
        assert lost(source, attempt).cause == Cause.CHECKSUM.value
        end(attempt, source, target)
        load = target.assert_baseline()
        assert load.refused[Cause.CHECKSUM.value] == 1, f"{load.refused}"


def test_damage_before_anything_has_opened_on_a_lane_costs_the_lane() -> None:
    """It could be anybody's frame. What it carried is sent again, and the refusal is counted."""
    damaged: list[Kind] = []

    def damage(_: int, data: bytes) -> bytes:
        if damaged or data[:4] != frames.MAGIC or len(data) < frames.HEADER_BYTES + 200:
            return data
        kind = frames.decode(data[: frames.HEADER_BYTES]).kind
        if kind not in frames.OF_ATTEMPT:
            return data
        damaged.append(kind)
        at = frames.HEADER_BYTES + 100
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    with pumps({"integrity": "aes-gcm"}, {"integrity": "aes-gcm"}) as (source, target):
        attempt, here, there = start_transfer(source, target, TOKENS, address=Line(target, damage).address)
        source.tell(m.PartsReady(attempt, PARTS))
        assert isinstance(target.outcome(attempt), m.Received)
        assert isinstance(source.outcome(attempt), m.Sent)
        assert damaged
        assert_same_parts(source, here, target, there, TOKENS)
        end(attempt, source, target)
        assert target.assert_baseline().refused == {Cause.CHECKSUM.value: 1}


def test_field_B5_a_truncated_stream_is_never_complete() -> None:
    """The line is cut before the last parts and does not come back: what arrived is not taken for a shorter
    sequence."""
    with pumps({"no_progress_s": 1.0}, {"no_progress_s": 1.0}) as (source, target):
        line = Line(target, lambda carried, data: data if carried < LAYOUT.size_bytes(TOKENS) - 100_000 else None)
        attempt, _, _ = start_transfer(source, target, TOKENS, address=line.address)
        source.tell(m.PartsReady(attempt, PARTS))
        assert lost(target, attempt).cause == Cause.PEER_GONE.value
        assert lost(source, attempt).cause == Cause.PEER_GONE.value
        end(attempt, source, target)
        source.assert_baseline()
        target.assert_baseline()


def test_long_gaps_between_parts_are_harmless() -> None:
    """Prefill may compute for longer than the no-progress time; keepalives tell that from a dead line."""
    with pumps({"no_progress_s": 1.0}, {"no_progress_s": 1.0}) as (source, target):
        attempt, _, _ = start_transfer(source, target, 64, address=Line(target).address)
        for index in parts_of(64)[:3]:
            silent_until = time.monotonic() + 2.5
            target.await_load(lambda _, until=silent_until: time.monotonic() > until)
            assert not target.pending(m.TransferLost) + source.pending(m.TransferLost)
            source.tell(m.PartsReady(attempt, (index,)))
        source.tell(m.PartsReady(attempt, parts_of(64)[3:]))
        assert isinstance(target.outcome(attempt), m.Received)
        assert isinstance(source.outcome(attempt), m.Sent)
        end(attempt, source, target)


def test_field_C1_a_line_that_carries_nothing_is_given_up_by_both() -> None:
    """Half open: no byte, no error. Both ends notice by themselves and give everything back."""
    with pumps({"no_progress_s": 0.5}, {"no_progress_s": 0.5}) as (source, target):
        line = Line(target)
        attempt, _, _ = start_transfer(source, target, TOKENS, address=line.address)
        source.tell(m.PartsReady(attempt, PARTS[:5]))
        target.await_load(lambda load: load.received_bytes_total > 0)
        line.stall()
        source.tell(m.PartsReady(attempt, PARTS[5:]))
        assert lost(target, attempt).cause in GIVEN_UP
        assert lost(source, attempt).cause in GIVEN_UP
        end(attempt, source, target)
        source.assert_baseline()
        target.assert_baseline()


def test_a_release_does_not_wait_for_a_stalled_line() -> None:
    """One thread is stuck in a write, the other in a read, and neither time-out is near: both spans come back at
    once."""
    with pumps({"no_progress_s": 600.0}, {"no_progress_s": 600.0}) as (source, target):
        tokens = 5000
        line = Line(target)
        attempt, _, _ = start_transfer(source, target, tokens, address=line.address)
        source.tell(m.PartsReady(attempt, parts_of(tokens)[:1]))
        target.await_load(lambda load: load.received_bytes_total > 0)
        line.stall()
        source.tell(m.PartsReady(attempt, parts_of(tokens)[1:]))
        assert await_standstill(source) < LAYOUT.size_bytes(tokens)
        end(attempt, source, target)
        target.assert_baseline()
        source.assert_baseline()


def test_field_B1_lanes_of_both_directions_are_told_apart() -> None:
    """A pump that sends and receives at a time hangs up on the lane that is stuck, and not on one that is called the
    same the other way."""
    settings = {"no_progress_s": 600.0}
    with pumps(settings, settings) as (source, target):
        tokens = 5000
        line = Line(target, bytes_per_s=20e6)
        attempt, _, _ = start_transfer(source, target, tokens, address=line.address)
        source.tell(m.PartsReady(attempt, parts_of(tokens)))
        assert_transfers(target, source)
        line.stall()
        await_standstill(source)
        end(attempt, target)
        target.assert_baseline()


def await_standstill(source: Pump) -> int:
    """Bytes sent when no more are: the buffers on the way are full."""
    reports: list[int] = []

    def still(load: m.Load) -> bool:
        reports.append(load.sent_bytes_total)
        return len(reports) > 3 and len(set(reports[-3:])) == 1

    source.await_load(still)
    return reports[-1]


# ---- dead and restarted peers ------------------------------------------------


def test_field_A1_a_dead_sender_costs_nothing() -> None:
    """The prefill node is killed in mid-transfer: decode hears of it when it does not come back, and its pool is whole
    after the release."""
    with pumps({}, {"no_progress_s": 1.0}) as (source, target):
        attempt, _, _ = start_transfer(source, target, TOKENS)
        source.tell(m.PartsReady(attempt, PARTS[:5]))
        target.await_load(lambda load: load.received_bytes_total > 0)
        kill(source)
        assert lost(target, attempt).cause == Cause.PEER_GONE.value
        target.release(attempt)
        assert target.assert_baseline().failed_transfers_total == 1


def test_field_A1_a_reservation_that_nobody_uses_ends_by_itself(pair: list[Pump]) -> None:
    """No offer ever comes and no release either: the deadline frees the span and the node is told."""
    _, target = pair
    attempt = attempt_id()
    target.reserve(attempt, TOKENS, receive=True, ttl_s=0.3)
    assert lost(target, attempt).cause == Cause.EXPIRED.value


def test_a_reservation_ends_in_mid_transfer(pair: list[Pump]) -> None:
    """The deadline holds while bytes arrive too; the sender hears why."""
    source, target = pair
    attempt = attempt_id()
    there = target.reserve(attempt, TOKENS, receive=True, ttl_s=0.5)
    source.reserve(attempt, TOKENS, receive=False)
    source.send_to(target, attempt, there, TOKENS)
    source.tell(m.PartsReady(attempt, PARTS[:5]))
    assert lost(target, attempt).cause == Cause.EXPIRED.value
    assert lost(source, attempt).cause == Cause.EXPIRED.value
    source.release(attempt)
    late = dial(target, attempt, there.generation)
    assert late.hello().kind is Kind.WELCOME
    with pytest.raises(ProtocolError, match="ticket: peer: expired"):
        late.offer(TOKENS, there.ticket)


def test_a_dead_receiver_fails_the_sender() -> None:
    """The decode node is killed in mid-transfer: the sender reports it although it has nothing to send just then."""
    with pumps({"no_progress_s": 1.0}, {}) as (source, target):
        attempt, _, _ = start_transfer(source, target, TOKENS)
        source.tell(m.PartsReady(attempt, PARTS[:5]))
        target.await_load(lambda load: load.received_bytes_total > 0)
        kill(target)
        assert lost(source, attempt).cause == Cause.PEER_GONE.value
        source.release(attempt)
        source.assert_baseline()


def test_a_sender_that_stops_says_so(pair: list[Pump]) -> None:
    """A release at the source is not taken for a broken line at the target."""
    source, target = pair
    attempt, _, _ = start_transfer(source, target, TOKENS)
    arrived = target.look().received_bytes_total
    source.tell(m.PartsReady(attempt, PARTS[:5]))
    target.await_load(lambda load: load.received_bytes_total > arrived)
    source.release(attempt)
    assert lost(target, attempt).cause == Cause.ABORTED.value
    target.release(attempt)


def test_field_C5_a_restarted_pump_has_its_port_back_at_once() -> None:
    """Connections that the old one closed are still winding down; the new one is reachable under its own
    incarnation."""
    with pumps({}, {}) as (source, before):
        dial(before, attempt_id(), 1).sock.sendall(bytes(frames.HEADER_BYTES))
        before.await_load(lambda load: load.refused_frames_total > 0)
        kill(before)
        with pumps({"port": before.port}) as (after,):
            source.tell(m.Probe(after.address))
            assert source.await_event(m.Probed) == m.Probed(address=before.address, incarnation=after.incarnation)
            assert_transfers(source, after)


def test_field_C2_a_peer_that_never_answers_is_given_up() -> None:
    """The port accepts and stays silent: the offer has its own deadline."""
    with pumps({"connect_s": 0.5}) as (source,), socket.create_server(("127.0.0.1", 0)) as mute:
        attempt = send_into_the_dark(source, f"127.0.0.1:{mute.getsockname()[1]}")
        assert lost(source, attempt).cause == Cause.CONNECT.value
        source.release(attempt)
        source.assert_baseline()


def test_an_abort_is_heard_while_the_sender_has_nothing_to_say() -> None:
    """The receiver gives up but does not hang up: its word is enough, no time-out has to pass."""
    with pumps({"no_progress_s": 600.0}) as (source,), socket.create_server(("127.0.0.1", 0)) as door:
        attempt = send_into_the_dark(source, f"127.0.0.1:{door.getsockname()[1]}")
        with door.accept()[0] as sock:
            peer = WirePeer(sock, attempt)
            assert peer.read().kind is Kind.HELLO
            peer.write(Kind.WELCOME, greeting.pack(greeting.Welcome(node="hand", incarnation=1)))
            assert peer.read().kind is Kind.OFFER
            peer.write(Kind.ACCEPT, greeting.pack(Progress(ranges=(), credit_bytes=1 << 20)))
            peer.write(Kind.ABORT, greeting.refusal(Cause.EXPIRED, "too late"))
            failure = lost(source, attempt)
            assert failure.cause == Cause.EXPIRED.value and "too late" in failure.detail
        source.release(attempt)


def test_nobody_at_the_address() -> None:
    """A closed port and an address that is none: `connect`, with the reason."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pumps({"connect_s": 0.5}) as (source,):
        for address, reason in ((f"127.0.0.1:{port}", "refused"), ("no port", "no port")):
            attempt = send_into_the_dark(source, address)
            failure = lost(source, attempt)
            assert failure.cause == Cause.CONNECT.value and reason in failure.detail, f"{failure}"
            source.release(attempt)


def test_a_release_does_not_wait_for_a_connect() -> None:
    """The peer's host swallows connection requests; the attempt can be released long before the connect gives up."""
    with pumps({"connect_s": 600.0}) as (source,), socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        with socket.create_connection(full.getsockname()):
            attempt = send_into_the_dark(source, f"127.0.0.1:{full.getsockname()[1]}")
            source.await_load(lambda load: load.connections == 1)
            source.release(attempt)
            assert lost(source, attempt).cause == Cause.ABORTED.value
            source.assert_baseline()


def send_into_the_dark(source: Pump, address: str) -> str:
    attempt = attempt_id()
    source.reserve(attempt, 64, receive=False)
    ends = chunk_ends(64, CHUNK_TOKENS)
    source.tell(
        m.Send(attempt=attempt, address=address, peer_incarnation=1, generation=1, chunk_ends=ends),
    )
    return attempt


# ---- everything gives back what it took --------------------------------------


def test_field_A5_aborts_at_any_point_leave_nothing_behind(pair: list[Pump]) -> None:
    """320 attempts released by either side at a random point of their life: the counters return to where they were, and
    no attempt has two outcomes on one side."""
    source, target = pair
    attempts = abort_some(source, target, random.Random(2024), 320)
    for pump in pair:
        pump.assert_baseline()
    source.await_load(lambda load: not any(line.queued_bytes or line.unsent_bytes for line in load.egress))
    assert outcomes(target, attempts) == Counter(attempts), "every receive ends once"
    assert max(outcomes(source, attempts).values()) == 1, "no send ends twice"
