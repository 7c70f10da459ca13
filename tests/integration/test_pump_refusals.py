"""What a real pump refuses: peers that may not write, transfers that are not what they must be, and hostile bytes.
Never with memory taken, never without being counted."""

import contextlib
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator

import msgspec
import psutil
import pytest

from prfaas.kvcache.layout import TensorKind, chunk_ends
from prfaas.transfer import frames
from prfaas.transfer.frames import Cause, Kind, ProtocolError
from prfaas.transfer.pump import messages as m
from prfaas.transfer.pump.plane import MAX_LANES
from tests.integration.kv_pumps import (
    CHUNK_TOKENS,
    LAYOUT,
    LIVENESS_S,
    NODE,
    Line,
    Pump,
    WirePeer,
    assert_same_parts,
    assert_transfers,
    attempt_id,
    dial,
    end,
    lost,
    parts_of,
    pieces_of,
    pumps,
    start_transfer,
)

TOKENS = 1000
PARTS = parts_of(TOKENS)
OFFERS = 10_000


def is_state(index: int) -> bool:
    part = LAYOUT.parts(TOKENS, chunk_ends(TOKENS, CHUNK_TOKENS))[index]
    return LAYOUT.layers[part.layer][part.tensor].kind is TensorKind.STATE


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
    with pytest.raises(ProtocolError, match="wire: peer: ours 3-3, theirs 4-5"):
        dial(target, attempt_id(), 1).hello(wire=(4, 5))


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
        stale.offer(TOKENS, there.ticket)
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
        received = target.look().received_bytes_total
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


def test_field_B1_a_frame_of_an_earlier_generation_is_dropped(pair: list[Pump]) -> None:
    """Each frame carries the generation, not only the offer: a late one is counted and written nowhere, and what is
    wanted still comes on the same lane."""
    _, target = pair
    attempt, peer, there = accepted(target)
    before = refusals(target, Cause.STALE_GENERATION)
    target.span(there)[:] = bytes(there.nbytes)
    peer.generation += 1
    peer.data(TOKENS, 0)
    peer.seal(TOKENS)
    with pytest.raises(ProtocolError, match=Cause.STALE_GENERATION.value):
        peer.read()
    assert refusals(target, Cause.STALE_GENERATION) == before + 2
    assert bytes(target.span(there)) == bytes(there.nbytes)
    peer.generation -= 1
    assert_takes_everything(target, attempt, peer)


def test_somebody_else_cannot_take_over_an_attempt(pair: list[Pump]) -> None:
    """Who offered first has the attempt; another process with the same ticket is refused and changes nothing."""
    _, target = pair
    attempt, peer, there = accepted(target)
    rival = dial(target, attempt, peer.generation)
    rival.own_incarnation = 2
    rival.hello()
    with pytest.raises(ProtocolError, match=Cause.ALREADY_OFFERED.value):
        rival.offer(TOKENS, there.ticket)
    rival.data(TOKENS, 0)
    with pytest.raises(ProtocolError, match=Cause.TICKET.value):
        rival.read()
    assert_takes_everything(target, attempt, peer)


def test_field_J1_frames_without_a_ticket_reach_nothing(pair: list[Pump]) -> None:
    """Who knows an attempt's name and place but was never given a ticket cannot write there, nor seal it."""
    _, target = pair
    for say in (lambda peer: peer.data(TOKENS, 0), lambda peer: peer.seal(TOKENS)):
        attempt = attempt_id()
        there = target.reserve(attempt, TOKENS, receive=True)
        target.span(there)[:] = bytes(there.nbytes)
        peer = dial(target, attempt, there.generation)
        peer.hello()
        say(peer)
        with pytest.raises(ProtocolError):
            peer.read()
        assert bytes(target.span(there)) == bytes(there.nbytes)
        target.release(attempt)


