"""One living gRPC stream to a worker, from the moment it is connected until it breaks.

Commands of one loop turn, and all that come while a write is under way, leave in one message; events are handed to the
leg of their attempt. When the stream ends, for whatever reason, every open leg fails at once.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Never

import grpc

from prfaas.cluster import NodeId
from prfaas.errors import InvalidRequest, PeerUnavailable
from prfaas.live.leg import Leg
from prfaas.request import AttemptId
from prfaas.rpc.commands import Cancel, Command
from prfaas.rpc.translate import MAX_COMMAND_BYTES, pack_command, unpack_attempt, unpack_event
from prfaas.rpc.v1 import worker_pb2 as pb
from prfaas.rpc.v1.worker_pb2_grpc import WorkerStub

#: Commands that wait because the worker does not read. Beyond this it is treated as unreachable.
MAX_WAITING_BYTES = 128 << 20

Call = grpc.aio.StreamStreamCall[pb.ToWorker, pb.FromWorker]


@dataclass(slots=True)
class LinkCounters:
    """Totals over all links that share it. `late_events` belong to attempts that were released or never known here."""

    connections: int = 0
    failed_connections: int = 0
    commands: int = 0
    messages_sent: int = 0
    events: int = 0
    messages_received: int = 0
    late_events: int = 0


class LinkStream:
    def __init__(self, node: NodeId, channel: grpc.aio.Channel, counters: LinkCounters) -> None:
        self._node, self._channel, self._counters = node, channel, counters
        self._legs: dict[AttemptId, Leg] = {}
        self._waiting: deque[pb.Command] = deque()
        self._waiting_bytes = 0
        self._wake = asyncio.Event()
        self._broken: str | None = None

    @property
    def alive(self) -> bool:
        return self._broken is None

    @property
    def open_legs(self) -> int:
        return len(self._legs)

    def open(self, attempt: AttemptId, max_events: int) -> Leg:
        if self._broken is not None:
            raise PeerUnavailable(self._node, self._broken)
        assert attempt not in self._legs, attempt
        leg = self._legs[attempt] = Leg(self, self._node, attempt, max_events)
        return leg

    def send(self, attempt: AttemptId, command: Command) -> None:
        is_cancel = isinstance(command, Cancel)
        if self._broken is not None:
            if is_cancel:
                return
            raise PeerUnavailable(self._node, self._broken)
        message = pack_command(attempt, command)
        if not is_cancel and self._waiting_bytes + message.ByteSize() > MAX_WAITING_BYTES:
            raise PeerUnavailable(self._node, f"{self._waiting_bytes} bytes of commands are waiting to be read")
        self._waiting.append(message)
        self._waiting_bytes += message.ByteSize()
        self._wake.set()

    def forget(self, attempt: AttemptId) -> None:
        self._legs.pop(attempt, None)

    async def run(self) -> None:
        """Carries commands and events until the stream ends, then closes the channel."""
        reason = "the link was closed"
        try:
            call = WorkerStub(self._channel).Link()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(call), name=f"token-link-writer {self._node}")
                tasks.create_task(self._read(call), name=f"token-link-reader {self._node}")
        except* PeerUnavailable as broken:
            first = broken.exceptions[0]
            reason = first.detail if isinstance(first, PeerUnavailable) else str(first)
        finally:
            self.end(reason)
            await self._channel.close()

    def end(self, reason: str) -> None:
        """Fails every open leg. Idempotent."""
        if self._broken is None:
            self._broken = reason
            self._waiting.clear()
        legs, self._legs = self._legs, {}
        for leg in legs.values():
            leg.end(PeerUnavailable(self._node, self._broken))

    async def _read(self, call: Call) -> Never:
        try:
            async for message in call:
                self._counters.messages_received += 1
                for event in message.events:
                    self._dispatch(event)
        except grpc.aio.AioRpcError as error:
            raise PeerUnavailable(self._node, error.details() or error.code().name) from error
        raise PeerUnavailable(self._node, "the worker closed the link")

    async def _write(self, call: Call) -> Never:
        try:
            while True:
                await self._wake.wait()
                if batch := self._take():
                    self._counters.messages_sent += 1
                    self._counters.commands += len(batch)
                    await call.write(pb.ToWorker(commands=batch))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise PeerUnavailable(self._node, f"write failed: {error}") from error

    def _take(self) -> list[pb.Command]:
        """As many waiting commands as go into one message; at least one, when there are any."""
        batch, size = [], 0
        while self._waiting and size < MAX_COMMAND_BYTES:
            command = self._waiting.popleft()
            batch.append(command)
            size += command.ByteSize()
        self._waiting_bytes -= size
        if not self._waiting:
            self._wake.clear()
        return batch

    def _dispatch(self, message: pb.Event) -> None:
        self._counters.events += 1
        try:
            attempt = unpack_attempt(message.attempt)
        except InvalidRequest:
            self._counters.late_events += 1
            return
        if (leg := self._legs.get(attempt)) is None:
            self._counters.late_events += 1
        elif (event := unpack_event(message, attempt, self._node)) is not None:
            leg.deliver(event)
