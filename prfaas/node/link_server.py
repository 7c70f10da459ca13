"""The worker's end of the token link: messages in, the runtime's events out, and the standard gRPC services beside it.

One stream is one session of the runtime. Whatever ends the stream (the router closes it, dies, or stops reading) closes
the session, and with it everything the router held here. A command that cannot be read is answered and never ends the
stream, because the stream carries everybody's requests.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from prfaas.errors import InvalidRequest
from prfaas.request import AttemptId
from prfaas.rpc.commands import Cancel, Command, Event, Failed, WorkerDescription
from prfaas.rpc.gate import FIRST_CALL_S, Gate
from prfaas.rpc.identity import Identity
from prfaas.rpc.translate import (
    ATTEMPT_BYTES,
    MAX_MESSAGE_BYTES,
    pack_attempt,
    pack_description,
    pack_event,
    unpack_attempt,
    unpack_command,
)
from prfaas.rpc.v1 import worker_pb2 as pb
from prfaas.rpc.v1 import worker_pb2_grpc
from prfaas.security import PeerRole, Refusal

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


class WorkerServer:
    """The gRPC server of a worker. Not serving until it is told so. In plain it refuses nobody."""

    def __init__(
        self, server: grpc.aio.Server, statuses: health.aio.HealthServicer, port: int, gate: Gate | None
    ) -> None:
        self._server, self._statuses, self._gate = server, statuses, gate
        self.port = port

    @property
    def refused(self) -> Mapping[Refusal, int]:
        return self._gate.refused if self._gate is not None else {}

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in (health.OVERALL_HEALTH, _service_name()):
            await self._statuses.set(service, status)

    async def stop(self, grace_s: float) -> None:
        """Ends every link after `grace_s`; by then what was admitted should have finished."""
        await self._server.stop(grace_s)


async def serve_worker(
    runtime: Runtime,
    host: str,
    port: int,
    identity: Identity | None = None,
    *,
    first_call_s: float = FIRST_CALL_S,
) -> WorkerServer:
    """Listens on `host:port` (port 0: any) and returns once connections are accepted. With an identity only routers may
    link, and a connection without a call for `first_call_s` counts as refused. Raises OSError when it cannot listen."""
    gate = Gate(_callers(identity.role), first_call_s) if identity is not None else None
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[gate] if gate is not None else [])
    worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(runtime), server)
    statuses = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(statuses, server)
    reflection.enable_server_reflection((_service_name(), health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        if identity is None or gate is None:
            bound = server.add_insecure_port(f"{host}:{port}")
        else:
            bound = server.add_secure_port(f"{host}:{port}", identity.server_credentials(gate.begun))
    except RuntimeError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error}") from error
    worker = WorkerServer(server, statuses, bound, gate)
    await worker.set_serving(False)
    await server.start()
    return worker


def _callers(own: PeerRole) -> dict[str, frozenset[PeerRole]]:
    """A worker describes itself to itself, too: that is how it checks its advertised address."""
    service = _service_name()
    return {
        f"/{service}/Link": frozenset({PeerRole.ROUTER}),
        f"/{service}/Describe": frozenset({PeerRole.ROUTER, own}),
    }


def _service_name() -> str:
    return str(pb.DESCRIPTOR.services_by_name["Worker"].full_name)


SERVER_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A router that vanished without a word is noticed as soon as a worker that did.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A keepalive ping waits behind a bandwidth probe that is under way, and that one has by itself a minute.
    ("grpc.http2.ping_timeout_ms", 13_000),
    # Routers ping on idle links as often as they are configured to; gRPC would take that for an attack.
    ("grpc.http2.max_ping_strikes", 0),
    # Two workers on one port would share its connections at random.
    ("grpc.so_reuseport", 0),
)
