"""Two real pumps when the line, the peer or the sender is broken or hostile: never wrong bytes, never a leak, never a
hang."""

import os
import random
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator

import psutil
import pytest

from prfaas.kvcache.layout import TensorKind, chunk_ends
from prfaas.transfer import frames, greeting
from prfaas.transfer.frames import Cause, Kind, ProtocolError
from prfaas.transfer.pump import messages as m
from prfaas.transfer.pump.plane import MAX_LANES
from tests.integration.kv_pumps import (
    CHUNK_TOKENS,
    LAYOUT,
    LIVENESS_S,
    Line,
    Pump,
    WirePeer,
    attempt_id,
    dial,
    kill,
    parts_of,
    pumps,
    start_transfer,
)

TOKENS = 1000
PARTS = parts_of(TOKENS)


@pytest.fixture(scope="module")
def shared() -> Iterator[list[Pump]]:
    with pumps({}, {}) as started:
        yield started


@pytest.fixture
def pair(shared: list[Pump]) -> Iterator[list[Pump]]:
    """Two pumps. Whatever a test does to them, they end with nothing reserved or connected, and still work."""
    yield shared
    for pump in shared:
        pump.hang_up()
    for pump in shared:
        pump.assert_baseline()
    assert_transfers(*shared)


def assert_transfers(source: Pump, target: Pump) -> None:
    """An ordinary transfer works and leaves nothing behind."""
    attempt, here, there = start_transfer(source, target, 200)
    source.tell(m.PartsReady(attempt, parts_of(200)))
    assert isinstance(source.outcome(attempt), m.Sent)
    assert isinstance(target.outcome(attempt), m.Received)
    latent = next(part for part in LAYOUT.parts(200, chunk_ends(200, CHUNK_TOKENS)) if part.layer == 1)
    place = slice(latent.offset, latent.offset + latent.nbytes)
    assert source.span(here)[place] == target.span(there)[place]
    end(attempt, source, target)


def end(attempt: str, *held_by: Pump) -> None:
    for pump in held_by:
        pump.release(attempt)


def lost(pump: Pump, attempt: str) -> m.TransferLost:
    outcome = pump.outcome(attempt)
    assert isinstance(outcome, m.TransferLost), f"{outcome}"
    return outcome


def is_state(index: int) -> bool:
    part = LAYOUT.parts(TOKENS, chunk_ends(TOKENS, CHUNK_TOKENS))[index]
    return LAYOUT.layers[part.layer][part.tensor].kind is TensorKind.STATE


# ---- the line ----------------------------------------------------------------


def test_field_B3_a_flipped_byte_fails_loudly(pair: list[Pump]) -> None:
    """One bit of one part changes on the way: both nodes hear `checksum`, nobody decodes from it."""
    source, target = pair

    def flip(carried: int, data: bytes) -> bytes:
        at = 1_000_000 - carried
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if 0 <= at < len(data) else data

    line = Line(target, flip)
    attempt, _, _ = start_transfer(source, target, TOKENS, address=line.address)
    source.tell(m.PartsReady(attempt, PARTS))
    assert lost(target, attempt).cause == Cause.CHECKSUM.value
    assert lost(source, attempt).cause == Cause.CHECKSUM.value
    end(attempt, source, target)


def test_field_B5_a_truncated_stream_is_never_complete(pair: list[Pump]) -> None:
    """The line is cut inside the last part: what arrived is not taken for a shorter sequence."""
    source, target = pair
    line = Line(target, lambda carried, data: data if carried < LAYOUT.size_bytes(TOKENS) - 100_000 else None)
    attempt, _, _ = start_transfer(source, target, TOKENS, address=line.address)
    source.tell(m.PartsReady(attempt, PARTS))
    assert lost(target, attempt).cause == Cause.PEER_GONE.value
    assert lost(source, attempt).cause == Cause.PEER_GONE.value
    end(attempt, source, target)


