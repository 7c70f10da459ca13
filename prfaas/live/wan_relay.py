"""A relay that makes the KV path between two regions as slow and as far as it is told, without touching the kernel.

One relay is one WAN: all its routes and connections share a line per direction (see `prfaas.live.wan_line`), whose rate
can be changed while it runs. It can be cut, too: then everything stays connected and nothing moves, as where a router
in between drops all packets. A cut heals by itself after the time that was said, whatever becomes of who asked for it.
"""

import asyncio
import math
import signal
import socket
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Self
from urllib.parse import parse_qs

import structlog

from prfaas.live.wan_line import QUANTUM_BYTES, Leg, Line, Pipe
from prfaas.observe import names
from prfaas.observe.http import TEXT, serve_text
from prfaas.observe.metrics import CONTENT_TYPE, Metrics

CONNECT_S = 10.0
MAX_CONNECTIONS = 512
MAX_CUT_S = 3600.0

log = structlog.get_logger()


class RelayRoute(NamedTuple):
    """Listen here, connect there for each connection."""

    listen_host: str
    listen_port: int
    target_host: str
    target_port: int


class WanRelay:
    """The relay within a running event loop: `async with await WanRelay.start(...) as relay`. `ports` are those it
    listens on, in the order of the routes."""

    def __init__(self, bits_per_s: float, rtt_s: float) -> None:
        self.metrics = Metrics(names.RELAY)
        self.ports: list[int] = []
        self._forward, self._backward = Line(bits_per_s, rtt_s / 2), Line(bits_per_s, rtt_s / 2)
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._healing: asyncio.TimerHandle | None = None

    @classmethod
    async def start(cls, routes: Sequence[RelayRoute], *, bits_per_s: float, rtt_s: float) -> Self:
        """Raises OSError when a route's address cannot be listened on; then none is."""
        relay = cls(bits_per_s, rtt_s)
        try:
            for route in routes:
                relay.ports.append(await relay._listen(route))
        except OSError:
            await relay.stop()
            raise
        return relay

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop listening and reset what is still connected."""
        for server in self._servers:
            server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def set_rate(self, bits_per_s: float) -> None:
        """Both ways, for all connections, those that are open included."""
        for line in (self._forward, self._backward):
            line.set_rate(bits_per_s)

    def command_rate(self, query: str) -> tuple[int, str, bytes]:
        """`POST /rate?mbit=20`."""
        given = parse_qs(query).get("mbit", [""])[-1]
        try:
            mbit = float(given)
        except ValueError:
            mbit = math.nan
        if not 0 < mbit < math.inf:
            return 400, TEXT, b"say ?mbit= and a rate above 0\n"
        self.set_rate(mbit * 1e6)
        log.info("rate of the line", mbit=mbit)
        return 200, TEXT, f"{mbit:g} Mbit/s\n".encode()

    def cut(self, seconds: float) -> None:
        """Both ways, for all connections, those included that are made meanwhile."""
        self.mend()
        for line in (self._forward, self._backward):
            line.cut()
        self._healing = asyncio.get_running_loop().call_later(seconds, self.mend)

    def mend(self) -> None:
        """Idempotent."""
        if self._healing is not None:
            self._healing.cancel()
            self._healing = None
        for line in (self._forward, self._backward):
            line.mend()

    def command_cut(self, query: str) -> tuple[int, str, bytes]:
        """`POST /cut?seconds=10`."""
        given = parse_qs(query).get("seconds", [""])[-1]
        try:
            seconds = float(given)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= MAX_CUT_S:
            return 400, TEXT, f"say ?seconds= above 0, and at most {MAX_CUT_S:g}\n".encode()
        self.cut(seconds)
        log.info("line is cut", seconds=seconds)
        return 200, TEXT, f"cut for {seconds:g} s\n".encode()

    def command_mend(self, _query: str) -> tuple[int, str, bytes]:
        """`POST /mend`."""
        self.mend()
        log.info("line is mended")
        return 200, TEXT, b"mended\n"

    async def _listen(self, route: RelayRoute) -> int:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._relay(route, Leg(reader, writer)), name="wan-connection")
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

        sock = socket.create_server((route.listen_host, route.listen_port), backlog=MAX_CONNECTIONS)
        self._servers.append(await asyncio.start_server(accept, sock=sock, limit=QUANTUM_BYTES))
        return int(sock.getsockname()[1])

    async def _relay(self, route: RelayRoute, client: Leg) -> None:
        if len(self._connections) > MAX_CONNECTIONS:
            client.reset()
            return
        legs = [client]
        try:
            legs.append(await self._connect(route))
            await self._join(*legs)
            for leg in legs:
                leg.writer.close()  # both directions have ended: sends what is left, then closes
        except (OSError, TimeoutError) as error:
            log.warning("relay target unreachable", host=route.target_host, port=route.target_port, error=str(error))
            client.reset()
        except BaseException:
            for leg in legs:
                leg.reset()
            raise

    async def _connect(self, route: RelayRoute) -> Leg:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(route.target_host, route.target_port, limit=QUANTUM_BYTES)
        return Leg(reader, writer)

    async def _join(self, client: Leg, target: Leg) -> None:
        for leg in (client, target):
            leg.bound_buffers()
        forward = Pipe(client, target, self._forward, partial(self._count, "forward"))
        backward = Pipe(target, client, self._backward, partial(self._count, "backward"))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(forward.run(), name="wan-forward")
            tasks.create_task(backward.run(), name="wan-backward")

    def _count(self, direction: str, nbytes: int) -> None:
        self.metrics.add(names.RELAY_BYTES, nbytes, direction=direction)


def run_relay(
    routes: Sequence[RelayRoute], *, bits_per_s: float, rtt_s: float, metrics_address: tuple[str, int] | None = None
) -> None:
    """Relay until SIGTERM or SIGINT. With `metrics_address` (host, port) `/metrics` is served there."""
    asyncio.run(_run(routes, bits_per_s, rtt_s, metrics_address))


async def _run(
    routes: Sequence[RelayRoute], bits_per_s: float, rtt_s: float, metrics_address: tuple[str, int] | None
) -> None:
    stopping = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stopping.set)
    async with await WanRelay.start(routes, bits_per_s=bits_per_s, rtt_s=rtt_s) as relay:
        log.info("wan relay listening", ports=relay.ports, bits_per_s=bits_per_s, rtt_s=rtt_s)
        if metrics_address is None:
            await stopping.wait()
        else:
            pages = {"/metrics": lambda: (200, CONTENT_TYPE, relay.metrics.exposition())}
            commands = {"/rate": relay.command_rate, "/cut": relay.command_cut, "/mend": relay.command_mend}
            async with await serve_text(*metrics_address, pages, commands) as server:
                log.info("metrics listening", port=server.sockets[0].getsockname()[1])
                await stopping.wait()
