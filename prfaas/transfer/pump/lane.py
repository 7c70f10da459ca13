"""A lane: one TCP connection and the thread that moves its bytes.

The thread blocks in the kernel (no event loop per byte); the control thread gives it orders through a mailbox and can
stop it at any moment. What went wrong always surfaces in the thread as one ProtocolError.
"""

import contextlib
import socket
import threading
import time
from dataclasses import dataclass

from prfaas.transfer import receiver, sender
from prfaas.transfer.attempts import LaneId
from prfaas.transfer.frames import (
    HEADER_BYTES,
    NO_ATTEMPT,
    Bytes,
    Cause,
    Header,
    Kind,
    ProtocolError,
    check_payload,
    decode,
    header_for,
)
from prfaas.transfer.grant import Grant
from prfaas.transfer.greeting import refusal, refused
from prfaas.transfer.pump.mailbox import Mailbox
from prfaas.transfer.pump.sockets import (
    Pollable,
    ready,
    receive_some,
    send_some,
    set_patience,
    translated,
    unacknowledged,
)

#: How long a lane goes on reading after its last word, so that unread bytes do not make the kernel reset that word
#: away.
LINGER_S = 1.0
#: How often a lane that is blocked looks whether anything has moved, within the time after which it gives up.
LOOKS = 4


@dataclass(frozen=True, slots=True)
class Land:
    """Order: receive what the grant allows into this memory."""

    grant: Grant
    memory: memoryview


Order = receiver.Admit | receiver.Acknowledge | Land | sender.Stream


