"""One TCP connection of a token link, the same at either end: frames out and in, and a watch on the peer's life.

Whoever has sent nothing for a while is asked for a sign of life; without one the connection is given up, however long
the kernel would wait. Malformed input ends the connection, and that alone.
"""

import asyncio
import contextlib
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar, cast

from google.protobuf.message import DecodeError

from prfaas.cluster import Incarnation
from prfaas.rpc.identity import Identity
from prfaas.rpc.link_frames import (
    ANYBODY,
    HEADER_BYTES,
    MAX_GREETING_BYTES,
    FrameReader,
    Kind,
    Malformed,
    frame,
    greeting,
    read_greeting,
)
from prfaas.rpc.translate import MAX_MESSAGE_BYTES
from prfaas.rpc.v1 import worker_pb2 as pb
from prfaas.security import PeerRole

#: What the kernel takes on top of what is on its way: a ping must not wait behind megabytes of prompts there.
UNSENT_BYTES = 1 << 17

_PING, _PONG = frame(Kind.PING), frame(Kind.PONG)

P = TypeVar("P", bound=asyncio.BaseProtocol)


class LinkConnection(asyncio.Protocol, ABC):
    """`said` is called with the peer's greeting, then, once that was accepted, `received` with each message."""

    def __init__(self, keepalive_s: float, keepalive_timeout_s: float) -> None:
        self._keepalive_s, self._keepalive_timeout_s = keepalive_s, keepalive_timeout_s
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(MAX_GREETING_BYTES)
        self._transport: asyncio.Transport | None = None
        self._accepted = False
        self._reason = ""
        #: The peer, or the line, does not take what is sent.
        self.paused = False
        self._written = 0
        self._heard_at = 0.0
        self._watch: asyncio.TimerHandle | None = None
        #: Where in what was written the ping stands that has not been answered, how much had gone to the kernel when
        #: that was last looked at, and whether the ping had.
        self._ping_end: int | None = None
        self._asked_at, self._gone = 0.0, 0
        self._ping_gone = False

    @abstractmethod
    def said(self, greeting: pb.LinkGreeting) -> None: ...

    @abstractmethod
    def received(self, message: bytes) -> None:
        """Raises Malformed, or protobuf's DecodeError, for what cannot be read."""
        ...

    @abstractmethod
    def flush(self) -> None:
        """The peer takes more: sends what is waiting, unless `paused`."""
        ...

    @abstractmethod
    def lost(self, reason: str) -> None:
        """Called once, when the connection has ended, for whatever reason."""
        ...

    # -- what the ends do

    def accept(self) -> None:
        """The greeting was good: from now on messages may come, and silence counts."""
        self._accepted = True
        self._reader.max_bytes = MAX_MESSAGE_BYTES
        self._watch = self._loop.call_later(self._keepalive_s, self._check)

    def send(self, frame: bytes) -> None:
        if self._transport is not None:
            self._written += len(frame)
            self._transport.write(frame)

    def close(self, reason: str) -> None:
        """Ends the connection once what was sent is on its way. The first reason counts."""
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.close()

    def abort(self, reason: str) -> None:
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()

    @property
    def unsent_bytes(self) -> int:
        """What the kernel has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def peer(self, what: str) -> Any:
        """As `get_extra_info` of the transport."""
        return self._transport.get_extra_info(what) if self._transport is not None else None

    # -- what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an asyncio.Transport by its type where it is uvloop's.
        self._transport, self._heard_at = cast(asyncio.Transport, transport), self._loop.time()
        tune(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self._reason:
            return  # what was refused ends the connection, whatever follows it
        self._heard_at = self._loop.time()
        try:
            for kind, body in self._reader.feed(data):
                if kind is Kind.MESSAGE and self._accepted:
                    self.received(body)
                else:
                    self._other(kind, body)
        except (Malformed, DecodeError) as error:
            self.abort(f"malformed: {error}")

    def _other(self, kind: Kind, body: bytes) -> None:
        if not self._accepted:
            self.said(read_greeting(kind, body))
        elif kind is Kind.GREETING:
            raise Malformed("a second greeting")
        elif kind is Kind.PING and not self.paused:
            # To a peer that does not read no answers pile up; one that does hears what it is waiting for instead.
            self.send(_PONG)

    def _check(self) -> None:
        """A ping may wait behind a long message on a slow line: while that moves on, the answer is not due yet."""
        waiting = self.unsent_bytes
        gone = self._written - waiting
        now = self._loop.time()
        if self._heard_at >= self._asked_at:
            self._ping_end = None
        if (silence_s := now - self._heard_at) < self._keepalive_s:
            pause_s = self._keepalive_s - silence_s
        else:
            pause_s = self._keepalive_timeout_s
            if self._ping_end is None:
                self.send(_PING)
                self._asked_at, self._ping_end, self._ping_gone = now, self._written, not waiting
            elif self._ping_gone or gone <= self._gone:
                self.abort(f"no sign of life for {silence_s:.1f} s")
                return
            else:
                self._ping_gone = gone >= self._ping_end
        self._gone = gone
        self._watch = self._loop.call_later(pause_s, self._check)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self.flush()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._watch is not None:
            self._watch.cancel()
        self.lost(self._reason or (str(error) or repr(error) if error is not None else "the peer closed the link"))


async def connect(make: Callable[[], P], address: str, identity: Identity | None, peer: PeerRole) -> P:
    """A connection that, with an identity, speaks only to a process of the role `peer`, whatever its address. Raises
    OSError."""
    host, port = parts(address)
    _, protocol = await asyncio.get_running_loop().create_connection(make, host, port, **_tls(identity, peer))
    return protocol


async def who_answers(address: str, identity: Identity | None, peer: PeerRole) -> Incarnation | None:
    """The life of the worker at a link's address; None when nobody answers there, or not to us, or nonsense."""
    host, port = parts(address)
    try:
        reader, writer = await asyncio.open_connection(host, port, **_tls(identity, peer))
    except OSError:
        return None
    with contextlib.closing(writer):
        writer.write(greeting(ANYBODY, Incarnation(0)))
        frames = FrameReader(MAX_GREETING_BYTES)
        try:
            while data := await reader.read(HEADER_BYTES + MAX_GREETING_BYTES):
                for kind, body in frames.feed(data):
                    said = read_greeting(kind, body)
                    return None if said.refused else Incarnation(said.incarnation)
        except (Malformed, OSError):
            pass
        return None


def parts(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def _tls(identity: Identity | None, peer: PeerRole) -> dict[str, Any]:
    return {} if identity is None else {"ssl": identity.material().client, "server_hostname": peer.dns_name}