@pytest.mark.parametrize("permit", [{}, {"ticket": bytes(100_000)}, {"ticket": bytes(64), "key_out": b"short"}])
def test_a_permit_that_is_none_ends_the_attempt_and_not_the_pump(permit: dict[str, bytes]) -> None:
    """A pump that seals sends nothing without keys, whatever the other region handed over."""
    with pumps({"integrity": "aes-gcm"}) as (source,):
        attempt = attempt_id()
        source.reserve(attempt, 64, receive=False)
        source.tell(
            m.Send(attempt=attempt, address="127.0.0.1:1", peer_incarnation=1, generation=1, chunk_ends=(64,), **permit)
        )
        assert lost(source, attempt).cause == Cause.TICKET.value
        end(attempt, source)
        source.assert_baseline()


@pytest.mark.parametrize("forge", ["none", "flipped", "other attempt", "other source", "other pump", "expired"])
def test_a_wrong_ticket_opens_nothing(pair: list[Pump], forge: str) -> None:
    """A ticket is for one attempt, from one node, to one process, until its deadline. Refused and counted; whoever has
    the right one still gets in."""
    source, target = pair
    before = refusals(target, Cause.TICKET)
    attempt = attempt_id()
    there = target.reserve(attempt, TOKENS, receive=True, ttl_s=0.3 if forge == "expired" else 60.0)
    ticket = there.ticket
    if forge == "none":
        ticket = b""
    elif forge == "flipped":
        ticket = bytes([ticket[0] ^ 1]) + ticket[1:]
    elif forge == "other attempt":
        other = attempt_id()
        ticket = target.reserve(other, TOKENS, receive=True).ticket
        target.release(other)
    elif forge == "other pump":
        ticket = source.reserve(attempt, TOKENS, receive=True).ticket
        source.release(attempt)
    elif forge == "expired":
        assert lost(target, attempt).cause == Cause.EXPIRED.value
    peer = dial(target, attempt, there.generation)
    peer.hello(node="somebody" if forge == "other source" else NODE)
    with pytest.raises(ProtocolError, match="ticket: peer"):
        peer.offer(TOKENS, ticket)
    assert refusals(target, Cause.TICKET) == before + 1
    if forge != "expired":
        right = peer
        if forge == "other source":
            right = dial(target, attempt, there.generation)
            right.hello()
        assert right.offer(TOKENS, there.ticket).kind is Kind.ACCEPT, "the lane is not lost with the attempt"
        assert_takes_everything(target, attempt, right)


@pytest.mark.parametrize(
    ("integrity", "forge"),
    [("crc32c", "none"), ("crc32c", "flipped"), ("crc32c", "other attempt"), ("aes-gcm", "flipped")],
)
def test_a_refused_ticket_is_heard_of_at_once(integrity: str, forge: str) -> None:
    """The sender does not go on asking until it may no longer; and what shares its lanes is not disturbed."""
    settings = {"integrity": integrity, "connect_s": 600.0, "no_progress_s": 600.0}
    with pumps(settings, settings) as (source, target):
        other, _, _ = start_transfer(source, target, TOKENS)
        attempt = attempt_id()
        there = target.reserve(attempt, TOKENS, receive=True)
        source.reserve(attempt, TOKENS, receive=False)
        ticket = there.ticket
        if forge == "none":
            ticket = b""
        elif forge == "flipped":
            ticket = bytes([ticket[0] ^ 1]) + ticket[1:]
        else:
            ticket = target.reserve(other_id := attempt_id(), TOKENS, receive=True).ticket
            target.release(other_id)
        source.send_to(target, attempt, msgspec.structs.replace(there, ticket=ticket), TOKENS)
        assert lost(source, attempt).cause == Cause.TICKET.value
        assert refusals(target, Cause.TICKET) == 1
        source.tell(m.PartsReady(other, PARTS))
        sent = source.outcome(other)
        assert isinstance(sent, m.Sent) and not sent.resent_bytes
        assert isinstance(target.outcome(other), m.Received)
        end(attempt, source, target)
        end(other, source, target)


