"""What two real pumps take for progress: bytes that reach the other end, not bytes that the kernel took in."""

import socket

from prfaas.kvcache.layout import chunk_ends
from prfaas.transfer import greeting
from prfaas.transfer.frames import Cause, Kind
from prfaas.transfer.pump import messages as m
from tests.integration.kv_pumps import (
    CHUNK_TOKENS,
    LAYOUT,
    Line,
    Pump,
    WirePeer,
    attempt_id,
    parts_of,
    pumps,
    start_transfer,
)

TOKENS = 1000
NO_PROGRESS_S = 0.5
SLOW_BYTES_PER_S = 2e6


def all_written(source: Pump, target: Pump) -> tuple[Line, str]:
    """A transfer over a slow line, of which the sender's kernel has taken in everything."""
    line = Line(target, bytes_per_s=SLOW_BYTES_PER_S)
    attempt, _, _ = start_transfer(source, target, TOKENS, address=line.address)
    source.tell(m.PartsReady(attempt, parts_of(TOKENS)))
    source.await_load(lambda load: load.sent_bytes_total >= LAYOUT.size_bytes(TOKENS))
    left_s = (LAYOUT.size_bytes(TOKENS) - line.carried) / SLOW_BYTES_PER_S
    assert left_s > 2 * NO_PROGRESS_S, "the kernel took so little that this proves nothing"
    return line, attempt


def assert_gives_up(pump: Pump, attempt: str) -> None:
    lost = pump.outcome(attempt)
    assert isinstance(lost, m.TransferLost) and lost.cause == Cause.NO_PROGRESS.value, f"{lost}"
    pump.release(attempt)
    pump.assert_baseline()


def test_a_slow_line_is_no_broken_line() -> None:
    """A line that carries what the kernel took in for several times the no-progress time is waited for."""
    with pumps({"no_progress_s": NO_PROGRESS_S}, {"no_progress_s": NO_PROGRESS_S}) as (source, target):
        _, attempt = all_written(source, target)
        assert isinstance(source.outcome(attempt), m.Sent)
        assert isinstance(target.outcome(attempt), m.Received)


def test_a_slow_line_that_breaks_is_given_up() -> None:
    """The line stops with everything written and on its way: nobody waits for the rest."""
    with pumps({"no_progress_s": NO_PROGRESS_S}, {"no_progress_s": NO_PROGRESS_S}) as (source, target):
        line, attempt = all_written(source, target)
        line.stall()
        assert_gives_up(source, attempt)
        assert_gives_up(target, attempt)


def test_a_peer_that_takes_nothing_is_given_up_between_two_parts() -> None:
    """Its kernel still answers, but its window is shut: keepalives that pile up here are no progress."""
    with pumps({"no_progress_s": 0.2}) as (source,), socket.create_server(("127.0.0.1", 0)) as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        attempt, ends = attempt_id(), chunk_ends(64, CHUNK_TOKENS)
        source.reserve(attempt, 64, receive=False)
        address = f"127.0.0.1:{door.getsockname()[1]}"
        source.tell(m.Send(attempt=attempt, address=address, peer_incarnation=1, generation=1, chunk_ends=ends))
        with door.accept()[0] as sock:
            peer = WirePeer(sock, attempt)
            assert peer.read().kind is Kind.HELLO
            peer.write(Kind.WELCOME, greeting.pack(greeting.Welcome(node="hand", incarnation=1)))
            assert peer.read().kind is Kind.OFFER
            peer.write(Kind.ACCEPT)
            assert_gives_up(source, attempt)