def test_long_gaps_between_parts_are_harmless() -> None:
    """Prefill may compute for longer than the no-progress time; keepalives tell that from a dead line."""
    with pumps({"no_progress_s": 0.5}, {"no_progress_s": 0.5}) as (source, target):
        attempt, _, _ = start_transfer(source, target, 64, address=Line(target).address)
        for index in parts_of(64)[:3]:
            silent_until = time.monotonic() + 1.5
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
        assert lost(target, attempt).cause == Cause.NO_PROGRESS.value
        assert lost(source, attempt).cause == Cause.NO_PROGRESS.value
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
    """The prefill node is killed in mid-transfer: decode hears of it at once and its pool is whole after the
    release."""
    with pumps({}, {}) as (source, target):
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
    with pytest.raises(ProtocolError, match=Cause.CLOSED_ATTEMPT.value):
        late.offer(TOKENS)


def test_a_dead_receiver_fails_the_sender() -> None:
    """The decode node is killed in mid-transfer: the sender reports it although it has nothing to send just then."""
    with pumps({}, {}) as (source, target):
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
    source.tell(m.PartsReady(attempt, PARTS[:5]))
    arrived = target.load.received_bytes_total if target.load else 0
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
    """The port accepts and stays silent: the greeting has its own deadline."""
    with pumps({"connect_s": 0.5}) as (source,), socket.create_server(("127.0.0.1", 0)) as mute:
        attempt = send_into_the_dark(source, f"127.0.0.1:{mute.getsockname()[1]}")
        assert lost(source, attempt).cause == Cause.NO_PROGRESS.value
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
            peer.write(Kind.ACCEPT)
            assert peer.read().kind is Kind.KEEPALIVE
            peer.write(Kind.ABORT, greeting.refusal(Cause.EXPIRED, "too late"))
            failure = lost(source, attempt)
            assert failure.cause == Cause.EXPIRED.value and "too late" in failure.detail
        source.release(attempt)


def test_nobody_at_the_address(pair: list[Pump]) -> None:
    """A closed port and an address that is none: `connect`, at once."""
    source, _ = pair
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    for address in (f"127.0.0.1:{port}", "no port"):
        attempt = send_into_the_dark(source, address)
        assert lost(source, attempt).cause == Cause.CONNECT.value
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


# ---- who may write -----------------------------------------------------------


def test_the_wrong_namespace_is_refused_with_both_values() -> None:
    """KV of another model never enters, and whoever reads the error sees which two."""
    with pumps({}, {"namespace": "qwen-tiny/fp32"}) as (source, target):
        attempt, _, _ = start_transfer(source, target, 64)
        failure = lost(source, attempt)
        assert failure.cause == Cause.NAMESPACE.value
        assert "kimi-tiny/fp32" in failure.detail and "qwen-tiny/fp32" in failure.detail
        target.await_load(lambda load: load.refused_frames_total >= 1)
        end(attempt, source, target)


def test_the_wrong_wire_version_is_refused_with_both_values(pair: list[Pump]) -> None:
    _, target = pair
    with pytest.raises(ProtocolError, match="wire: peer: ours 1-1, theirs 2-3"):
        dial(target, attempt_id(), 1).hello(wire=(2, 3))


def test_field_C3_a_restarted_peer_is_somebody_else(pair: list[Pump]) -> None:
    """Same host and port, new incarnation: what was reserved in the old one is void."""
    source, target = pair
    attempt = attempt_id()
    source.reserve(attempt, 64, receive=False)
    ends = chunk_ends(64, CHUNK_TOKENS)
    before = target.incarnation - 1
    source.tell(m.Send(attempt=attempt, address=target.address, peer_incarnation=before, generation=1, chunk_ends=ends))
    failure = lost(source, attempt)
    assert failure.cause == Cause.INCARNATION.value and f"{before:#x}" in failure.detail
    source.release(attempt)


