"""Two network namespaces on this machine joined by an emulated WAN line: what tests and benchmarks of transfers run on.

    with Wan(Line(mbit=1000, rtt_ms=30, loss=0.001)) as wan:
        server = subprocess.Popen(wan.command("b", ["iperf3", "-s"]))
        subprocess.run(wan.command("a", ["iperf3", "-c", wan.address("b")]))
        wan.shape(mbit=100)
        wan.cut()

The line is a process of its own (link.c), compiled on first use. The namespaces are nameless and live as long as that
process and what runs in them; it ends with us however we end, so that nothing of a run can stay behind, and runs beside
each other do not meet. Nothing outside of the namespaces is changed, with one exception: a congestion control that the
kernel has and does not let everybody use is added to the machine's list of allowed ones, for otherwise no namespace can
have it.
"""

import ctypes
import json
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from tools.wan.build import Unavailable, compiled

Side = Literal["a", "b"]

_SOURCE = Path(__file__).with_name("link.c")
_ADDRESSES: dict[Side, str] = {"a": "10.99.0.1", "b": "10.99.0.2"}
#: Payload in a full TCP segment with time stamps, and the segment's bytes on the wire.
_PAYLOAD_BYTES, _WIRE_BYTES = 1448, 1538
_CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"
_ALLOWED_CONGESTION = "/proc/sys/net/ipv4/tcp_allowed_congestion_control"
_CLONE_NEWNET = 0x40000000
_END_S = 5.0


@dataclass(frozen=True, slots=True)
class Line:
    """One line, the same in both directions. `loss` is the chance of each segment; `queue_ms` how much may wait in
    front of the line before it drops."""

    mbit: float = 1000.0
    rtt_ms: float = 30.0
    loss: float = 0.0
    queue_ms: float = 20.0

    @property
    def payload_bytes_per_s(self) -> float:
        """The most that TCP can deliver."""
        return self.mbit * 1e6 / 8 * _PAYLOAD_BYTES / _WIRE_BYTES


@dataclass(frozen=True, slots=True)
class Counters:
    """One direction since the start: IP bytes delivered, and segments that came, of which so many were lost at random,
    dropped by the full queue, or came while the line was cut."""

    bytes: int
    segments: int
    lost: int
    overflowed: int
    cut: int


@cache
def lacking() -> str | None:
    """What this machine lacks to run the rig; None if it can."""
    if os.geteuid() != 0:
        return "the WAN rig needs root for network namespaces"
    if not Path("/dev/net/tun").exists():
        return "the WAN rig needs /dev/net/tun"
    try:
        with Wan():
            return None
    except Unavailable as error:
        return f"the WAN rig does not run here: {error}"


class Wan:
    """A line and its two ends. `congestion` is the namespaces' default, where the kernel has it."""

    def __init__(self, line: Line = Line(), *, congestion: str | None = None, seed: int = 1) -> None:
        self.line, self._congestion, self._seed = line, congestion, seed
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._program = compiled(_SOURCE, "-lm")
        line = self.line
        shape = (line.mbit, line.rtt_ms * 500, line.loss * 1e6, line.queue_ms, self._seed)
        self._process = subprocess.Popen(
            [self._program, "run", *map(str, shape)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        ready = self._process.stdout.readline().split()
        if not ready:
            why = self._process.stderr.read().strip()
            self._end()
            raise Unavailable(why or "the line ended at once")
        self._namespaces: dict[Side, str] = {
            side: f"/proc/{self._process.pid}/fd/{fd}" for side, fd in zip(_ADDRESSES, ready[1:], strict=True)
        }
        if self._congestion is not None:
            try:
                self._set_congestion(self._congestion)
            except BaseException:
                self._end()
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def address(self, side: Side) -> str:
        return _ADDRESSES[side]

    def command(self, side: Side, argv: Sequence[str | os.PathLike[str]]) -> list[str]:
        """The command line that runs `argv` in the namespace of a side."""
        return [str(self._program), "enter", self._namespaces[side], *map(str, argv)]

    @contextmanager
    def within(self, side: Side) -> Iterator[None]:
        """This thread in the namespace of a side. Sockets made there stay there."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            there = os.open(self._namespaces[side], os.O_RDONLY)
            try:
                _set_namespace(there)
            finally:
                os.close(there)
            try:
                yield
            finally:
                _set_namespace(home)
        finally:
            os.close(home)

    def shape(self, *, mbit: float | None = None, rtt_ms: float | None = None, loss: float | None = None) -> None:
        """Change the running line for what enters it from now on."""
        if mbit is not None:
            self._tell(f"rate {mbit}")
            self.line = replace(self.line, mbit=mbit)
        if rtt_ms is not None:
            self._tell(f"delay {rtt_ms * 500}")
            self.line = replace(self.line, rtt_ms=rtt_ms)
        if loss is not None:
            self._tell(f"loss {loss * 1e6}")
            self.line = replace(self.line, loss=loss)

    def cut(self) -> None:
        """Nothing passes any more, and nobody is told: what a broken WAN looks like to both ends."""
        self._tell("cut")

    def heal(self) -> None:
        self._tell("heal")

    def counters(self) -> dict[str, Counters]:
        """By direction: "a_to_b", "b_to_a"."""
        return {way: Counters(**fields) for way, fields in json.loads(self._tell("stats")).items()}

    def tcp_segments(self, side: Side) -> tuple[int, int]:
        """Segments that the side's kernel has sent since the start, and those that it sent again."""
        with self.within(side):
            names, values = (
                line.split()
                for line in Path("/proc/thread-self/net/snmp").read_text().splitlines()
                if line[:4] == "Tcp:"
            )
        tcp = dict(zip(names[1:], map(int, values[1:]), strict=True))
        return tcp["OutSegs"], tcp["RetransSegs"]

    def _set_congestion(self, name: str) -> None:
        _allow_congestion(name)
        for side in _ADDRESSES:
            with self.within(side):
                try:
                    Path(_CONGESTION).write_text(name)
                except OSError as error:
                    raise Unavailable(f"the kernel does not let us use {name}: {error.strerror}") from error

    def _tell(self, command: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(command + "\n")
            answer = self._process.stdout.readline()
        if not answer.startswith("{"):
            raise RuntimeError(f"the line has ended or did not understand {command!r}: {answer!r}")
        return answer

    def _end(self) -> None:
        process = self._process
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        process.stderr.close()


def _allow_congestion(name: str) -> None:
    """Not to be allowed to do this is no error: it may not be needed."""
    try:
        listed = Path(_ALLOWED_CONGESTION).read_text().split()
        if name not in listed:
            Path(_ALLOWED_CONGESTION).write_text(" ".join([*listed, name]))
    except OSError:
        pass


def _set_namespace(fd: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")
