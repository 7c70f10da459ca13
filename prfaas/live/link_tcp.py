"""The token link over plain TCP, or TLS on it: what one turn of the event loop has to say is one write.

Nothing here waits: commands leave at the end of the turn that brought them, events reach their legs in the call that
read them off the socket.
"""

import asyncio

import structlog

from prfaas.cluster import Incarnation, NodeId
from prfaas.errors import PeerUnavailable
from prfaas.live.link import DialledLink, LinkParams
from prfaas.live.link_stream import LinkCounters, LinkStream, Switchboard, another_life
from prfaas.rpc.identity import Identity
from prfaas.rpc.link_connection import LinkConnection, connect
from prfaas.rpc.link_frames import LINK_WIRE, Kind, frame, greeting, repeated, same_wire
from prfaas.rpc.v1 import worker_pb2 as pb
from prfaas.security import PeerRole

log = structlog.get_logger()


class TcpTokenLink(DialledLink):
    """With an `identity` both sides show certificates, and the worker's has to be of the role `peer`. Where it cannot
    be had, the one to the same worker is taken that is there `otherwise`; TCP is tried first again when that breaks."""

    def __init__(
        self,
        address: str,
        node: NodeId,
        incarnation: Incarnation,
        *,
        params: LinkParams,
        counters: LinkCounters,
        identity: Identity | None = None,
        peer: PeerRole = PeerRole.DECODE_WORKER,
        otherwise: DialledLink | None = None,
    ) -> None:
        super().__init__(address, node, incarnation, params=params, counters=counters)
        self._identity, self._peer, self._otherwise = identity, peer, otherwise

    async def connect(self) -> LinkStream:
        if self._otherwise is None:
            return await self._connect()
        try:
            async with asyncio.timeout(self._params.connect_s / 2):
                return await self._connect()
        except (PeerUnavailable, TimeoutError) as error:
            stream = await self._otherwise.connect()
            log.warning("no link over TCP to a worker", node=self.node, address=self.address, detail=str(error))
            return stream

    async def _connect(self) -> "TcpStream":
        stream = TcpStream(self.address, self.node, self.incarnation, self._params, self._counters)
        try:
            await connect(lambda: stream, self.address, self._identity, self._peer)
            await stream.greeted
        except BaseException as error:
            stream.greeted.cancel()
            stream.abort("the link was closed")
            if isinstance(error, OSError):
                raise PeerUnavailable(self.node, str(error) or repr(error)) from error
            raise
        return stream


class TcpStream(LinkConnection):
    def __init__(
        self, address: str, node: NodeId, incarnation: Incarnation, params: LinkParams, counters: LinkCounters
    ) -> None:
        super().__init__(params.keepalive_s, params.keepalive_timeout_s)
        self._address, self._node, self._incarnation = address, node, incarnation
        self.board = Switchboard(node, counters, self._wake)
        self.greeted: asyncio.Future[None] = self._loop.create_future()
        self._ended = asyncio.Event()

    async def run(self) -> None:
        try:
            await self._ended.wait()
        finally:
            self.abort("the link was closed")
            self.board.end("the link was closed")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(greeting(self._node, self._incarnation))

    def said(self, greeting: pb.LinkGreeting) -> None:
        if self.greeted.done():
            return
        try:
            if not same_wire(greeting):
                theirs = f"{greeting.oldest} to {greeting.newest}"
                detail = f"{self._address} speaks versions {theirs} of the token link, not {LINK_WIRE.newest}"
                raise PeerUnavailable(self._node, detail)
            found, life = NodeId(greeting.node), Incarnation(greeting.incarnation)
            another_life(self._node, self._address, found, self._incarnation, life)
            if greeting.refused:
                raise PeerUnavailable(self._node, greeting.refused)
        except PeerUnavailable as error:
            self.greeted.set_exception(error)
        else:
            self.greeted.set_result(None)
            self.accept()

    def received(self, message: bytes) -> None:
        self.board.deliver(message)

    def lost(self, reason: str) -> None:
        if not self.greeted.done():
            self.greeted.set_exception(PeerUnavailable(self._node, reason))
        self.board.end(reason)
        self._ended.set()

    def _wake(self) -> None:
        self._loop.call_soon(self.flush)

    def flush(self) -> None:
        while not self.paused and (batch := self.board.take()):
            self.send(frame(Kind.MESSAGE, repeated(batch)))
