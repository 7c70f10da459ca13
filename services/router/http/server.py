"""The listening side: accepts connections up to a limit, and ends them in order."""

import asyncio
import ssl as tls
import time
from collections.abc import Callable

from services.router.http.errors import error_response
from services.router.http.limits import Limits
from services.router.http.messages import Handle, Response
from services.router.http.protocol import Connection

BACKLOG = 1024
#: How long handlers may take to clean up after they were cancelled.
CANCEL_TIMEOUT_S = 5.0


class HttpServer:
    """HTTP/1.1 on any number of addresses. Stop it with `drain`."""

    def __init__(self, handle: Handle, limits: Limits, now: Callable[[], float] = time.monotonic) -> None:
        self._handle, self._limits, self._now = handle, limits, now
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
            lambda: Connection(self, self._handle, self._limits, self._now),
            host,
            port,
            backlog=BACKLOG,
            reuse_port=reuse_port or None,
            ssl=ssl,
        )
        self._listeners.append(listener)
        bound: int = listener.sockets[0].getsockname()[1]
        return bound

    async def drain(self, timeout_s: float) -> None:
        """Accept nothing more, let requests that have begun finish for `timeout_s`, then cut off the rest."""
        self._draining = True
        for listener in self._listeners:
            listener.close()
        for connection in list(self._connections):
            connection.finish()
        if not await self._emptied(timeout_s):
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

    def opened(self, connection: Connection) -> Response | None:
        self._connections.add(connection)
        self._empty.clear()
        if self._draining:
            return error_response(503, "Shutting down", retry_after_s=1.0)
        if len(self._connections) > self._limits.max_connections:
            return error_response(503, "Too many connections", retry_after_s=1.0)
        return None

    def gone(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()