def test_field_B1_an_offer_for_an_earlier_holder_is_refused(pair: list[Pump]) -> None:
    """The generation tells spans apart; the reservation itself is not harmed by the stale offer."""
    source, target = pair
    attempt = attempt_id()
    there = target.reserve(attempt, TOKENS, receive=True)
    stale = dial(target, attempt, there.generation + 1)
    stale.hello()
    with pytest.raises(ProtocolError, match=Cause.STALE_GENERATION.value):
        stale.offer(TOKENS)
    source.fill(source.reserve(attempt, TOKENS, receive=False))
    source.send_to(target, attempt, there, TOKENS)
    source.tell(m.PartsReady(attempt, PARTS))
    assert isinstance(target.outcome(attempt), m.Received)
    assert isinstance(source.outcome(attempt), m.Sent)
    end(attempt, source, target)


def test_field_B1_late_frames_do_not_reach_the_next_holders_memory(pair: list[Pump]) -> None:
    """A sender that goes on after the release writes nowhere: the bytes belong to another attempt by now."""
    source, target = pair
    tokens, parts = 3000, parts_of(3000)
    draw = random.Random(11)
    for _ in range(12):
        attempt, _, there = start_transfer(source, target, tokens)
        received = target.load.received_bytes_total if target.load else 0
        source.tell(m.PartsReady(attempt, parts))
        if draw.random() < 0.5:
            target.await_load(lambda load, before=received: load.received_bytes_total > before)
        target.release(attempt)
        successor = attempt_id()
        reused = target.reserve(successor, tokens, receive=True)
        assert reused.span == there.span and reused.generation != there.generation
        target.span(reused)[:] = bytes(reused.nbytes)
        source.outcome(attempt)
        source.release(attempt)
        assert bytes(target.span(reused)) == bytes(reused.nbytes), "something wrote into the next holder's span"
        target.release(successor)


@pytest.mark.parametrize("kind", [Kind.PART, Kind.SEAL])
def test_field_B1_a_frame_of_an_earlier_generation_is_refused(pair: list[Pump], kind: Kind) -> None:
    """Each frame carries the generation, not only the offer."""
    _, target = pair
    attempt, peer, _ = accepted(target)
    peer.generation += 1
    if kind is Kind.PART:
        peer.part(TOKENS, 0)
    else:
        peer.seal(TOKENS, {})
    assert lost(target, attempt).cause == Cause.STALE_GENERATION.value
    target.release(attempt)


def test_a_second_connection_cannot_take_over_an_attempt(pair: list[Pump]) -> None:
    """The first offer has the attempt; the one who comes later is refused and changes nothing."""
    _, target = pair
    attempt, peer, payloads = accepted(target)
    rival = dial(target, attempt, peer.generation)
    rival.hello()
    with pytest.raises(ProtocolError, match=Cause.ALREADY_OFFERED.value):
        rival.offer(TOKENS)
    for index in PARTS:
        payloads[index] = peer.part(TOKENS, index)
    peer.seal(TOKENS, payloads)
    assert peer.read().kind is Kind.ACK
    assert isinstance(target.outcome(attempt), m.Received)
    target.release(attempt)


# ---- what must come ----------------------------------------------------------


def accepted(target: Pump) -> tuple[str, WirePeer, dict[int, bytes]]:
    """An attempt whose offer, made by hand, was accepted."""
    attempt = attempt_id()
    there = target.reserve(attempt, TOKENS, receive=True)
    peer = dial(target, attempt, there.generation)
    peer.hello()
    assert peer.offer(TOKENS).kind is Kind.ACCEPT
    return attempt, peer, {}


def test_field_B7_an_offer_without_a_state_is_refused_by_name(pair: list[Pump]) -> None:
    """The receiver knows which parts there must be, and says which one is not offered."""
    _, target = pair
    attempt = attempt_id()
    there = target.reserve(attempt, TOKENS, receive=True)
    peer = dial(target, attempt, there.generation)
    peer.hello()
    state = next(index for index in PARTS if is_state(index))
    with pytest.raises(ProtocolError, match="layer 0 conv_state"):
        peer.offer(TOKENS, without=state)
    failure = lost(target, attempt)
    assert failure.cause == Cause.OFFER_MISMATCH.value and "layer 0 conv_state" in failure.detail
    target.release(attempt)


