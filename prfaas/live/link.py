"""The token link of one router process to its workers: one connection each, opened when first needed.

`TokenLink` is the port, `TcpTokenLink` and `GrpcTokenLink` its adapters, `LinkPool` keeps one link per life of a node.
A link never waits for an unreachable worker longer than the connect timeout, and while it backs off it refuses at once,
so that a dead worker costs a request no time that another worker could use.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import msgspec
import structlog

from prfaas.cluster import ClusterView, Incarnation, Node, NodeId
from prfaas.errors import PeerUnavailable, Stopping
from prfaas.live.leg import Leg
from prfaas.live.link_stream import LinkCounters, LinkStream, broken_by
from prfaas.request import AttemptId

#: How often broken links are looked after.
MEND_S = 0.1
CLOSED = "the link was closed"
#: What all links of a process end with when it does.
STOPPING = Stopping("the router")

log = structlog.get_logger()


class LinkParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How patient the token link is."""

    #: From the first packet to a worker that has said who it is. Lower gives up sooner on far regions.
    connect_s: float = 3.0
    #: Silence after which a ping is sent, and how long its answer may take: together they bound a half-open connection,
    #: and how long a node that stands still is taken for alive. Lower would take one that is merely busy for dead.
    keepalive_s: float = 3.0
    keepalive_timeout_s: float = 3.0
    #: Pause after a failed connect, doubled with each further failure up to the maximum.
    backoff_s: float = 0.1
    max_backoff_s: float = 5.0


class TokenLink(Protocol):
    """The connection of this router process to one life of one worker."""

    @property
    def incarnation(self) -> Incarnation: ...

    @property
    def open_legs(self) -> int: ...

    @property
    def broken(self) -> bool:
        """It was lost, or could not be had, and has not been had since."""
        ...

    def mend(self) -> None:
        """When it is broken and the time for it has come, tries again in the background."""
        ...

    async def open(self, attempt: AttemptId, max_events: int) -> Leg:
        """A leg for the attempt, which will see at most `max_events` events. Raises PeerUnavailable."""
        ...

    def drop(self, reason: str | Stopping = CLOSED) -> None:
        """Fails every open leg now; the connection closes by itself."""
        ...

    async def close(self) -> None:
        """`drop`, and wait until the connection is closed."""
        ...


