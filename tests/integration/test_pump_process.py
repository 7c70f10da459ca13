"""What two real pump processes do for their nodes when nothing is broken, and how a pump lives and ends."""

import os
import signal
import socket
import subprocess
import sys
import time

from prfaas.ipc import Channel
from prfaas.kvcache.layout import chunk_ends, whole
from prfaas.transfer.pump import messages as m
from tests.integration.kv_pumps import (
    CHUNK_TOKENS,
    LAYOUT,
    LIVENESS_S,
    POOL_BYTES,
    Pump,
    assert_same_parts,
    attempt_id,
    parts_of,
    pumps,
    start_message,
    start_transfer,
)


def test_a_transfer_is_bit_equal_at_its_destination(pair: list[Pump]) -> None:
    """Both nodes hear of the end, with the bytes that the layout promises, and the memory is the same."""
    source, target = pair
    attempt, here, there = start_transfer(source, target, 1000)
    source.tell(m.PartsReady(attempt, parts_of(1000)))
    sent, received = source.outcome(attempt), target.outcome(attempt)
    assert isinstance(sent, m.Sent) and isinstance(received, m.Received), f"{sent} {received}"
    assert sent.payload_bytes == received.payload_bytes == LAYOUT.size_bytes(1000)
    assert sent.exposed_s > 0
    assert_same_parts(source, here, target, there, 1000)
    source.release(attempt)
    target.release(attempt)


def test_parts_leave_while_later_ones_are_still_computed(pair: list[Pump]) -> None:
    """Bytes cross as soon as their chunk exists; nothing is sealed before the last."""
    source, target = pair
    before = target.look().received_bytes_total
    attempt, here, there = start_transfer(source, target, 640)
    *early, last = parts_of(640)
    source.tell(m.PartsReady(attempt, tuple(early)))
    sizes = [part.nbytes for part in LAYOUT.parts(640, chunk_ends(640, CHUNK_TOKENS))]
    target.await_load(lambda load: load.received_bytes_total == before + sum(sizes[:-1]))
    assert not target.pending(m.Received)
    source.tell(m.PartsReady(attempt, (last,)))
    assert isinstance(target.outcome(attempt), m.Received)
    assert isinstance(source.outcome(attempt), m.Sent)
    assert_same_parts(source, here, target, there, 640)
    source.release(attempt)
    target.release(attempt)


def test_exposed_time_counts_from_the_last_part(pair: list[Pump]) -> None:
    """Waiting for prefill is not exposed: a transfer that idled for long reports only its tail."""
    source, target = pair
    attempt, _, _ = start_transfer(source, target, 128)
    started = time.monotonic()
    source.await_load(lambda _: time.monotonic() > started + 0.5)
    told = time.monotonic()
    source.tell(m.PartsReady(attempt, parts_of(128)))
    sent = source.outcome(attempt)
    assert isinstance(sent, m.Sent)
    assert 0 < sent.exposed_s <= time.monotonic() - told
    source.release(attempt)
    target.release(attempt)


def test_parts_may_be_ready_before_the_transfer_begins(pair: list[Pump]) -> None:
    """The engine does not wait for the pump: parts announced before Send are kept in their order."""
    source, target = pair
    attempt, tokens = attempt_id(), 300
    here = source.reserve(attempt, tokens, receive=False)
    source.fill(here)
    ready = parts_of(tokens)
    source.tell(m.PartsReady(attempt, ready[3:]))
    source.tell(m.PartsReady(attempt, ready[:3]))
    there = target.reserve(attempt, tokens, receive=True)
    source.send_to(target, attempt, there, tokens)
    assert isinstance(source.outcome(attempt), m.Sent)
    assert isinstance(target.outcome(attempt), m.Received)
    assert_same_parts(source, here, target, there, tokens)
    source.release(attempt)
    target.release(attempt)


def test_a_prompt_of_one_token_has_nothing_to_move(pair: list[Pump]) -> None:
    """An empty transfer is a transfer: it is offered, sealed and acknowledged."""
    source, target = pair
    attempt, here, there = start_transfer(source, target, 0)
    assert here.nbytes == there.nbytes == 0
    sent = source.outcome(attempt)
    assert isinstance(sent, m.Sent) and sent.payload_bytes == 0
    assert isinstance(target.outcome(attempt), m.Received)
    source.release(attempt)
    target.release(attempt)


def test_several_attempts_cross_at_once(pair: list[Pump]) -> None:
    """Attempts share nothing but the line: eight at once, parts interleaved, both ways."""
    tokens = 500
    flows = [(*(pair if n % 2 else pair[::-1]),) for n in range(8)]
    started = [(source, target, *start_transfer(source, target, tokens)) for source, target in flows]
    for index in parts_of(tokens):
        for source, _, attempt, _, _ in started:
            source.tell(m.PartsReady(attempt, (index,)))
    for source, target, attempt, here, there in started:
        assert isinstance(source.outcome(attempt), m.Sent)
        assert isinstance(target.outcome(attempt), m.Received)
        assert_same_parts(source, here, target, there, tokens)
    for source, target, attempt, _, _ in started:
        source.release(attempt)
        target.release(attempt)