class Lane:
    def __init__(self, lane_id: LaneId, sock: socket.socket | None = None) -> None:
        self.id = lane_id
        self.orders: Mailbox[Order] = Mailbox()
        self._sock = sock
        self._deadline: float | None = None
        self._patience_s = 0.0
        #: Bytes written, how many of them the peer's kernel had at the last look, and when anything moved last.
        self._written = self._delivered = 0
        self._moved_at = 0.0
        self._stopped: ProtocolError | None = None
        self._writing = False
        #: The control thread must not shut down a socket that the lane's thread is just closing.
        self._lock = threading.Lock()
        self._frame = memoryview(bytearray(HEADER_BYTES))

    # The control thread's side.

    def stop(self, cause: Cause, detail: str) -> None:
        """Make the thread let go. It wakes from a read at once; a write in progress is cut off, else it may say
        goodbye."""
        with self._lock:
            self._stopped = self._stopped or ProtocolError(cause, detail)
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR if self._writing else socket.SHUT_RD)
        self.orders.wake()

    def unacknowledged(self) -> int:
        """Bytes written that the peer's kernel does not have yet."""
        with self._lock:
            return unacknowledged(self._sock) if self._sock is not None else 0

    # The thread's side.

    def connected(self, sock: socket.socket) -> None:
        with self._lock:
            self._sock = sock
        self.check_stopped()

    @property
    def sock(self) -> socket.socket:
        assert self._sock is not None
        return self._sock

    @property
    def stopped(self) -> bool:
        return self._stopped is not None

    def check_stopped(self) -> None:
        if self._stopped is not None:
            raise self._stopped

    def limit(self, seconds: float, *, altogether: bool) -> None:
        """Give up when nothing has moved for `seconds`; `altogether`, when it takes longer than that from now."""
        self._moved_at, self._patience_s = time.monotonic(), seconds
        self._deadline = self._moved_at + seconds if altogether else None
        set_patience(self.sock, seconds / LOOKS)

    def check_progress(self) -> None:
        """Raises ProtocolError when it is time to give up. What the kernel has taken from us may be megabytes that a
        slow line carries for long: what counts is what has reached the peer, and what has come from it."""
        now = time.monotonic()
        with translated():
            delivered = self._written - unacknowledged(self.sock)
        if delivered > self._delivered:
            self._delivered, self._moved_at = delivered, now
        if self._deadline is not None and now > self._deadline:
            raise ProtocolError(Cause.NO_PROGRESS, "not done in time")
        if self._deadline is None and now > self._moved_at + self._patience_s:
            raise ProtocolError(Cause.NO_PROGRESS, f"nothing moved for {self._patience_s:g} s")

    def header(self) -> Header:
        """The next frame that says something. An ABORT or REFUSE is raised as what it says."""
        while True:
            self.read(self._frame)
            header = decode(self._frame)
            if header.kind in (Kind.ABORT, Kind.REFUSE):
                raise refused(self.payload(header))
            if header.kind is not Kind.KEEPALIVE:
                return header

    def expect(self, kind: Kind) -> Header:
        header = self.header()
        if header.kind is not kind:
            raise ProtocolError(Cause.MALFORMED, f"{header.kind.name} where {kind.name} was due")
        return header

    def payload(self, header: Header) -> bytearray:
        """The payload of any frame but a part; its size was bounded when the header was decoded."""
        payload = bytearray(header.length)
        self.read(memoryview(payload))
        check_payload(header, payload)
        return payload

    def read(self, into: memoryview) -> None:
        """Fill `into`."""
        done = 0
        self._moved_at = time.monotonic()
        while done < len(into):
            self.check_stopped()
            with translated():
                count = receive_some(self.sock, into[done:])
            if count == 0:
                self.check_stopped()
                raise ProtocolError(Cause.PEER_GONE, "closed")
            if count:
                done += count
                self._moved_at = time.monotonic()
            if done < len(into):
                self.check_progress()

    def write(self, header: bytes, payload: Bytes = b"") -> None:
        # `stop` sets its mark before it looks at `_writing`, we do the reverse: one of the two always sees the other.
        self._writing = True
        try:
            self.check_stopped()
            self._send(header, payload)
        except ProtocolError:
            self.check_stopped()
            self._last_words()
            raise
        finally:
            self._writing = False

    def wait(self, timeout_s: float, *also: Pollable) -> list[Order]:
        """Orders; [] when none came in time, or when there is something to do at `also`."""
        ready(timeout_s, self.orders, *also)
        self.check_stopped()
        return self.orders.take()

    def answer(self, timeout_s: float) -> Order:
        """The one order that the control thread owes us now."""
        orders = self.wait(timeout_s)
        if not orders:
            raise ProtocolError(Cause.NO_PROGRESS, f"nothing decided within {timeout_s} s")
        assert len(orders) == 1, f"{orders} where one was due"
        return orders[0]

    def listen(self) -> None:
        """Raises ProtocolError if the peer has said that it is over, or left."""
        if ready(0, self.sock):
            header = self.header()
            raise ProtocolError(Cause.MALFORMED, f"{header.kind.name} in mid-stream")

    def farewell(self, kind: Kind, error: ProtocolError, attempt: str = NO_ATTEMPT) -> None:
        """Tell the peer why it ends, if there is one and as far as it still listens."""
        if self._sock is None:
            return
        payload = refusal(error.cause, error.detail)
        deadline = time.monotonic() + LINGER_S
        scratch = memoryview(bytearray(1 << 16))
        with contextlib.suppress(OSError, ProtocolError):
            self.limit(LINGER_S, altogether=True)
            self._send(header_for(kind, payload, attempt=attempt), payload)
            self.sock.shutdown(socket.SHUT_WR)
            while receive_some(self.sock, scratch) != 0 and time.monotonic() < deadline:
                pass

    def close(self) -> None:
        with self._lock:
            if self._sock is not None:
                self._sock.close()
                self._sock = None
        self.orders.close()

    def _send(self, header: bytes, payload: Bytes) -> None:
        """One call for both where the socket takes them at once."""
        head, body = memoryview(header), memoryview(payload)
        while head or body:
            with translated():
                taken = send_some(self.sock, head, body)
            self._written += taken
            head, body = head[taken:], body[max(0, taken - len(head)) :]
            if head or body:
                self.check_progress()

    def _last_words(self) -> None:
        """The write failed: what the peer said before it closed is the better reason."""
        try:
            self.limit(LINGER_S, altogether=True)
            self.header()
        except ProtocolError as error:
            if error.cause not in (Cause.PEER_GONE, Cause.NO_PROGRESS):
                raise error from None
