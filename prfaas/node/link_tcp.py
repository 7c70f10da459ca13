"""The worker's end of the token link over plain TCP, or TLS on it.

A connection is a stranger until its greeting says whom it means, and with certificates until it has shown that it is a
router: until then it costs a place, a few kilobytes and a few seconds. `link_server` says what a session is.
"""

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import structlog

from prfaas.node.link_server import DOES_NOT_READ, Outbox, Runtime, RuntimeSession, obey
from prfaas.rpc.gate import FIRST_CALL_S
from prfaas.rpc.identity import Identity
from prfaas.rpc.link_connection import LinkConnection
from prfaas.rpc.link_frames import ANYBODY, LINK_WIRE, Kind, frame, greeting, repeated, same_wire
from prfaas.rpc.v1 import worker_pb2 as pb
from prfaas.security import PeerRole, Refusal, roles_in

#: Connections at once, strangers included: router processes that a worker can have, and some.
MAX_CONNECTIONS = 1024
#: A router that vanished without a word is noticed as soon as a node that did.
KEEPALIVE_S, KEEPALIVE_TIMEOUT_S = 10.0, 3.0
#: After a failure to accept, which is for want of descriptors or memory.
ACCEPT_PAUSE_S = 0.5
#: For the goodbye of a connection that is closed, where the peer does not answer it.
GOODBYE_S = 1.0

log = structlog.get_logger()


class LinkSession(LinkConnection):
    """One connection. `settled` is set when it has been answered, or is lost; `stranger` until it was answered."""

    def __init__(self, desk: "Desk") -> None:
        super().__init__(desk.keepalive_s, desk.keepalive_timeout_s)
        self._desk = desk
        self._outbox = Outbox(self._wake)
        self._session: RuntimeSession | None = None
        self.settled = asyncio.Event()
        self.stranger, self.reason = True, ""

    def finish(self, reason: str) -> None:
        """What was emitted still goes out."""
        self.flush()
        self.close(reason)

    def said(self, greeting: pb.LinkGreeting) -> None:
        if self.settled.is_set():
            return
        refused = self._desk.refuse(greeting, self._roles(), self.peer("peername"))
        self.send(self._desk.answer(refused))
        self.stranger = False
        self._desk.connections.add(self)
        self.settled.set()
        if refused or greeting.node == ANYBODY:
            self.close(refused)
        else:
            self._session = self._desk.runtime.open_session(self._outbox.emit)
            self.accept()

    def received(self, message: bytes) -> None:
        if self._session is not None:
            obey(pb.ToWorker.FromString(message), self._session, self._outbox)

    def lost(self, reason: str) -> None:
        self._desk.left(self)
        self._outbox.close()
        self.reason = reason
        self.settled.set()
        if self._session is not None:
            session, self._session = self._session, None
            session.close()
            log.info("a token link has ended", detail=reason)

    def flush(self) -> None:
        if self._outbox.overflowed:
            self.abort(DOES_NOT_READ)
        while not self.paused and (batch := self._outbox.take()):
            self.send(frame(Kind.MESSAGE, repeated(batch)))

    def _wake(self) -> None:
        self._loop.call_soon(self.flush)

    def _roles(self) -> frozenset[PeerRole]:
        """That its certificate names; all, where there are no certificates."""
        if self._desk.identity is None:
            return frozenset(PeerRole)
        names = (self.peer("peercert") or {}).get("subjectAltName", ())
        return roles_in(name for kind, name in names if kind == "DNS")