class DialledLink(ABC):
    """What every kind of link does about a worker that cannot be reached, and when its connection breaks."""

    def __init__(
        self,
        address: str,
        node: NodeId,
        incarnation: Incarnation,
        *,
        params: LinkParams,
        counters: LinkCounters,
    ) -> None:
        self.address, self.node, self.incarnation = address, node, incarnation
        self._params, self._counters = params, counters
        self._stream: LinkStream | None = None
        self._running: asyncio.Task[None] | None = None
        self._dialing: asyncio.Task[LinkStream] | None = None
        self._failures, self._not_before, self._last_error = 0, 0.0, ""
        self._dropped: str | Stopping | None = None

    @abstractmethod
    async def connect(self) -> LinkStream:
        """Connected to the worker that is meant, not to whoever has its address now. Raises PeerUnavailable, and leaves
        nothing open, however it ends."""
        ...

    @property
    def open_legs(self) -> int:
        return self._stream.board.open_legs if self._stream is not None else 0

    @property
    def broken(self) -> bool:
        return self._failures > 0 or (self._stream is not None and not self._stream.board.alive)

    def mend(self) -> None:
        due = self._dialing is None and asyncio.get_running_loop().time() >= self._not_before
        if self.broken and due and self._dropped is None:
            self._begin_to_dial()

    async def open(self, attempt: AttemptId, max_events: int) -> Leg:
        stream = self._stream
        if stream is None or not stream.board.alive:
            stream = await self._dialed()
        return stream.board.open(attempt, max_events)

    def drop(self, reason: str | Stopping = CLOSED) -> None:
        self._dropped = self._dropped or reason
        if self._stream is not None:
            self._stream.board.end(self._dropped)
        for task in (self._dialing, self._running):
            if task is not None:
                task.cancel()

    async def close(self) -> None:
        self.drop()
        if tasks := [task for task in (self._dialing, self._running) if task is not None]:
            await asyncio.wait(tasks)

    async def _dialed(self) -> LinkStream:
        """Everybody who needs the connection waits for the same attempt at it; one that leaves does not end it."""
        if self._dropped is not None:
            raise broken_by(self.node, self._dropped)
        if self._dialing is None:
            if (wait_s := self._not_before - asyncio.get_running_loop().time()) > 0:
                raise PeerUnavailable(self.node, f"next connect in {wait_s:.1f} s, the last failed: {self._last_error}")
            self._begin_to_dial()
        dialing = self._dialing
        assert dialing is not None
        await asyncio.wait({dialing})
        if dialing.cancelled():
            raise broken_by(self.node, self._dropped or CLOSED)
        if (error := dialing.exception()) is not None:
            raise PeerUnavailable(self.node, self._last_error) from error
        return dialing.result()

    def _begin_to_dial(self) -> None:
        self._dialing = asyncio.create_task(self._dial(), name=f"token-link-dial {self.node}")
        self._dialing.add_done_callback(self._settle)

    def _settle(self, dialing: asyncio.Task[LinkStream]) -> None:
        self._dialing = None
        if dialing.cancelled():
            return
        if (error := dialing.exception()) is None:
            self._stream, self._failures = dialing.result(), 0
            self._running = asyncio.create_task(self._stream.run(), name=f"token-link {self.node}")
            self._counters.connections += 1
            if self._dropped is not None:
                self.drop()
            return
        pause_s = min(self._params.backoff_s * 2 ** min(self._failures, 16), self._params.max_backoff_s)
        self._failures += 1
        self._counters.failed_connections += 1
        self._not_before = asyncio.get_running_loop().time() + pause_s
        self._last_error = error.detail if isinstance(error, PeerUnavailable) else repr(error)
        log.warning("no link to a worker", node=self.node, address=self.address, detail=self._last_error)

    async def _dial(self) -> LinkStream:
        try:
            async with asyncio.timeout(self._params.connect_s):
                return await self.connect()
        except TimeoutError as error:
            detail = f"no answer from {self.address} within {self._params.connect_s} s"
            raise PeerUnavailable(self.node, detail) from error


class LinkPool:
    """One link per node, for its present incarnation. A node that has left keeps its link while legs are open on it: it
    may have lost its lease and still be serving, and if it is dead the link breaks by itself."""

    def __init__(self, connect: Callable[[Node], TokenLink]) -> None:
        self._connect = connect
        self._links: dict[NodeId, TokenLink] = {}
        self._broken: frozenset[NodeId] = frozenset()
        self._closed = False
        self._closing: set[asyncio.Task[None]] = set()

    def link(self, node: Node) -> TokenLink:
        """Raises Stopping once the pool is closed."""
        if self._closed:
            raise Stopping(STOPPING.what)
        link = self._links.get(node.id)
        if link is None or link.incarnation != node.incarnation:
            self._drop(node.id)
            link = self._links[node.id] = self._connect(node)
        return link

    def retain(self, view: ClusterView) -> None:
        """Drops the links to earlier lives of the nodes in the view, and the idle ones to nodes that are not in it."""
        for node_id, link in tuple(self._links.items()):
            node = view.nodes.get(node_id)
            if node.incarnation != link.incarnation if node is not None else not link.open_legs:
                self._drop(node_id)
        # At once: the first request that sees a new life must not take it for the one whose link is broken.
        self._look()

    def broken(self) -> frozenset[NodeId]:
        """Nodes whose link is."""
        return self._broken

    async def mend(self) -> None:
        """Until it is cancelled: what is broken is tried again without any request that would have to wait for it."""
        while True:
            for link in tuple(self._links.values()):
                link.mend()
            self._look()
            await asyncio.sleep(MEND_S)

    def _look(self) -> None:
        self._broken = frozenset(node for node, link in self._links.items() if link.broken)

    async def close(self) -> None:
        """The process is about to end: what is under way fails for that, and is not begun again elsewhere."""
        self._closed = True
        for node_id in tuple(self._links):
            self._drop(node_id, STOPPING)
        if self._closing:
            await asyncio.wait(self._closing)

    def _drop(self, node_id: NodeId, reason: str | Stopping = CLOSED) -> None:
        if (link := self._links.pop(node_id, None)) is not None:
            link.drop(reason)
            closing = asyncio.create_task(link.close(), name=f"token-link-close {node_id}")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
