"""Blocking sockets as the lanes use them. Errors of the system become ProtocolErrors here and nowhere else."""

import contextlib
import errno
import fcntl
import os
import select
import socket
import struct
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from prfaas.transfer.frames import Bytes, Cause, ProtocolError

BACKLOG = 128
#: What the kernel may hold that it has not sent yet: enough to keep a line that loses packets busy, little enough that
#: an urgent frame does not wait behind many megabytes.
UNSENT_BYTES = 1 << 20
#: A line that carries nothing is probed by the kernel too, for middleboxes that forget idle connections.
KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_PROBES = 15, 5, 6
UNPACED = (1 << 64) - 1
#: Linux numbers that this Python may not name.
_TCP_NOTSENT_LOWAT = 25
_SO_MAX_PACING_RATE = 47


class Pollable(Protocol):
    def fileno(self) -> int: ...


@contextlib.contextmanager
def translated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _translated(error) from error


def _translated(error: OSError) -> ProtocolError:
    if isinstance(error, BlockingIOError | TimeoutError):
        return ProtocolError(Cause.NO_PROGRESS, error.strerror or "timed out")
    return ProtocolError(Cause.PEER_GONE, error.strerror or str(error))


def ready(timeout_s: float, *pollables: Pollable) -> bool:
    """Whether one of these can be read, or has failed, within the time."""
    poll = select.poll()
    for pollable in pollables:
        poll.register(pollable, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def set_patience(sock: socket.socket, seconds: float) -> None:
    """How long one call may block."""
    timeval = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    with translated():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


def tune(sock: socket.socket, congestion: str) -> None:
    """How a lane's socket behaves. A frame does not wait for the next one. When to give up is the lane's decision: the
    kernel's own time-out (TCP_USER_TIMEOUT) may end a line that loses packets although it moves. A congestion control
    that the system does not have or allow is not insisted on: `congestion_of` says what came of it."""
    with translated():
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    if congestion:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())


def congestion_of(sock: socket.socket) -> str:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def pace(sock: socket.socket, bytes_per_s: float | None) -> None:
    """The kernel spaces the packets so that no more than this leaves; None: as fast as congestion control allows."""
    rate = UNPACED if bytes_per_s is None else max(1, int(bytes_per_s))
    sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("@Q", rate))


def send_some(sock: socket.socket, data: Sequence[Bytes]) -> int:
    """How many bytes the socket took; 0 when it took none within its patience."""
    try:
        return sock.sendmsg(data)
    except BlockingIOError:
        return 0
    except OSError as error:
        raise _translated(error) from error


def receive_some(sock: socket.socket, into: memoryview, *, wait: bool = True) -> int | None:
    """How many bytes came, 0 at the end of the stream, None when none came within the socket's patience. Waits for all
    of `into` as long as that, unless told not to wait."""
    try:
        return sock.recv_into(into, 0, socket.MSG_WAITALL if wait else socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError as error:
        raise _translated(error) from error


def receive_many(sock: socket.socket, into: Sequence[memoryview]) -> int:
    """How many bytes came, in the order of the buffers, within the socket's patience."""
    try:
        return sock.recvmsg_into(into, 0, socket.MSG_WAITALL)[0]
    except BlockingIOError:
        return 0
    except OSError as error:
        raise _translated(error) from error


def unacknowledged(sock: socket.socket) -> int:
    """Bytes written to the socket that the peer's kernel does not have yet."""
    answer = fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(answer, sys.byteorder)


def listener(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(address)
    sock.listen(BACKLOG)
    return sock


def connect(address: str, timeout_s: float, interrupt: Pollable) -> socket.socket:
    """A socket connected to `host:port`, to the first of its addresses that answers. Raises ProtocolError; at once when
    `interrupt` can be read."""
    try:
        host, _, port = address.rpartition(":")
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise ProtocolError(Cause.CONNECT, f"{address}: {error}") from error
    deadline = time.monotonic() + timeout_s
    failure = ""
    for family, kind, protocol, _, where in found:
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            raise ProtocolError(Cause.CONNECT, f"{address}: {error.strerror}") from error
        code = _connect(sock, where, max(0.0, deadline - time.monotonic()), interrupt)
        if not code:
            return sock
        sock.close()
        failure = os.strerror(code)
    raise ProtocolError(Cause.CONNECT, f"{address}: {failure}")


def _connect(sock: socket.socket, where: Any, timeout_s: float, interrupt: Pollable) -> int:
    """The error number, 0 for none."""
    sock.setblocking(False)
    error = sock.connect_ex(where)
    if error == errno.EINPROGRESS:
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        poll.register(interrupt, select.POLLIN)
        events = dict(poll.poll(timeout_s * 1000))
        if interrupt.fileno() in events:
            error = errno.EINTR
        elif sock.fileno() in events:
            error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        else:
            error = errno.ETIMEDOUT
    sock.setblocking(True)
    return error