def test_tickets_that_are_refused_again_and_again_take_no_memory(pair: list[Pump]) -> None:
    """Thousands of offers in a row, each of another attempt: none leaves anything behind."""
    _, target = pair
    peer = dial(target, attempt_id(), 1)
    peer.hello()
    process = psutil.Process(target.process.pid)
    before, resident = refusals(target, Cause.TICKET), process.memory_info().rss
    ears = threading.Thread(target=_read_and_forget, args=(peer.sock,))
    ears.start()
    for _ in range(OFFERS):
        peer.attempt = attempt_id()
        peer.write(Kind.OFFER, bytes(200))
    target.await_load(lambda load: load.refused.get(Cause.TICKET.value, 0) == before + OFFERS)
    assert process.memory_info().rss - resident < 8 << 20
    peer.sock.shutdown(socket.SHUT_RDWR)
    ears.join(LIVENESS_S)


def _read_and_forget(sock: socket.socket) -> None:
    while sock.recv(1 << 16):
        pass


def test_a_pump_that_seals_takes_nothing_in_plain() -> None:
    """Neither a greeting nor a frame can talk it out of encryption."""
    with pumps({"integrity": "crc32c"}, {"integrity": "aes-gcm"}) as (source, target):
        attempt, _, there = start_transfer(source, target, 64)
        failure = lost(source, attempt)
        assert failure.cause == Cause.WIRE.value and "aes-gcm" in failure.detail
        liar = dial(target, attempt, there.generation)
        liar.hello(integrity="aes-gcm")
        with pytest.raises(ProtocolError, match="checksum: peer: OFFER is not sealed"):
            liar.offer(64, there.ticket)


# ---- who has no keys ---------------------------------------------------------


class Observer:
    """Reads what goes to a pump, and dials it too: he has the sender's greeting and frames, and no key."""

    def __init__(self, target: Pump) -> None:
        self._target = target
        self._seen: list[bytearray] = []
        self.line = Line(target, self._tap, bytes_per_s=2e6)

    def _tap(self, carried: int, data: bytes) -> bytes:
        self._seen.append(bytearray(data))
        return data

    def frames(self) -> Iterator[tuple[frames.Header, bytes]]:
        """What began and ended in one segment that he saw."""
        for data in list(self._seen):
            at = 0
            while data[at : at + 4] == frames.MAGIC and len(data) >= at + frames.HEADER_BYTES:
                header = frames.decode(data[at : at + frames.HEADER_BYTES])
                stop = at + frames.HEADER_BYTES + header.wire_bytes
                if stop <= len(data):
                    yield header, bytes(data[at:stop])
                at = stop

    def one(self, kind: Kind) -> bytes:
        return next(frame for header, frame in self.frames() if header.kind is kind)

    def dial(self) -> socket.socket:
        """A lane that says it is the sender's."""
        sock = socket.create_connection(("127.0.0.1", self._target.port), timeout=LIVENESS_S)
        self._target.strangers.append(sock)
        sock.sendall(self.one(Kind.HELLO))
        assert sock.recv(1 << 12)[:4] == frames.MAGIC
        return sock


def forged(attempt: str, generation: int, piece: int, counter: int) -> bytes:
    """A frame with the right geometry in plain, and noise where what was sealed belongs."""
    run = pieces_of(TOKENS).run(piece, piece + 1)
    header = frames.Header(
        kind=Kind.DATA,
        attempt=attempt,
        generation=generation,
        index=piece,
        count=1,
        offset=run.offset,
        length=run.nbytes,
        counter=counter,
        sealed=True,
    )
    return frames.encode(header) + random.Random(piece).randbytes(header.wire_bytes)


@pytest.mark.parametrize("first", ["nothing", "offer"])
def test_who_has_no_key_ends_no_transfer(first: str) -> None:
    """Forged DATA under the sender's name, at first or behind a frame of his that was taken off his own lane, costs the
    forger his connection. The transfer goes on, and its bytes are right."""
    settings = {"integrity": "aes-gcm"}
    with pumps(settings, settings) as (source, target):
        observer = Observer(target)
        attempt, here, there = start_transfer(source, target, TOKENS, address=observer.line.address)
        source.tell(m.PartsReady(attempt, PARTS[:1]))
        target.await_load(lambda load: load.received_bytes_total > 0)
        before, last = refusals(target, Cause.CHECKSUM), pieces_of(TOKENS).count - 1
        for piece in (0, last):
            with contextlib.suppress(ConnectionError):
                forger = observer.dial()
                if first == "offer":
                    forger.sendall(observer.one(Kind.OFFER))
                forger.sendall(forged(attempt, there.generation, piece, 1 << 40))
                while forger.recv(1 << 12):
                    pass
        assert refusals(target, Cause.CHECKSUM) == before + 2
        # One who dawdles in his frame, on pieces that are still to come, keeps nobody from sending them.
        observer.dial().sendall(forged(attempt, there.generation, last, 1)[:-1])
        source.tell(m.PartsReady(attempt, PARTS[1:]))
        assert isinstance(source.outcome(attempt), m.Sent)
        assert isinstance(target.outcome(attempt), m.Received)
        assert_same_parts(source, here, target, there, TOKENS)
        end(attempt, source, target)


