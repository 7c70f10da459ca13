"""What two real pumps take for progress: bytes that reach the other end, not bytes that the kernel took in."""

import socket

from prfaas.kvcache.layout import chunk_ends
from prfaas.transfer import greeting
from prfaas.transfer.frames import Cause, Kind
from prfaas.transfer.pump import messages as m
from prfaas.transfer.replies import Progress
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
NO_PROGRESS_S = 1.0
SLOW_BYTES_PER_S = 1.2e6


def under_way(source: Pump, target: Pump) -> tuple[Line, str]:
    """A transfer over a line so slow that it takes several times the no-progress time."""
    line = Line(target, bytes_per_s=SLOW_BYTES_PER_S)
    assert LAYOUT.size_bytes(TOKENS) / SLOW_BYTES_PER_S > 5 * NO_PROGRESS_S
    attempt, _, _ = start_transfer(source, target, TOKENS, address=line.address)
    source.tell(m.PartsReady(attempt, parts_of(TOKENS)))
    target.await_load(lambda load: load.received_bytes_total > 0)
    return line, attempt


def assert_given_up(pump: Pump, attempt: str, *causes: Cause) -> None:
    lost = pump.outcome(attempt)
    assert isinstance(lost, m.TransferLost) and lost.cause in [cause.value for cause in causes], f"{lost}"
    pump.release(attempt)
    pump.assert_baseline()


def test_a_slow_line_is_no_broken_line() -> None:
    """A line that needs long for every frame, but moves, is waited for."""
    with pumps({"no_progress_s": NO_PROGRESS_S}, {"no_progress_s": NO_PROGRESS_S}) as (source, target):
        _, attempt = under_way(source, target)
        assert isinstance(source.outcome(attempt), m.Sent)
        assert isinstance(target.outcome(attempt), m.Received)


def test_field_C1_a_slow_line_that_stops_is_given_up() -> None:
    """Half open: no byte, no error, every buffer on the way full. Both ends notice by themselves."""
    with pumps({"no_progress_s": NO_PROGRESS_S}, {"no_progress_s": NO_PROGRESS_S}) as (source, target):
        line, attempt = under_way(source, target)
        line.stall()
        assert_given_up(source, attempt, Cause.NO_PROGRESS, Cause.PEER_GONE)
        assert_given_up(target, attempt, Cause.NO_PROGRESS, Cause.PEER_GONE)


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
            peer.write(Kind.ACCEPT, greeting.pack(Progress(ranges=(), credit_bytes=1 << 20)))
            assert_given_up(source, attempt, Cause.NO_PROGRESS, Cause.PEER_GONE)
