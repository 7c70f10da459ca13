"""The gRPC server of a node: services of ours, the standard health and reflection services beside them, and a gate in
front of all where there are certificates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from prfaas.rpc.gate import FIRST_CALL_S, Gate
from prfaas.rpc.identity import Identity
from prfaas.rpc.translate import MAX_MESSAGE_BYTES
from prfaas.security import PeerRole, Refusal

#: Who may call which of the service's methods, on a server of this role.
Callers = Callable[[PeerRole], Mapping[str, frozenset[PeerRole]]]


@dataclass(frozen=True, slots=True)
class Service:
    """By its full name; `add` adds it to a server."""

    name: str
    add: Callable[[grpc.aio.Server], None]
    callers: Callers


class RpcServer:
    """The gRPC server of a node. Not serving until it is told so. In plain it refuses nobody."""

    def __init__(
        self,
        services: Sequence[Service],
        server: grpc.aio.Server,
        statuses: health.aio.HealthServicer,
        port: int,
        gate: Gate | None,
    ) -> None:
        self._services, self._server, self._statuses, self._gate = services, server, statuses, gate
        self.port = port

    @property
    def refused(self) -> Mapping[Refusal, int]:
        return self._gate.refused if self._gate is not None else {}

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in (health.OVERALL_HEALTH, *(service.name for service in self._services)):
            await self._statuses.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Ends every call after `grace_s`; by then what was admitted should have finished."""
        await self._server.stop(grace_s)


async def serve_rpc(
    services: Sequence[Service],
    host: str,
    port: int,
    identity: Identity | None = None,
    *,
    first_call_s: float = FIRST_CALL_S,
) -> RpcServer:
    """Listens on `host:port` (port 0: any) and returns once connections are accepted. With an identity only each
    service's `callers` may call, and a connection without a call for `first_call_s` counts as refused. Raises OSError
    when it cannot listen."""
    gate = None
    if identity is not None:
        gate = Gate(_allowed(services, identity.role), first_call_s)
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[gate] if gate is not None else [])
    for service in services:
        service.add(server)
    statuses = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(statuses, server)
    shown = (*(service.name for service in services), health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(shown, server)
    try:
        if identity is None or gate is None:
            bound = server.add_insecure_port(f"{host}:{port}")
        else:
            bound = server.add_secure_port(f"{host}:{port}", identity.server_credentials(gate.begun))
    except RuntimeError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error}") from error
    serving = RpcServer(services, server, statuses, bound, gate)
    await serving.set_serving(False)
    await server.start()
    return serving


def _allowed(services: Sequence[Service], own: PeerRole) -> dict[str, frozenset[PeerRole]]:
    return {f"/{each.name}/{name}": roles for each in services for name, roles in each.callers(own).items()}


SERVER_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A router that vanished without a word is noticed as soon as a node that did.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A keepalive ping waits behind a bandwidth probe that is under way, and that one has by itself a minute.
    ("grpc.http2.ping_timeout_ms", 13_000),
    # Routers ping on idle links as often as they are configured to; gRPC would take that for an attack.
    ("grpc.http2.max_ping_strikes", 0),
    # Two nodes on one port would share its connections at random.
    ("grpc.so_reuseport", 0),
)