# ---- what must come ----------------------------------------------------------


def accepted(target: Pump, *, tokens: int = TOKENS) -> tuple[str, WirePeer, m.Reserved]:
    """An attempt whose offer, made by hand, was accepted."""
    attempt = attempt_id()
    there = target.reserve(attempt, tokens, receive=True)
    peer = dial(target, attempt, there.generation)
    peer.hello()
    assert peer.offer(tokens, there.ticket).kind is Kind.ACCEPT
    return attempt, peer, there


def assert_takes_everything(target: Pump, attempt: str, peer: WirePeer) -> None:
    for index in PARTS:
        peer.data(TOKENS, index)
    peer.seal(TOKENS)
    peer.await_frame(Kind.COMPLETE)
    assert isinstance(target.outcome(attempt), m.Received)
    target.release(attempt)


def refusals(target: Pump, cause: Cause) -> int:
    """How often it has refused something for this, as of now."""
    target.release(attempt_id())
    target.load = None
    return target.await_load(lambda _: True).refused.get(cause.value, 0)


def test_field_B7_an_offer_without_a_state_is_refused_by_name(pair: list[Pump]) -> None:
    """The receiver knows which tensors there must be, and says which one is not offered."""
    _, target = pair
    attempt = attempt_id()
    there = target.reserve(attempt, TOKENS, receive=True)
    peer = dial(target, attempt, there.generation)
    peer.hello()
    with pytest.raises(ProtocolError, match="layer 0 conv_state"):
        peer.offer(TOKENS, there.ticket, without=0)
    failure = lost(target, attempt)
    assert failure.cause == Cause.OFFER_MISMATCH.value and "layer 0 conv_state" in failure.detail
    target.release(attempt)


def test_field_H3_a_state_that_was_not_sent_is_waited_for(pair: list[Pump]) -> None:
    """Offered, sealed, but one state never crossed: the seal is not believed and nothing is filled with zeros. When it
    comes after all, late, the transfer is complete."""
    _, target = pair
    attempt, peer, _ = accepted(target)
    state = next(index for index in PARTS if is_state(index))
    received = target.look().received_bytes_total
    for index in PARTS:
        if index != state:
            peer.data(TOKENS, index)
    peer.seal(TOKENS)
    target.await_load(lambda load: load.received_bytes_total > received)
    assert refusals(target, Cause.MISSING_PART) == 0
    assert attempt not in [done.attempt for done in target.pending(m.Received)]
    peer.data(TOKENS, state)
    peer.await_frame(Kind.COMPLETE)
    assert isinstance(target.outcome(attempt), m.Received)
    target.release(attempt)


def test_a_part_that_comes_twice_is_written_once(pair: list[Pump]) -> None:
    """What was checked is not overwritten by whatever else calls itself the same part; it is acknowledged again."""
    _, target = pair
    attempt, peer, there = accepted(target)
    part = LAYOUT.parts(TOKENS, chunk_ends(TOKENS, CHUNK_TOKENS))[0]
    first = peer.data(TOKENS, 0)
    peer.await_frame(Kind.ACK)
    peer.data(TOKENS, 0)
    peer.await_frame(Kind.ACK)
    assert bytes(target.span(there)[part.offset : part.offset + part.nbytes]) == first
    target.release(attempt)