@dataclass(slots=True)
class Desk:
    """Who is let in, and who has been answered and is here."""

    runtime: Runtime
    identity: Identity | None
    keepalive_s: float = KEEPALIVE_S
    keepalive_timeout_s: float = KEEPALIVE_TIMEOUT_S
    refused: Counter[Refusal] = field(default_factory=lambda: Counter(dict.fromkeys(Refusal, 0)))
    connections: set[LinkSession] = field(default_factory=set)
    _leaving: asyncio.Event = field(default_factory=asyncio.Event)

    def left(self, connection: LinkSession) -> None:
        self.connections.discard(connection)
        self._leaving.set()

    async def emptied(self, timeout_s: float) -> None:
        """Until all have left, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.connections:
                    self._leaving.clear()
                    await self._leaving.wait()

    def refuse(self, said: pb.LinkGreeting, roles: frozenset[PeerRole], peer: object) -> str:
        """Why the connection does not become a link, or gets no answer; empty when it does."""
        allowed = {PeerRole.ROUTER}
        if said.node == ANYBODY and self.identity is not None:
            # A worker checks its own advertised address.
            allowed.add(self.identity.role)
        if not roles & allowed:
            self.refused[Refusal.ROLE] += 1
            shown = ", ".join(role.value for role in PeerRole if role in roles) or "no role"
            log.warning("refused a call", method="token link", peer=peer, certificate=shown)
            return f"the token link is not for a certificate of {shown}"
        if not same_wire(said):
            return (
                f"this worker speaks version {LINK_WIRE.newest} of the token link, not {said.oldest} to {said.newest}"
            )
        own = self.runtime.describe()
        if said.node != ANYBODY and (said.node, said.incarnation) != (own.node, own.incarnation):
            return f"this is now another life, or another node: {own.node}"
        return ""

    def answer(self, refused: str) -> bytes:
        own = self.runtime.describe()
        return greeting(own.node, own.incarnation, refused)


class LinkServer:
    """Accepts connections until it is stopped. In plain it counts no refusals."""

    def __init__(self, listening: socket.socket, desk: Desk, greeting_s: float, max_connections: int) -> None:
        self._listening, self._desk, self._greeting_s = listening, desk, greeting_s
        self._max_connections = max_connections
        self._loop = asyncio.get_running_loop()
        self._welcoming: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept(), name="token-link-accept")
        self._untold: Counter[str] = Counter()
        self._telling: asyncio.TimerHandle | None = None
        self.port: int = listening.getsockname()[1]

    @property
    def refused(self) -> Mapping[Refusal, int]:
        return self._desk.refused if self._desk.identity is not None else {}

    @property
    def connections(self) -> int:
        """Links, and strangers."""
        return len(self._desk.connections) + len(self._welcoming)

    async def stop(self, grace_s: float) -> None:
        """Lets in nobody more, sends what has been emitted, and closes every connection, after `grace_s` the hard
        way."""
        ending = [self._accepting, *self._welcoming]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        self._listening.close()
        for connection in tuple(self._desk.connections):
            connection.finish("the worker stops")
        await self._desk.emptied(grace_s)
        for connection in tuple(self._desk.connections):
            connection.abort("the worker stops")
        await self._desk.emptied(GOODBYE_S)
        if self._telling is not None:
            self._telling.cancel()

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listening)
            except OSError as error:
                log.warning("cannot accept a token link", error=str(error))
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if self.connections >= self._max_connections:
                connection.close()
                self._turned_away("too many connections")
                continue
            welcoming = asyncio.create_task(self._welcome(connection), name="token-link-welcome")
            self._welcoming.add(welcoming)
            welcoming.add_done_callback(self._welcoming.discard)

    async def _welcome(self, connection: socket.socket) -> None:
        """From its first packet to its greeting, within a deadline."""
        session = LinkSession(self._desk)
        options: dict[str, Any] = {}
        if self._desk.identity is not None:
            options = {"ssl": self._desk.identity.material().server, "ssl_shutdown_timeout": GOODBYE_S}
        try:
            async with asyncio.timeout(self._greeting_s):
                await self._loop.connect_accepted_socket(lambda: session, connection, **options)
                await session.settled.wait()
            if session.stranger:
                self._turned_away(session.reason)
        except TimeoutError:
            session.abort("no greeting")
            self._turned_away("no greeting")
        except (OSError, ssl.SSLError) as error:
            self._turned_away(str(error))
        except BaseException:
            session.abort("the worker stops")
            raise

    def _turned_away(self, why: str) -> None:
        """Told once in a while, so that a flood of connections is none of lines in the log."""
        self._desk.refused[Refusal.HANDSHAKE] += 1
        self._untold[why] += 1
        if self._telling is None:
            self._telling = self._loop.call_later(self._greeting_s, self._tell)

    def _tell(self) -> None:
        log.warning("connections that became no token link", count=self._untold.total(), why=dict(self._untold))
        self._untold.clear()
        self._telling = None


async def serve_link(
    runtime: Runtime,
    host: str,
    port: int,
    identity: Identity | None = None,
    *,
    greeting_s: float = FIRST_CALL_S,
    max_connections: int = MAX_CONNECTIONS,
    keepalive_s: float = KEEPALIVE_S,
    keepalive_timeout_s: float = KEEPALIVE_TIMEOUT_S,
) -> LinkServer:
    """Listens on `host:port` (port 0: any) and returns once connections are accepted. With an identity only routers may
    link. Raises OSError when it cannot listen."""
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    listening.setblocking(False)
    desk = Desk(runtime, identity, keepalive_s, keepalive_timeout_s)
    return LinkServer(listening, desk, greeting_s, max_connections)
