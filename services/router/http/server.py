"""The listening side: accepts connections up to a limit, and ends them in order."""

import asyncio
import socket
import ssl as tls
import time
from collections.abc import Awaitable, Callable

from services.router.http.counters import FrontCounters
from services.router.http.errors import error_response
from services.router.http.limits import Limits
from services.router.http.messages import ByHead, Handle, Response
from services.router.http.protocol import Connection

BACKLOG = 1024
#: How long handlers may take to clean up after they were cancelled.
CANCEL_TIMEOUT_S = 5.0
#: How long handlers may take to say why they end early.
LAST_WORDS_S = 1.0
#: What the kernel takes of a response beyond what is on its way to the client. A client that reads nothing would
#: otherwise have it keep megabytes.
UNSENT_BYTES = 128 << 10
#: A client that has vanished without a word is noticed after so long also when there is nothing to send: a first probe,
#: and the time between two and their number.
PROBE_AFTER_S, PROBE_EVERY_S, PROBES = 30, 10, 3
#: Turns of the event loop in which connections that wait to be accepted are.
ACCEPT_TURNS = 8

End = Callable[[], Awaitable[None]]


class HttpServer:
    """HTTP/1.1 on any number of addresses. Stop it with `drain`."""

    def __init__(
        self,
        handle: Handle,
        limits: Limits,
        now: Callable[[], float] = time.monotonic,
        counters: FrontCounters | None = None,
        by_head: ByHead = lambda head: False,
    ) -> None:
        self._handle, self._limits, self._now, self._by_head = handle, limits, now, by_head
        self.counters = counters or FrontCounters()
        self._listeners: list[asyncio.Server] = []
        self._connections: set[Connection] = set()
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def connections(self) -> int:
        return len(self._connections)

    async def start(self, host: str, port: int, *, reuse_port: bool = False, ssl: tls.SSLContext | None = None) -> int:
        """Listen, and return the port, which the system chooses when `port` is 0."""
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(
            lambda: Connection(self, self._handle, self._limits, self._now, self._by_head),
            host,
            port,
            backlog=BACKLOG,
            reuse_port=reuse_port or None,
            ssl=ssl,
            ssl_handshake_timeout=self._limits.head_timeout_s if ssl is not None else None,
        )
        self._listeners.append(listener)
        for sock in listener.sockets:
            self._tune(sock)
        bound: int = listener.sockets[0].getsockname()[1]
        return bound

    async def drain(self, timeout_s: float, end: End | None = None) -> None:
        """Accept nothing more, let requests that have begun finish for `timeout_s`, then cut off the rest."""
        for _ in range(ACCEPT_TURNS):  # closing would reset who is connected and only waits for us
            await asyncio.sleep(0)
        self._draining = True
        for listener in self._listeners:
            listener.close()
        for connection in list(self._connections):
            connection.finish()
        if not await self._emptied(timeout_s):
            await self.cut_off(end)

    async def cut_off(self, end: End | None = None) -> None:
        """Now. `end` lets handlers fail that are still at work, and they have a moment to tell their clients."""
        if end is not None:
            await end()
            await self._emptied(LAST_WORDS_S)
        for connection in list(self._connections):
            connection.abort()
        await self._emptied(CANCEL_TIMEOUT_S)

    async def _emptied(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def _tune(self, listener: socket.socket) -> None:
        """Connections inherit what is set here."""
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES),
            (socket.TCP_USER_TIMEOUT, round(self._limits.write_timeout_s * 1000)),
            (socket.TCP_KEEPIDLE, PROBE_AFTER_S),
            (socket.TCP_KEEPINTVL, PROBE_EVERY_S),
            (socket.TCP_KEEPCNT, PROBES),
        ):
            listener.setsockopt(socket.IPPROTO_TCP, option, value)

    # Called by connections.

    def opened(self, connection: Connection) -> Response | None:
        self._connections.add(connection)
        self._empty.clear()
        self.counters.accepted += 1
        self.counters.open_connections += 1
        if self._draining:
            return error_response(503, "Shutting down", retry_after_s=1.0)
        if len(self._connections) > self._limits.max_connections:
            return error_response(503, "Too many connections", retry_after_s=1.0)
        return None

    def gone(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self.counters.open_connections -= 1
        if not self._connections:
            self._empty.set()

    def take_room(self, size: int) -> bool:
        """For so many bytes of a body. It is taken as they come, so that nobody can hold room by announcing a body."""
        if self.counters.body_bytes + size > self._limits.max_bodies_bytes:
            return False
        self.counters.body_bytes += size
        return True

    def give_room(self, size: int) -> None:
        self.counters.body_bytes -= size

    def refused(self, status: int) -> None:
        self.counters.refused[status] += 1
