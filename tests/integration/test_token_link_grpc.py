"""What the gRPC adapter of the token link has beside the contract: the standard services."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from prfaas.node.link_server import serve_worker
from tests.integration.scripted_worker import ScriptedRuntime

PATIENCE_S = 10.0


async def test_a_worker_says_whether_it_serves_and_what():
    """The standard health and reflection services: not serving until told so, and the Worker service is listed."""
    statuses = health_pb2.HealthCheckResponse
    server = await serve_worker(ScriptedRuntime("d0", 1), "127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for service in ("", "prfaas.rpc.v1.Worker"):
            request = health_pb2.HealthCheckRequest(service=service)
            found = []
            for serves in (None, True, False):
                if serves is not None:
                    await server.set_serving(serves)
                found.append((await check(request, timeout=PATIENCE_S)).status)
            assert found == [statuses.NOT_SERVING, statuses.SERVING, statuses.NOT_SERVING]
        ask = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(ask, timeout=PATIENCE_S)
        listed = [service.name async for answer in call for service in answer.list_services_response.service]
        assert "prfaas.rpc.v1.Worker" in listed
    await server.stop(0)
