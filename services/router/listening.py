"""What a router process listens on: the OpenAI endpoint, which several processes may share, and pages of metrics and an
admin API of its own."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from prfaas.config import Config, HttpConfig
from prfaas.errors import ConfigError
from prfaas.observe.http import TEXT, serve_text
from prfaas.observe.metrics import CONTENT_TYPE
from prfaas.process import raise_open_files
from services.router.http.counters import FrontCounters
from services.router.http.messages import ByHead, Handle
from services.router.http.server import HttpServer
from services.router.http.tls import ServerTls
from services.router.openai.port import Backend

#: Open files that are no clients' connections: links to workers, the store, pools, admin, logs.
OWN_FILES = 512

T = TypeVar("T")

log = structlog.get_logger()


class Listening:
    """`shared`: other processes serve the endpoint's port as well. Raises ConfigError for what cannot be used."""

    def __init__(self, config: Config, *, shared: bool) -> None:
        own = config.router
        self._own, self._shared = own, shared
        self._limits = fitting(config.http, raise_open_files())
        self.counters = FrontCounters()
        self.tls = ServerTls(Path(own.tls_cert), Path(own.tls_key)) if own.tls_cert else None

    async def endpoint(self, handle: Handle, by_head: ByHead = lambda head: False) -> tuple[HttpServer, int]:
        own, server = self._own, HttpServer(handle, self._limits, counters=self.counters, by_head=by_head)
        context = self.tls.context if self.tls is not None else None
        listen = server.start(own.host, own.port, reuse_port=self._shared, ssl=context)
        return server, await _bound("router.port", own.host, own.port, listen)

    async def admin(self, handle: Handle) -> tuple[HttpServer, int]:
        own, server = self._own, HttpServer(handle, self._limits)
        listen = server.start(own.admin_host, own.admin_port)
        return server, await _bound("router.admin_port", own.admin_host, own.admin_port, listen)

    async def pages(self, backend: Backend) -> tuple[asyncio.Server, str] | None:
        """This process's alone, and where they are."""
        host, port = self._own.metrics_host, self._own.metrics_port
        if port is None:
            return None

        def ready() -> tuple[int, str, bytes]:
            obstacle = backend.obstacle()
            return (200, TEXT, b"ready\n") if obstacle is None else (503, TEXT, f"not ready: {obstacle}\n".encode())

        routes: dict[str, Callable[[], tuple[int, str, bytes]]] = {
            "/metrics": lambda: (200, CONTENT_TYPE, backend.metrics_text()),
            "/live": lambda: (200, TEXT, b"live\n"),
            "/ready": ready,
        }
        server = await _bound("router.metrics_port", host, port, serve_text(host, port, routes))
        return server, f"{host}:{server.sockets[0].getsockname()[1]}"


def fitting(limits: HttpConfig, open_files: int) -> HttpConfig:
    """The limits, with no more connections than the system has files for: what cannot be accepted cannot be refused
    either."""
    room = max(1, open_files - OWN_FILES)
    if limits.max_connections <= room:
        return limits
    log.warning("fewer connections than http.max_connections", connections=room, open_files=open_files)
    return msgspec.structs.replace(limits, max_connections=room)


async def _bound(setting: str, host: str, port: int, listening: Awaitable[T]) -> T:
    try:
        return await listening
    except OSError as error:
        raise ConfigError(setting, f"cannot listen on {host}:{port}: {error.strerror}") from error