def test_field_H3_a_state_that_was_not_sent_is_missed_by_name(pair: list[Pump]) -> None:
    """Offered, sealed, but one state never crossed: the seal is not believed and nothing is filled with zeros."""
    _, target = pair
    attempt, peer, payloads = accepted(target)
    state = next(index for index in PARTS if is_state(index))
    for index in PARTS:
        payloads[index] = os.urandom(4) if index == state else peer.part(TOKENS, index)
    peer.seal(TOKENS, payloads)
    failure = lost(target, attempt)
    assert failure.cause == Cause.MISSING_PART.value and "layer 0 conv_state" in failure.detail
    with pytest.raises(ProtocolError, match=Cause.MISSING_PART.value):
        peer.read()
    target.release(attempt)


def test_a_part_that_comes_twice_is_refused(pair: list[Pump]) -> None:
    """What was checked is not overwritten by whatever else calls itself the same part."""
    _, target = pair
    attempt, peer, _ = accepted(target)
    peer.part(TOKENS, 0)
    peer.part(TOKENS, 0)
    assert lost(target, attempt).cause == Cause.DUPLICATE_PART.value
    target.release(attempt)


@pytest.mark.parametrize("wrong", [{"offset": 1 << 40}, {"index": 10_000}, {"offset": 64}])
def test_a_part_outside_its_place_is_refused(pair: list[Pump], wrong: dict[str, int]) -> None:
    """Offsets come from our own layout; those on the wire are only compared."""
    _, target = pair
    attempt, peer, _ = accepted(target)
    peer.part(TOKENS, 0, **wrong)
    assert lost(target, attempt).cause == Cause.UNEXPECTED_PART.value
    target.release(attempt)


# ---- hostile bytes -----------------------------------------------------------


def test_garbage_is_dropped_and_disturbs_nobody(pair: list[Pump]) -> None:
    """Random bytes on the port, while a transfer runs: counted, no answer, no memory, and the transfer completes."""
    source, target = pair
    attempt, _, _ = start_transfer(source, target, TOKENS)
    source.tell(m.PartsReady(attempt, PARTS[:5]))
    before = target.await_load(lambda load: load.received_bytes_total > 0).refused_frames_total
    resident = psutil.Process(target.process.pid).memory_info().rss
    noise = random.Random(5)
    for nbytes in (52, 500, 70_000) * 10:
        with socket.create_connection(("127.0.0.1", target.port)) as stranger:
            try:
                stranger.sendall(noise.randbytes(nbytes))
            except ConnectionError:
                pass
    target.await_load(lambda load: load.refused_frames_total >= before + 30)
    assert psutil.Process(target.process.pid).memory_info().rss - resident < 32 << 20
    source.tell(m.PartsReady(attempt, PARTS[5:]))
    assert isinstance(target.outcome(attempt), m.Received)
    assert isinstance(source.outcome(attempt), m.Sent)
    end(attempt, source, target)


@pytest.mark.parametrize("kind", [Kind.HELLO, Kind.OFFER, Kind.PART])
def test_a_length_of_two_gigabytes_takes_no_memory(pair: list[Pump], kind: Kind) -> None:
    """A well-formed header may still lie about its length: it is refused before anything is allocated."""
    _, target = pair
    before = target.load.refused_frames_total if target.load else 0
    attempt, peer = attempt_id(), None
    if kind is Kind.PART:
        attempt, peer, _ = accepted(target)
    elif kind is Kind.OFFER:
        there = target.reserve(attempt, TOKENS, receive=True)
        peer = dial(target, attempt, there.generation)
        peer.hello()
    else:
        peer = dial(target, attempt, 1)
    resident = psutil.Process(target.process.pid).memory_info().rss
    fields = struct.pack("<4sBBH16sIIQII", frames.MAGIC, 1, kind, 0, bytes.fromhex(attempt), 1, 0, 0, 1 << 31, 0)
    peer.sock.sendall(fields + struct.pack("<I", frames.crc32c(fields)) + bytes(1000))
    target.await_load(lambda load: load.refused_frames_total > before)
    assert psutil.Process(target.process.pid).memory_info().rss - resident < 32 << 20
    target.release(attempt)


