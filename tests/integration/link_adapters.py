"""The adapters of the token link, as what one contract asks of both: serve a worker, link to it, and, to put on the
wire whatever one likes, a router that is none."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import grpc

from prfaas.cluster import Node
from prfaas.errors import PeerUnavailable
from prfaas.live.link import LinkParams, TokenLink
from prfaas.live.link_grpc import GrpcTokenLink
from prfaas.live.link_stream import LinkCounters
from prfaas.live.link_tcp import TcpTokenLink
from prfaas.node.link_server import Runtime, serve_worker
from prfaas.node.link_tcp import serve_link
from prfaas.rpc.link_frames import MAX_GREETING_BYTES, FrameReader, Kind, frame, greeting, read_greeting
from prfaas.rpc.translate import MAX_MESSAGE_BYTES
from prfaas.rpc.v1 import worker_pb2 as pb
from prfaas.rpc.v1.worker_pb2_grpc import WorkerStub


class Server(Protocol):
    port: int

    async def stop(self, grace_s: float) -> None: ...


class RawLink(Protocol):
    """A router that puts on the wire whatever it likes."""

    async def write(self, message: pb.ToWorker) -> None: ...

    async def read(self) -> pb.FromWorker: ...

    async def cut(self) -> None:
        """Returns when the worker has ended the link."""
        ...


@dataclass(frozen=True)
class Adapter:
    name: str
    serve: Callable[[Runtime, str, int], Awaitable[Server]]
    link: Callable[[Node, LinkParams, LinkCounters], TokenLink]
    raw: Callable[[Node], AbstractAsyncContextManager[RawLink]]


class _RawGrpc:
    def __init__(self, call: grpc.aio.StreamStreamCall[pb.ToWorker, pb.FromWorker]) -> None:
        self._call = call

    async def write(self, message: pb.ToWorker) -> None:
        await self._call.write(message)

    async def read(self) -> pb.FromWorker:
        message = await self._call.read()
        assert isinstance(message, pb.FromWorker)
        return message

    async def cut(self) -> None:
        assert await self._call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@asynccontextmanager
async def _raw_grpc(node: Node) -> AsyncIterator[RawLink]:
    options = (("grpc.max_send_message_length", MAX_MESSAGE_BYTES),)
    async with grpc.aio.insecure_channel(node.rpc_address, options) as channel:
        call = WorkerStub(channel).Link()
        yield _RawGrpc(call)
        call.cancel()


class RawTcp:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self._frames = FrameReader(MAX_MESSAGE_BYTES)
        self._come: list[tuple[Kind, bytes]] = []

    async def frame(self) -> tuple[Kind, bytes] | None:
        """The next that comes; None at the end."""
        while not self._come:
            try:
                data = await self._reader.read(1 << 16)
            except ConnectionError:
                return None
            if not data:
                return None
            self._come.extend(self._frames.feed(data))
        return self._come.pop(0)

    async def greet(self, node: Node) -> pb.LinkGreeting:
        self.writer.write(greeting(node.id, node.incarnation))
        answer = await self.frame()
        assert answer is not None and len(answer[1]) < MAX_GREETING_BYTES
        return read_greeting(*answer)

    async def write(self, message: pb.ToWorker) -> None:
        self.writer.write(frame(Kind.MESSAGE, message.SerializeToString()))
        await self.writer.drain()

    async def read(self) -> pb.FromWorker:
        while (come := await self.frame()) is not None:
            if come[0] is Kind.MESSAGE:
                return pb.FromWorker.FromString(come[1])
        raise PeerUnavailable("worker", "the end")

    async def cut(self) -> None:
        while await self.frame() is not None:
            pass


@asynccontextmanager
async def raw_tcp(port: int) -> AsyncIterator[RawTcp]:
    """A connection that has said nothing yet."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield RawTcp(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@asynccontextmanager
async def _raw_tcp(node: Node) -> AsyncIterator[RawLink]:
    async with raw_tcp(int(node.link_address.rpartition(":")[2])) as link:
        assert not (await link.greet(node)).refused
        yield link


GRPC = Adapter(
    "grpc",
    serve_worker,
    lambda node, params, counters: GrpcTokenLink(
        node.rpc_address, node.id, node.incarnation, params=params, counters=counters
    ),
    _raw_grpc,
)
TCP = Adapter(
    "tcp",
    serve_link,
    lambda node, params, counters: TcpTokenLink(
        node.link_address, node.id, node.incarnation, params=params, counters=counters
    ),
    _raw_tcp,
)
ADAPTERS = {adapter.name: adapter for adapter in (GRPC, TCP)}
