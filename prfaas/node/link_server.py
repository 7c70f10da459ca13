"""The worker's end of the token link: messages in, the runtime's events out. Over gRPC, where it describes itself, too.

One stream is one session of the runtime. Whatever ends the stream (the router closes it, dies, or stops reading) closes
the session, and with it everything the router held here. A command that cannot be read is answered and never ends the
stream, because the stream carries everybody's requests. `link_tcp` does the same over plain TCP.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Protocol

import grpc

from prfaas.errors import InvalidRequest
from prfaas.node.feed_calls import EngineCacheServicer, engine_cache_callers
from prfaas.node.pool_feed import Feed
from prfaas.node.rpc_server import RpcServer, Service, serve_rpc
from prfaas.request import AttemptId
from prfaas.rpc.commands import Cancel, Command, Event, Failed, WorkerDescription
from prfaas.rpc.gate import FIRST_CALL_S
from prfaas.rpc.identity import Identity
from prfaas.rpc.link_frames import repeated
from prfaas.rpc.plain_tokens import encode_event
from prfaas.rpc.translate import (
    ATTEMPT_BYTES,
    pack_attempt,
    pack_description,
    unpack_attempt,
    unpack_command,
)
from prfaas.rpc.v1 import cache_pb2, cache_pb2_grpc, worker_pb2_grpc
from prfaas.rpc.v1 import worker_pb2 as pb
from prfaas.security import PeerRole

#: Events that wait because the router does not read: more than all that is admitted produces while it is briefly busy.
MAX_WAITING_EVENTS = 1 << 16
MAX_WAITING_BYTES = 64 << 20
EVENTS_PER_MESSAGE = 1 << 12
#: What a router hears that is cut off.
DOES_NOT_READ = "the router does not read its events"

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
    """Events of one session on their way to its router, oldest first. `wake` is called when there is something to
    `take` again, or the outbox has overflowed; it must not take it in the call, so that what comes in one turn leaves
    together."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.overflowed = False
        self._wake = wake
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._closed = False

    def emit(self, attempt: AttemptId, event: Event) -> None:
        self.put(pack_attempt(attempt), event)

    def put(self, attempt: bytes, event: Event) -> None:
        if self._closed:
            return
        encoded = encode_event(attempt, event)
        if not self._waiting:
            self._wake()
        self._waiting.append(encoded)
        self._waiting_bytes += len(encoded)
        if len(self._waiting) > MAX_WAITING_EVENTS or self._waiting_bytes > MAX_WAITING_BYTES:
            self.overflowed = True
            self.close()
            self._wake()

    def take(self) -> list[bytes]:
        """All that is waiting, up to a message full."""
        waiting = self._waiting
        if len(waiting) <= EVENTS_PER_MESSAGE:
            batch = [*waiting]
            waiting.clear()
            self._waiting_bytes = 0
        else:
            batch = [waiting.popleft() for _ in range(EVENTS_PER_MESSAGE)]
            self._waiting_bytes -= sum(map(len, batch))
        return batch

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        self._waiting.clear()
        self._waiting_bytes = 0


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
        wake = asyncio.Event()
        outbox = Outbox(wake.set)
        session = self._runtime.open_session(outbox.emit)
        reader = asyncio.create_task(_read(request_iterator, session, outbox), name="token-link-commands")
        reader.add_done_callback(lambda _: wake.set())
        try:
            while not outbox.closed:
                while events := outbox.take():
                    await context.write(pb.FromWorker.FromString(repeated(events)))
                wake.clear()
                if not outbox.closed:
                    await wake.wait()
            if outbox.overflowed:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, DOES_NOT_READ)
            await reader
        finally:
            outbox.close()
            reader.cancel()
            session.close()


async def _read(messages: AsyncIterator[pb.ToWorker], session: RuntimeSession, outbox: Outbox) -> None:
    try:
        async for message in messages:
            obey(message, session, outbox)
    finally:
        outbox.close()


def obey(message: pb.ToWorker, session: RuntimeSession, outbox: Outbox) -> None:
    for command in message.commands:
        _handle(command, session, outbox)


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
    prefixes: Feed | None = None,
    first_call_s: float = FIRST_CALL_S,
) -> RpcServer:
    """As `serve_rpc`. With an identity only routers may link. `prefixes`: of an engine that keeps any by itself."""
    services = [
        Service(
            str(pb.DESCRIPTOR.services_by_name["Worker"].full_name),
            partial(worker_pb2_grpc.add_WorkerServicer_to_server, WorkerServicer(runtime)),
            _callers,
        )
    ]
    if prefixes is not None:
        services.append(
            Service(
                str(cache_pb2.DESCRIPTOR.services_by_name["EngineCache"].full_name),
                partial(cache_pb2_grpc.add_EngineCacheServicer_to_server, EngineCacheServicer(prefixes)),
                engine_cache_callers,
            )
        )
    return await serve_rpc(services, host, port, identity, first_call_s=first_call_s)


def _callers(own: PeerRole) -> dict[str, frozenset[PeerRole]]:
    """A worker describes itself to itself, too: that is how it checks its advertised address."""
    return {"Link": frozenset({PeerRole.ROUTER}), "Describe": frozenset({PeerRole.ROUTER, own})}
