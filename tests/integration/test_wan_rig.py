"""The WAN rig does what it says: otherwise nothing measured on it means anything.

Rates and delays are those of the line under test, compared with what was asked of it.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.wan.rig import Line, Wan, lacking

pytestmark = pytest.mark.skipif(lacking() is not None, reason=lacking() or "")

LIMIT_S = 20.0
LINE = Line(mbit=200, rtt_ms=20, queue_ms=40)


@pytest.fixture
def wan() -> Iterator[Wan]:
    with Wan(LINE) as line:
        yield line


def connected(wan: Wan, *, congestion: str = "bbr") -> tuple[socket.socket, socket.socket]:
    """A TCP connection over the line: the end at a, the end at b."""
    with wan.within("b"):
        door = socket.create_server((wan.address("b"), 0))
    with wan.within("a"):
        near = socket.socket()
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    near.settimeout(LIMIT_S)
    near.connect(door.getsockname())
    far, _ = door.accept()
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    far.settimeout(LIMIT_S)
    door.close()
    return near, far


class Stream:
    """Bytes without end from a to b; `arrived` counts them."""

    def __init__(self, wan: Wan) -> None:
        self._near, self._far = connected(wan)
        self.arrived = 0
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._send, self._receive)]
        for thread in self._threads:
            thread.start()

    def rate(self, seconds: float) -> float:
        before, at = self.arrived, time.monotonic()
        time.sleep(seconds)
        return (self.arrived - before) / (time.monotonic() - at)

    def await_bytes(self, more: int) -> None:
        wanted, deadline = self.arrived + more, time.monotonic() + LIMIT_S
        while self.arrived < wanted:
            assert time.monotonic() < deadline, "nothing arrives"
            time.sleep(0.01)

    def end(self) -> None:
        for sock in (self._near, self._far):
            sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._near.close()
        self._far.close()

    def _send(self) -> None:
        data = os.urandom(1 << 16)
        try:
            while True:
                self._near.sendall(data)
        except OSError:
            return

    def _receive(self) -> None:
        buffer = bytearray(1 << 18)
        try:
            while count := self._far.recv_into(buffer):
                self.arrived += count
        except OSError:
            return


@pytest.fixture
def stream(wan: Wan) -> Iterator[Stream]:
    started = Stream(wan)
    started.await_bytes(1 << 20)
    yield started
    wan.heal()
    started.end()


def test_the_line_carries_what_was_asked_and_follows_a_change(wan: Wan, stream: Stream) -> None:
    """A busy line delivers its rate within five percent, before and after it was changed while in use."""
    assert_settles_at(LINE.payload_bytes_per_s, stream)
    wan.shape(mbit=50)
    assert_settles_at(wan.line.payload_bytes_per_s, stream)


def assert_settles_at(bytes_per_s: float, stream: Stream) -> None:
    """Two half seconds in a row: what disturbs this process is not the line's fault, and does not last."""
    seen: list[float] = []
    while len(seen) < 20:
        seen.append(stream.rate(0.5) / bytes_per_s)
        if len(seen) > 1 and seen[-2:] == [pytest.approx(1.0, abs=0.05)] * 2:
            return
    raise AssertionError(f"of the wanted rate: {seen}")


def test_an_idle_line_takes_the_round_trip_that_was_asked(wan: Wan) -> None:
    """Never less, and at best hardly more."""
    near, far = connected(wan)

    def ping() -> float:
        at = time.monotonic()
        near.sendall(b"?")
        far.sendall(far.recv(1))
        near.recv(1)
        return time.monotonic() - at

    trips = [ping() for _ in range(15)]
    near.close()
    far.close()
    assert 1.0 <= min(trips) / (LINE.rtt_ms / 1e3) < 1.1


def test_segments_are_lost_at_the_rate_that_was_asked(wan: Wan, stream: Stream) -> None:
    """One in a hundred, also out of the middle of super-packets; TCP repairs it, so every loss is sent again."""
    assert wan.counters()["a_to_b"].lost == 0
    wan.shape(loss=0.01)
    before, (_, resent_before) = wan.counters()["a_to_b"], wan.tcp_segments("a")
    stream.await_bytes(20_000_000)
    after, (_, resent_after) = wan.counters()["a_to_b"], wan.tcp_segments("a")
    lost, passed = after.lost - before.lost, after.segments - before.segments
    assert lost / passed == pytest.approx(0.01, rel=0.4)
    assert resent_after - resent_before >= 0.8 * lost


def test_damage_does_not_get_through(wan: Wan) -> None:
    """Super-packets that were cut where segments are missing still carry the bytes that were sent, in order."""
    wan.shape(loss=0.02)
    near, far = connected(wan)
    data = os.urandom(4_000_000)
    sender = threading.Thread(target=near.sendall, args=(data,))
    sender.start()
    arrived = b""
    while len(arrived) < len(data):
        arrived += far.recv(1 << 20)
    sender.join()
    near.close()
    far.close()
    assert arrived == data
    assert wan.counters()["a_to_b"].lost > 0


def test_a_cut_line_is_silent_until_it_heals(wan: Wan, stream: Stream) -> None:
    """Neither end is told, nothing arrives, and the same connection goes on afterwards."""
    wan.cut()
    time.sleep(3 * LINE.rtt_ms / 1e3 + LINE.queue_ms / 1e3)  # what was under way
    assert stream.rate(0.3) == 0
    assert wan.counters()["a_to_b"].cut > 0
    wan.heal()
    stream.await_bytes(1 << 20)


def test_two_rigs_do_not_meet(wan: Wan) -> None:
    """The same addresses and ports, at the same time."""
    with Wan(LINE) as other:
        doors = []
        for rig in (wan, other):
            with rig.within("b"):
                doors.append(socket.create_server((rig.address("b"), 5000)))
        near, far = connected(other)
        near.sendall(b"x")
        assert far.recv(1) == b"x"
        assert wan.counters()["a_to_b"].segments == 0
        for sock in (*doors, near, far):
            sock.close()


def test_a_killed_run_leaves_nothing_behind() -> None:
    """The owner of a rig is killed outright: the line's process ends, and with it the namespaces, which nobody else
    holds."""
    script = (
        "import time; from tools.wan.rig import Wan; wan = Wan().__enter__();"
        "print(wan._process.pid, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    line = Path("/proc", owner.stdout.readline().strip())
    assert line.exists()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + LIMIT_S
    while line.exists() and "\nState:\tZ" not in (line / "status").read_text():
        assert time.monotonic() < deadline, "the line outlives its owner"
        time.sleep(0.02)
