"""The gRPC server of a node: one service of ours, the standard health and reflection services beside it, and a gate in
front of them where there are certificates.
"""

from collections.abc import Callable, Mapping

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from prfaas.rpc.gate import FIRST_CALL_S, Gate
from prfaas.rpc.identity import Identity
from prfaas.rpc.translate import MAX_MESSAGE_BYTES
from prfaas.security import PeerRole, Refusal

#: Who may call which of the service's methods, on a server of this role.
Callers = Callable[[PeerRole], Mapping[str, frozenset[PeerRole]]]


class RpcServer:
    """The gRPC server of a node. Not serving until it is told so. In plain it refuses nobody."""

    def __init__(
        self, service: str, server: grpc.aio.Server, statuses: health.aio.HealthServicer, port: int, gate: Gate | None
    ) -> None:
        self._service, self._server, self._statuses, self._gate = service, server, statuses, gate
        self.port = port

    @property
    def refused(self) -> Mapping[Refusal, int]:
        return self._gate.refused if self._gate is not None else {}

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in (health.OVERALL_HEALTH, self._service):
            await self._statuses.set(service, status)

    async def stop(self, grace_s: float) -> None:
        """Ends every call after `grace_s`; by then what was admitted should have finished."""
        await self._server.stop(grace_s)


async def serve_rpc(
    service: str,
    add: Callable[[grpc.aio.Server], None],
    callers: Callers,
    host: str,
    port: int,
    identity: Identity | None = None,
    *,
    first_call_s: float = FIRST_CALL_S,
) -> RpcServer:
    """Listens on `host:port` (port 0: any) and returns once connections are accepted. `add` adds the service, `service`
    is its full name. With an identity only `callers` may call, and a connection without a call for `first_call_s`
    counts as refused. Raises OSError when it cannot listen."""
    gate = None
    if identity is not None:
        gate = Gate({f"/{service}/{name}": roles for name, roles in callers(identity.role).items()}, first_call_s)
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[gate] if gate is not None else [])
    add(server)
    statuses = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(statuses, server)
    reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        if identity is None or gate is None:
            bound = server.add_insecure_port(f"{host}:{port}")
        else:
            bound = server.add_secure_port(f"{host}:{port}", identity.server_credentials(gate.begun))
    except RuntimeError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error}") from error
    serving = RpcServer(service, server, statuses, bound, gate)
    await serving.set_serving(False)
    await server.start()
    return serving


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
