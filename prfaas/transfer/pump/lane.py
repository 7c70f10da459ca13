"""A lane: one TCP connection and the thread that moves its bytes.

The thread blocks in the kernel (no event loop per byte). Others may wake it, which costs nothing while it is busy, and
hang up, which ends whatever it does. What went wrong always surfaces in the thread as one ProtocolError.
"""

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from prfaas.transfer.attempts import LaneId
from prfaas.transfer.frames import Bytes, Cause, ProtocolError
from prfaas.transfer.pump.sockets import (
    congestion_of,
    pace,
    receive_many,
    receive_some,
    send_some,
    set_patience,
    translated,
    unacknowledged,
)
from prfaas.transfer.pump.tcpinfo import LineInfo, line_info

#: How long a lane goes on reading after its last word, so that unread bytes do not make the kernel reset that word
#: away.
LINGER_S = 1.0
#: How often a lane that is blocked looks whether anything has moved, within the time after which it gives up.
LOOKS = 8


class Lane:
    def __init__(self, lane_id: LaneId, sock: socket.socket | None = None) -> None:
        self.id = lane_id
        #: Called about as often as a lane looks that is blocked inside a frame, when more of it has come.
        self.on_movement: Callable[[], None] | None = None
        self.spoke_at = self.heard_at = time.monotonic()
        #: When it last brought something of an attempt.
        self.worked_at = self.heard_at
        #: It has carried something that somebody wanted.
        self.proven = False
        #: How much of what is being written the kernel has taken so far. Whoever writes begins it anew.
        self.taken = 0
        #: Where an outgoing lane goes.
        self.region = ""
        self._paced: float | None = None
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wakes, select.POLLIN)
        self._asleep = self._called = False
        self._deadline: float | None = None
        self._patience_s = 0.0
        #: Bytes written, and how many of them the peer's kernel had at the last look.
        self._written = self._delivered = 0
        self._stopped: ProtocolError | None = None
        #: Others must not use a descriptor whose number is another file's by now.
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._closed = False
        if sock is not None:
            self.connected(sock)

    # For other threads.

    def wake(self) -> None:
        """Its next `sleep`, or the one it is in, ends at once. Each side sets its own mark before it looks at the
        other's: one of the two always sees."""
        self._called = True
        if self._asleep:
            with self._lock:
                if not self._closed:
                    os.eventfd_write(self._wakes, 1)

    def hang_up(self, cause: Cause, detail: str) -> None:
        with self._lock:
            self._stopped = self._stopped or ProtocolError(cause, detail)
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
        self.wake()

    @property
    def asleep(self) -> bool:
        """It has nothing to do."""
        return self._asleep

    @property
    def written(self) -> int:
        """Bytes, since the beginning."""
        return self._written

    @property
    def stopped(self) -> bool:
        return self._stopped is not None

    def unacknowledged(self) -> int:
        """Bytes written that the peer's kernel does not have yet."""
        with self._lock:
            return unacknowledged(self._sock) if self._sock is not None else 0

    def info(self) -> LineInfo | None:
        with self._lock:
            return line_info(self._sock) if self._sock is not None else None

    def congestion(self) -> str:
        with self._lock:
            return congestion_of(self._sock) if self._sock is not None else ""

    def pace(self, bytes_per_s: float | None) -> None:
        """Also before it is connected."""
        if bytes_per_s == self._paced:
            return
        with self._lock:
            self._paced = bytes_per_s
            if self._sock is not None:
                pace(self._sock, bytes_per_s)

    # For the lane's thread.

    def fileno(self) -> int:
        """Readable when somebody woke the lane."""
        return self._wakes

    def connected(self, sock: socket.socket) -> None:
        with self._lock:
            self._sock = sock
            self._poll.register(sock, select.POLLIN)
            if self._paced is not None:
                pace(sock, self._paced)
        self.check_stopped()

    @property
    def sock(self) -> socket.socket:
        assert self._sock is not None
        return self._sock

    def check_stopped(self) -> None:
        if self._stopped is not None:
            raise self._stopped

    def limit(self, seconds: float, *, altogether: bool) -> None:
        """Give up when nothing has moved for `seconds`; `altogether`, when it takes longer than that from now."""
        self._patience_s = seconds
        self._deadline = time.monotonic() + seconds if altogether else None
        set_patience(self.sock, seconds / LOOKS)

    def sleep(self, seconds: float) -> None:
        """Until the peer or somebody else has something for us, or the time is over."""
        self._asleep = True
        if not self._called:
            for fd, _ in self._poll.poll(max(0.0, seconds) * 1000):
                if fd == self._wakes:
                    os.eventfd_read(self._wakes)
        self._asleep = self._called = False
        self.check_stopped()

    def begin(self, into: memoryview) -> bool:
        """Fill `into` if a frame has begun to come; False without waiting if none has."""
        count = receive_some(self.sock, into, wait=False)
        if count is None:
            self.check_stopped()
            return False
        self._fill(into, count)
        return True

    def read(self, into: memoryview) -> None:
        """Fill `into`."""
        self._fill(into, receive_some(self.sock, into))

    def scatter(self, into: Sequence[memoryview]) -> None:
        """Fill all of these, one after the other."""
        count = receive_many(self.sock, into) if len(into) > 1 else 0
        for part in into:
            filled = min(count, len(part))
            count -= filled
            if filled < len(part):
                self.read(part[filled:])

    def write(self, buffers: Sequence[Bytes]) -> None:
        """One call for all of them where the socket takes them at once. What the kernel has taken from us may be
        megabytes that a slow line carries for long: what counts as progress is what has reached the peer."""
        self.spoke_at = moved_at = time.monotonic()
        left = sum(len(buffer) for buffer in buffers)
        while True:
            self.check_stopped()
            try:
                taken = send_some(self.sock, buffers)
            except ProtocolError:
                self.check_stopped()
                raise
            self._written += taken
            self.taken += taken
            left -= taken
            if not left:
                return
            buffers = _behind(buffers, taken)
            with translated():
                delivered = self._written - unacknowledged(self.sock)
            if delivered > self._delivered:
                self._delivered, moved_at = delivered, time.monotonic()
            self._check_progress(moved_at)

    def drain(self, scratch: memoryview) -> None:
        """Our last word was said: read on until the peer has closed, for a while."""
        deadline = time.monotonic() + LINGER_S
        with contextlib.suppress(OSError, ProtocolError):
            self.limit(LINGER_S, altogether=True)
            self.sock.shutdown(socket.SHUT_WR)
            while receive_some(self.sock, scratch) != 0 and time.monotonic() < deadline:
                pass

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._wakes)
                if self._sock is not None:
                    self._sock.close()
                    self._sock = None

    def _fill(self, into: memoryview, count: int | None) -> None:
        """Of `into` so much has come at the first try."""
        moved_at, done = time.monotonic(), 0
        while True:
            if count == 0:
                self.check_stopped()
                raise ProtocolError(Cause.PEER_GONE, "closed")
            if count:
                done += count
                moved_at = time.monotonic()
            if done == len(into):
                return
            self.check_stopped()
            self._check_progress(moved_at)
            if count and self.on_movement is not None:
                self.on_movement()
            count = receive_some(self.sock, into[done:])

    def _check_progress(self, moved_at: float) -> None:
        """Raises ProtocolError when it is time to give up."""
        now = time.monotonic()
        if self._deadline is not None:
            if now > self._deadline:
                raise ProtocolError(Cause.NO_PROGRESS, "not done in time")
        elif now > moved_at + self._patience_s:
            raise ProtocolError(Cause.NO_PROGRESS, f"nothing moved for {self._patience_s:g} s")


def _behind(buffers: Sequence[Bytes], taken: int) -> list[memoryview]:
    """What is left of the buffers after so many bytes."""
    left: list[memoryview] = []
    for buffer in buffers:
        skipped = min(taken, len(buffer))
        taken -= skipped
        if skipped < len(buffer):
            left.append(memoryview(buffer)[skipped:])
    return left