@pytest.mark.parametrize("wrong", [{"offset": 1 << 40}, {"index": 10_000}, {"offset": 64}, {"count": 0}, {"count": 9}])
def test_a_part_outside_its_place_is_refused(pair: list[Pump], wrong: dict[str, int]) -> None:
    """Offsets come from our own layout; those on the wire are only compared."""
    _, target = pair
    attempt, peer, there = accepted(target)
    target.span(there)[:] = bytes(there.nbytes)
    peer.data(TOKENS, 0, **wrong)
    with pytest.raises(ProtocolError, match=Cause.UNEXPECTED_PART.value):
        peer.read()
    assert bytes(target.span(there)) == bytes(there.nbytes)
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
    for nbytes in (70, 500, 70_000) * 10:
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


@pytest.mark.parametrize("kind", [Kind.HELLO, Kind.OFFER, Kind.DATA])
def test_a_length_of_two_gigabytes_takes_no_memory(pair: list[Pump], kind: Kind) -> None:
    """A well-formed header may still lie about its length: it is refused before anything is allocated."""
    _, target = pair
    before = refusals(target, Cause.MALFORMED)
    attempt = attempt_id()
    if kind is Kind.DATA:
        attempt, peer, _ = accepted(target)
    else:
        there = target.reserve(attempt, TOKENS, receive=True)
        peer = dial(target, attempt, there.generation)
        if kind is Kind.OFFER:
            peer.hello()
    resident = psutil.Process(target.process.pid).memory_info().rss
    version = 1 if kind is Kind.HELLO else frames.WIRE.newest
    fields = struct.pack(
        "<4sBBH16sIIIQIQI", frames.MAGIC, version, kind, 0, bytes.fromhex(attempt), 1, 0, 1, 0, 1 << 31, 0, 0
    )
    peer.sock.sendall(fields + struct.pack("<I", frames.crc32c(fields)) + bytes(1000))
    target.await_load(lambda load: load.refused.get(Cause.MALFORMED.value, 0) > before)
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


def test_more_connections_than_lanes_cost_the_oldest_stranger_its_place() -> None:
    """Threads are bounded; who has carried nothing for anybody does not keep out who may have something."""
    with pumps({"connect_s": 600.0}) as (target,):
        first, *_ = [dial(target, attempt_id(), 1) for _ in range(MAX_LANES)]
        target.await_load(lambda load: load.connections == MAX_LANES)
        assert dial(target, attempt_id(), 1).hello().kind is Kind.WELCOME
        assert first.is_closed()
        target.await_load(lambda load: load.refused.get(Cause.BUSY.value) and load.connections == MAX_LANES)


def test_lanes_that_others_keep_for_later_are_for_who_has_work() -> None:
    """Every place is taken by peers that have sent something and wait for more: the one that has waited longest goes,
    and may come again."""
    with pumps({}, {}) as (source, target):
        peers = [accepted(target, tokens=1)[1] for _ in range(MAX_LANES)]
        load = target.await_load(lambda load: load.connections == MAX_LANES)
        until = time.monotonic() + 1.5
        target.await_load(lambda _: time.monotonic() > until)
        assert_transfers(source, target)
        assert peers[0].is_closed()
        assert target.load is not None and target.load.failed_transfers_total == load.failed_transfers_total


def test_a_shortage_of_descriptors_passes() -> None:
    """While the system has none left nobody is let in and no lane is dialled; the pump outlives it and works again."""
    with pumps({"connect_s": 0.5}, {}) as (source, target):
        for pump in (source, target):
            pump.look()  # it has what it needs for itself
            process = psutil.Process(pump.process.pid)
            limits = process.rlimit(psutil.RLIMIT_NOFILE)
            process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 1, limits[1]))
        strangers = [dial(target, attempt_id(), 1) for _ in range(8)]
        attempt, _, _ = start_transfer(source, target, 64)
        assert lost(source, attempt).cause == Cause.CONNECT.value
        end(attempt, source, target)
        for stranger in strangers:
            stranger.sock.close()
        for pump in (source, target):
            psutil.Process(pump.process.pid).rlimit(psutil.RLIMIT_NOFILE, limits)
        assert_transfers(source, target)
