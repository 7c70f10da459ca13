"""One direction of a WAN in user space: a line whose rate all connections share, and one connection's pipe over it.

Bytes take turns by quanta, then spend the line's delay on their way; order and bytes never change. What a pipe holds is
bounded by line x RTT and a little, beyond which its source is not read: back-pressure reaches the sender as on a real
line. A half-close and a reset travel like data, behind what was sent before them.
"""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

#: What a connection may put on the line before it is another's turn.
QUANTUM_BYTES = 16 << 10
#: How far ahead of time a line accepts bytes, like the queue of a router. It outlasts the late wake-ups of a busy host,
#: so that a line with work never idles.
QUEUE_S = 0.020
#: What the kernel may hold for each end, each way.
KERNEL_BYTES = 64 << 10

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Line:
    """One direction: the rate that all connections share and the time a byte is on its way."""

    def __init__(self, bits_per_s: float, delay_s: float) -> None:
        self.delay_s = delay_s
        self._bytes_per_s = bits_per_s / 8
        self._free_at = 0.0
        self._turn = asyncio.Lock()
        self._whole = asyncio.Event()
        self._whole.set()

    def set_rate(self, bits_per_s: float) -> None:
        """From now on; what is on its way arrives as it would have."""
        self._bytes_per_s = bits_per_s / 8

    def cut(self) -> None:
        """Nothing goes in and nothing comes out, and neither end is told."""
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    async def passable(self) -> None:
        """Until it is not cut."""
        await self._whole.wait()

    @property
    def window_bytes(self) -> int:
        """What one connection may have on the line: its content over a round trip, and a little."""
        return int(self._bytes_per_s * (2 * self.delay_s + 2 * QUEUE_S)) + 4 * QUANTUM_BYTES

    async def carry(self, nbytes: int) -> float:
        """Wait for a turn, first come first served; returns the loop time at which the last byte arrives.

        The bytes were there when they were asked for, so a turn that came late (another's, or a slow wake-up) is no
        time the line stood idle.
        """
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        async with self._turn:
            await self.passable()
            ahead_s = self._free_at - loop.time()
            if ahead_s > QUEUE_S:
                await asyncio.sleep(ahead_s - QUEUE_S / 2)
            self._free_at = max(self._free_at, asked_at) + nbytes / self._bytes_per_s
            return self._free_at + self.delay_s


class Ending(Enum):
    """What follows the last byte of a direction."""

    HALF_CLOSE = "half_close"
    RESET = "reset"


@dataclass(slots=True)
class Leg:
    """One end of a relayed connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def bound_buffers(self) -> None:
        """Keep the kernel from taking in megabytes that the line has not carried yet."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)

    def reset(self) -> None:
        """Close with RST instead of FIN; what was not yet sent is dropped. Idempotent."""
        sock = self.writer.get_extra_info("socket")
        if sock.fileno() >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.writer.transport.abort()


class Pipe:
    """One direction of one connection. `passed` is told the bytes that were handed to the sink."""

    def __init__(self, source: Leg, sink: Leg, line: Line, passed: Callable[[int], None]) -> None:
        self._source, self._sink, self._line, self._passed = source, sink, line, passed
        self._under_way: deque[tuple[float, bytes | Ending]] = deque()
        self._held_bytes = 0
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Returns when the source has ended and everything was handed on, or when either end was reset."""
        filling = asyncio.create_task(self._fill(), name="wan-fill")
        try:
            await self._drain()
        finally:
            filling.cancel()
            await asyncio.gather(filling, return_exceptions=True)

    async def _fill(self) -> None:
        """Read the source onto the line."""
        ending = Ending.HALF_CLOSE
        try:
            while data := await self._source.reader.read(QUANTUM_BYTES):
                self._held_bytes += len(data)
                self._put(await self._line.carry(len(data)), data)
                while self._held_bytes > self._line.window_bytes:
                    await self._change()
        except OSError:
            ending = Ending.RESET
        self._put(asyncio.get_running_loop().time() + self._line.delay_s, ending)

    async def _drain(self) -> None:
        """Hand what has arrived to the sink."""
        try:
            while isinstance(arrived := await self._next(), bytes):
                self._sink.writer.write(arrived)
                await self._sink.writer.drain()
                self._passed(len(arrived))
                self._held_bytes -= len(arrived)
                self._changed.set()
            match arrived:
                case Ending.HALF_CLOSE:
                    self._sink.writer.write_eof()
                case Ending.RESET:
                    self._sink.reset()
        except OSError:  # the sink is gone, and the news takes its time to reach the source
            await asyncio.sleep(self._line.delay_s)
            self._source.reset()

    async def _next(self) -> bytes | Ending:
        while not self._under_way:
            await self._change()
        arrives_at, item = self._under_way.popleft()
        await asyncio.sleep(arrives_at - asyncio.get_running_loop().time())
        await self._line.passable()
        return item

    def _put(self, arrives_at: float, item: bytes | Ending) -> None:
        self._under_way.append((arrives_at, item))
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
