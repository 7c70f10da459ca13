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
from collections.abc import Iterator
from typing import Any, Protocol

from prfaas.transfer.frames import Bytes, Cause, ProtocolError

BACKLOG = 128


class Pollable(Protocol):
    def fileno(self) -> int: ...


@contextlib.contextmanager
def translated() -> Iterator[None]:
    try:
        yield
    except (BlockingIOError, TimeoutError) as error:
        raise ProtocolError(Cause.NO_PROGRESS, error.strerror or "timed out") from error
    except OSError as error:
        raise ProtocolError(Cause.PEER_GONE, error.strerror or str(error)) from error


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


def send_at_once(sock: socket.socket) -> None:
    """A frame does not wait for the next one. When to give up is the lane's decision: the kernel's own time-out
    (TCP_USER_TIMEOUT) may end a line that loses packets although it moves."""
    with translated():
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def send_some(sock: socket.socket, *data: Bytes) -> int:
    """How many bytes the socket took; 0 when it took none within its patience."""
    try:
        return sock.sendmsg(data)
    except BlockingIOError:
        return 0


def receive_some(sock: socket.socket, into: memoryview) -> int | None:
    """How many bytes came, 0 at the end of the stream, None when none came within the socket's patience. Waits for all
    of `into` as long as that."""
    try:
        return sock.recv_into(into, 0, socket.MSG_WAITALL)
    except BlockingIOError:
        return None


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
        sock = socket.socket(family, kind, protocol)
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
