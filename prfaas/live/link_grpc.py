"""The token link over gRPC: one call with a stream either way."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Never

import grpc
from google.protobuf.message import DecodeError

from prfaas.cluster import Incarnation, NodeId
from prfaas.errors import PeerUnavailable
from prfaas.live.link import DialledLink, LinkParams
from prfaas.live.link_stream import LinkCounters, Switchboard, another_life
from prfaas.rpc.link_frames import repeated
from prfaas.rpc.translate import MAX_MESSAGE_BYTES, unpack_description
from prfaas.rpc.v1 import worker_pb2 as pb
from prfaas.rpc.v1.worker_pb2_grpc import WorkerStub

#: Of serialized messages: both ways they are put together and taken apart by whoever knows what is in them.
Call = grpc.aio.StreamStreamCall[bytes, bytes]
_LINK = f"/{pb.DESCRIPTOR.services_by_name['Worker'].full_name}/Link"
ChannelOptions = Sequence[tuple[str, int]]
ChannelFactory = Callable[[str, ChannelOptions], grpc.aio.Channel]


class GrpcTokenLink(DialledLink):
    def __init__(
        self,
        address: str,
        node: NodeId,
        incarnation: Incarnation,
        *,
        params: LinkParams,
        counters: LinkCounters,
        channel: ChannelFactory = grpc.aio.insecure_channel,
    ) -> None:
        super().__init__(address, node, incarnation, params=params, counters=counters)
        self._channel = channel

    async def connect(self) -> "GrpcStream":
        channel = self._channel(self.address, channel_options(self._params))
        try:
            await _ready(channel)
            found = unpack_description(await WorkerStub(channel).Describe(pb.DescribeRequest()))
            another_life(self.node, self.address, found.node, self.incarnation, found.incarnation)
        except BaseException as error:
            await channel.close()
            if isinstance(error, grpc.aio.AioRpcError):
                raise PeerUnavailable(self.node, error.details() or error.code().name) from error
            raise
        return GrpcStream(self.node, channel, self._counters)


class GrpcStream:
    """Commands that come while a write is under way leave in one message."""

    def __init__(self, node: NodeId, channel: grpc.aio.Channel, counters: LinkCounters) -> None:
        self._node, self._channel = node, channel
        self._wake = asyncio.Event()
        self.board = Switchboard(node, counters, self._wake.set)

    async def run(self) -> None:
        reason = "the link was closed"
        try:
            call: Call = self._channel.stream_stream(_LINK)()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(call), name=f"token-link-writer {self._node}")
                tasks.create_task(self._read(call), name=f"token-link-reader {self._node}")
        except* PeerUnavailable as broken:
            first = broken.exceptions[0]
            reason = first.detail if isinstance(first, PeerUnavailable) else str(first)
        finally:
            self.board.end(reason)
            await self._channel.close()

    async def _read(self, call: Call) -> Never:
        try:
            async for message in call:
                self.board.deliver(message)
        except grpc.aio.AioRpcError as error:
            raise PeerUnavailable(self._node, error.details() or error.code().name) from error
        except DecodeError as error:
            raise PeerUnavailable(self._node, f"malformed: {error}") from error
        raise PeerUnavailable(self._node, "the worker closed the link")

    async def _write(self, call: Call) -> Never:
        try:
            while True:
                while batch := self.board.take():
                    await call.write(repeated(batch))
                self._wake.clear()
                await self._wake.wait()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise PeerUnavailable(self._node, f"write failed: {error}") from error


async def _ready(channel: grpc.aio.Channel) -> None:
    """Connected, or refused for a reason that the next call says at once. gRPC would go on trying behind our back."""
    while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            return
        await channel.wait_for_state_change(state)


def channel_options(params: LinkParams) -> ChannelOptions:
    return (
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", round(params.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(params.keepalive_timeout_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        # A keepalive ping waits behind a bandwidth probe that is under way, and that one has by itself a minute.
        ("grpc.http2.ping_timeout_ms", round((params.keepalive_s + params.keepalive_timeout_s) * 1000)),
        # A channel is one connection; the shared pool would hand a new link the back-off of an old one.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
    )
