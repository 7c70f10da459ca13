"""The worker's end of the token link: messages in, the runtime's events out.

One stream is one session of the runtime. Whatever ends the stream (the router closes it, dies, or stops reading) closes
the session, and with it everything the router held here. A command that cannot be read is answered and never ends the
stream, because the stream carries everybody's requests.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Protocol

import grpc

from prfaas.errors import InvalidRequest
from prfaas.node.rpc_server import RpcServer, serve_rpc
from prfaas.request import AttemptId
from prfaas.rpc.commands import Cancel, Command, Event, Failed, WorkerDescription
from prfaas.rpc.gate import FIRST_CALL_S
from prfaas.rpc.identity import Identity
from prfaas.rpc.translate import (
    ATTEMPT_BYTES,
    pack_attempt,
    pack_description,
    pack_event,
    unpack_attempt,
    unpack_command,
)
from prfaas.rpc.v1 import worker_pb2 as pb
from prfaas.rpc.v1 import worker_pb2_grpc
from prfaas.security import PeerRole

#: Events that wait because the router does not read: more than all that is admitted produces while it is briefly busy.
MAX_WAITING_EVENTS = 1 << 16
EVENTS_PER_MESSAGE = 1 << 12

#: Called from the event loop only.
Emit = Callable[[AttemptId, Event], None]


class RuntimeSession(Protocol):
    """What one router process holds on this worker."""

    def handle(self, attempt: AttemptId, command: Command) -> None:
        """Answers through `emit`, in the order the router has to see. Never raises: a refusal is a Failed event."""
        ...

    def close(self) -> None:
        """The router is gone: everything of this session is released."""
        ...


class Runtime(Protocol):
    def describe(self) -> WorkerDescription: ...

    def open_session(self, emit: Emit) -> RuntimeSession: ...


class Outbox:
    """Events of one session on their way to the stream, oldest first. Closed for good when the stream ends."""

    def __init__(self) -> None:
        self.overflowed = False
        self._waiting: deque[pb.Event] = deque()
        self._wake = asyncio.Event()
        self._closed = False

    def emit(self, attempt: AttemptId, event: Event) -> None:
        self.put(pack_attempt(attempt), event)

    def put(self, attempt: bytes, event: Event) -> None:
        if self._closed:
            return
        if len(self._waiting) >= MAX_WAITING_EVENTS:
            self.overflowed = True
            self.close()
            return
        self._waiting.append(pack_event(attempt, event))
        self._wake.set()

    async def take(self) -> list[pb.Event]:
        """All that is waiting, up to a message full; [] once closed."""
        await self._wake.wait()
        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), EVENTS_PER_MESSAGE))]
        if not self._waiting and not self._closed:
            self._wake.clear()
        return batch

    def close(self) -> None:
        self._closed = True
        self._waiting.clear()
        self._wake.set()


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def Describe(  # noqa: N802
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext[pb.DescribeRequest, pb.DescribeResponse]
    ) -> pb.DescribeResponse:
        return pack_description(self._runtime.describe())

    # A coroutine that writes, not a generator: its `finally` runs when the stream ends, not when it is collected.
    async def Link(  # type: ignore[override]  # noqa: N802
        self,
        request_iterator: AsyncIterator[pb.ToWorker],
        context: grpc.aio.ServicerContext[pb.ToWorker, pb.FromWorker],
    ) -> None:
        outbox = Outbox()
        session = self._runtime.open_session(outbox.emit)
        reader = asyncio.create_task(_obey(request_iterator, session, outbox), name="token-link-commands")
        try:
            while events := await outbox.take():
                await context.write(pb.FromWorker(events=events))
            if outbox.overflowed:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the router does not read its events")
            await reader
        finally:
            outbox.close()
            reader.cancel()
            session.close()


async def _obey(messages: AsyncIterator[pb.ToWorker], session: RuntimeSession, outbox: Outbox) -> None:
    try:
        async for message in messages:
            for command in message.commands:
                _handle(command, session, outbox)
    finally:
        outbox.close()


def _handle(message: pb.Command, session: RuntimeSession, outbox: Outbox) -> None:
    try:
        attempt = unpack_attempt(message.attempt)
    except InvalidRequest as error:
        # Recognizable to a human, and not to be taken for an attempt.
        outbox.put(message.attempt[: ATTEMPT_BYTES * 2], Failed(error))
        return
    try:
        command = unpack_command(message)
    except InvalidRequest as error:
        session.handle(attempt, Cancel())
        outbox.put(message.attempt, Failed(error))
        return
    session.handle(attempt, command)


async def serve_worker(
    runtime: Runtime,
    host: str,
    port: int,
    identity: Identity | None = None,
    *,
    first_call_s: float = FIRST_CALL_S,
) -> RpcServer:
    """As `serve_rpc`. With an identity only routers may link."""
    return await serve_rpc(
        str(pb.DESCRIPTOR.services_by_name["Worker"].full_name),
        partial(worker_pb2_grpc.add_WorkerServicer_to_server, WorkerServicer(runtime)),
        _callers,
        host,
        port,
        identity,
        first_call_s=first_call_s,
    )


def _callers(own: PeerRole) -> dict[str, frozenset[PeerRole]]:
    """A worker describes itself to itself, too: that is how it checks its advertised address."""
    return {"Link": frozenset({PeerRole.ROUTER}), "Describe": frozenset({PeerRole.ROUTER, own})}