def test_what_does_not_fit_is_refused_at_once(pair: list[Pump]) -> None:
    """R19: the whole request is reserved before its stream begins, or refused with the numbers."""
    pump, _ = pair
    tokens = POOL_BYTES // LAYOUT.bytes_per_token + 1
    pump.tell(m.Reserve(attempt=attempt_id(), extent=whole(tokens), ttl_s=60, receive=True))
    refused = pump.await_event(m.Refused)
    assert refused.needed_bytes == LAYOUT.span_bytes(tokens) > refused.free_bytes == POOL_BYTES


def test_an_attempt_is_reserved_once(pair: list[Pump]) -> None:
    """Ids are never used again, neither while they are open nor afterwards: a late frame must not find one open."""
    pump, _ = pair
    attempt = attempt_id()
    pump.reserve(attempt, 100, receive=False)
    again = m.Reserve(attempt=attempt, extent=whole(100), ttl_s=60, receive=True)
    pump.tell(again)
    pump.await_event(m.Refused, attempt)
    pump.release(attempt)
    pump.tell(again)
    pump.await_event(m.Refused, attempt)


def test_release_is_idempotent(pair: list[Pump]) -> None:
    """Releasing twice, or what never was, is answered like a release."""
    pump, _ = pair
    attempt = attempt_id()
    pump.reserve(attempt, 100, receive=False)
    for _ in range(3):
        pump.release(attempt)
    pump.release(attempt_id())


def test_a_probe_learns_who_is_there(pair: list[Pump]) -> None:
    """The incarnation for a pump; None for a closed port and for something that speaks another protocol."""
    asking, asked = pair
    with socket.create_server(("127.0.0.1", 0)) as web, socket.create_server(("127.0.0.1", 0)) as gone:
        asking.tell(m.Probe(asked.address))
        assert asking.await_event(m.Probed) == m.Probed(address=asked.address, incarnation=asked.incarnation)
        asking.tell(m.Probe(f"127.0.0.1:{web.getsockname()[1]}"))
        answering, _ = web.accept()
        answering.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 200\r\n\r\n" + b"x" * 200)
        assert asking.await_event(m.Probed).incarnation is None
        answering.close()
        port = gone.getsockname()[1]
    asking.tell(m.Probe(f"127.0.0.1:{port}"))
    assert asking.await_event(m.Probed).incarnation is None
    asking.tell(m.Probe("no port"))
    assert asking.await_event(m.Probed).incarnation is None


def test_a_pump_reports_its_load_unasked() -> None:
    """Reports come on their own about four times a second, and one as soon as a span is taken."""
    with pumps({}) as (pump,):
        for _ in range(3):
            pump.load = None
            idle = pump.await_load(lambda _: True)
            assert (idle.spans, idle.free_bytes, idle.total_bytes) == (0, POOL_BYTES, POOL_BYTES)
        pump.reserve(attempt_id(), 100, receive=True)
        taken = pump.await_load(lambda load: load.spans == 1)
        assert 0 <= POOL_BYTES - taken.free_bytes - LAYOUT.span_bytes(100) < 64 * 1024


def test_a_pump_ends_with_its_nodes_socket() -> None:
    """The death of one process of a worker ends the others."""
    with pumps({}) as (pump,):
        pump.node.close()
        assert pump.process.wait(LIVENESS_S) == 0


def test_a_pump_leaves_stopping_to_its_node() -> None:
    """Ctrl-C goes to the whole terminal and SIGTERM may go to the whole group: both are the node's to act on."""
    with pumps({}) as (pump,):
        for signum in (signal.SIGINT, signal.SIGTERM):
            pump.process.send_signal(signum)
            pump.tell(m.Probe(pump.address))
            assert pump.await_event(m.Probed).incarnation == pump.incarnation
        pump.node.close()
        assert pump.process.wait(LIVENESS_S) == 0


PARENT = """
import subprocess, sys
fd, pool = sys.argv[1:]
command = [sys.executable, "-m", "prfaas.transfer.pump", "--fd", fd, "--pool-fd", pool]
subprocess.run(command, pass_fds=[int(fd), int(pool)])
"""


def test_a_pump_does_not_outlive_its_parent() -> None:
    """Even when somebody else still holds the node's end of its socket."""
    ours, theirs = socket.socketpair()
    pool_fd = os.memfd_create("kv-pool")
    os.ftruncate(pool_fd, POOL_BYTES)
    fds = (theirs.fileno(), pool_fd)
    node: Channel[m.Event] = Channel(ours, m.Event)
    with subprocess.Popen([sys.executable, "-c", PARENT, *map(str, fds)], pass_fds=fds) as parent:
        theirs.close()
        os.close(pool_fd)
        node.send(start_message(incarnation=1))
        assert node.receive(LIVENESS_S)
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + LIVENESS_S
        while node.receive(LIVENESS_S) is not None:
            assert time.monotonic() < deadline, "the pump still reports its load"
    node.close()