def test_a_stranger_that_keeps_us_waiting_is_shown_the_door() -> None:
    """A connection that never says hello does not keep its thread, nor one that says it a byte at a time."""
    with pumps({"connect_s": 0.5}) as (target,):
        silent = dial(target, attempt_id(), 1)
        slow = dial(target, attempt_id(), 1)
        target.await_load(lambda load: load.connections == 2)
        hello = bytearray(frames.header_for(Kind.HELLO, bytes(4000)) + bytes(4000))
        deadline = time.monotonic() + LIVENESS_S
        while not select.select([slow.sock], [], [], 0.1)[0]:
            assert time.monotonic() < deadline, "still listening"
            slow.sock.send(bytes([hello.pop(0)]))
        assert slow.is_closed() and silent.is_closed()
        target.assert_baseline()


def test_more_connections_than_lanes_are_refused() -> None:
    """Threads are bounded: the one too many is closed at once, and room comes back when others leave."""
    with pumps({"connect_s": 600.0}) as (target,):
        strangers = [dial(target, attempt_id(), 1) for _ in range(MAX_LANES)]
        target.await_load(lambda load: load.connections == MAX_LANES)
        assert dial(target, attempt_id(), 1).is_closed()
        strangers.pop().sock.close()
        target.await_load(lambda load: load.connections == MAX_LANES - 1)
        assert dial(target, attempt_id(), 1).hello().kind is Kind.WELCOME


# ---- everything gives back what it took --------------------------------------


def test_field_A5_aborts_at_any_point_leave_nothing_behind(pair: list[Pump]) -> None:
    """200 attempts released by either side at a random point of their life: the counters return to where they were, and
    no attempt has two outcomes on one side."""
    source, target = pair
    draw = random.Random(2024)
    attempts: list[str] = []
    for _ in range(25):
        batch = [abort_somewhere(source, target, draw) for _ in range(8)]
        for pump in pair:
            for attempt in batch:
                pump.await_event(m.Released, attempt)
        attempts += batch
    for pump in pair:
        pump.assert_baseline()
    assert outcomes(target, attempts) == Counter(attempts), "every receive ends once"
    assert max(outcomes(source, attempts).values()) == 1, "no send ends twice"


def outcomes(pump: Pump, attempts: list[str]) -> Counter[str]:
    """How often each attempt ended, by what nobody has waited for."""
    ended = [event for kind in (m.Sent, m.Received, m.TransferLost) for event in pump.pending(kind)]
    return Counter(event.attempt for event in ended if event.attempt in attempts)


def abort_somewhere(source: Pump, target: Pump, draw: random.Random) -> str:
    """Bring an attempt to a random point, then release it on both sides, in either order."""
    attempt, tokens = attempt_id(), draw.randrange(0, 500)
    parts = list(parts_of(tokens))
    draw.shuffle(parts)
    split = draw.randrange(0, len(parts) + 1)
    there = target.reserve(attempt, tokens, receive=True)
    steps = [
        lambda: source.reserve(attempt, tokens, receive=False),
        lambda: source.tell(m.PartsReady(attempt, tuple(parts[:split]))),
        lambda: source.send_to(target, attempt, there, tokens),
        lambda: source.tell(m.PartsReady(attempt, tuple(parts[split:]))),
        lambda: source.outcome(attempt),
    ]
    for step in steps[: draw.randrange(0, len(steps) + 1)]:
        step()
    for pump in draw.sample([source, target], 2):
        pump.tell(m.Release(attempt))
    return attempt
