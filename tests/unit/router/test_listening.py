"""What the operator has set is what a router listens with."""

import asyncio
import re
import socket
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from prfaas.cluster import ClusterView, RegionId
from prfaas.config import Config, HttpConfig, RouterConfig
from prfaas.errors import ConfigError
from prfaas.live.link_stream import LinkCounters
from prfaas.live.steering import Steering
from prfaas.scheduling.admission import Admission, AdmissionParams
from prfaas.scheduling.demand import DemandParams
from prfaas.scheduling.routing import RoutingParams
from services.certificates import issue, new_authority, write
from services.router.http.messages import HttpRequest, Response
from services.router.listening import OWN_FILES, Listening, fitting
from services.router.metrics import RouterMetrics

LIVENESS_S = 20.0
HTTP = HttpConfig(
    max_head_bytes=1024,
    max_headers=8,
    max_body_bytes=2000,
    max_bodies_bytes=1500,
    max_pipelined=1,
    max_connections=2,
    idle_timeout_s=0.3,
    head_timeout_s=0.2,
    body_timeout_s=0.2,
    linger_s=0.1,
)
POST = b"POST / HTTP/1.1\r\nHost: x\r\n"


async def handle(request: HttpRequest) -> Response:
    await asyncio.sleep(0.05)
    return Response(200)


async def exchange(port: int, data: bytes) -> list[int]:
    """The statuses of all answers until the other end closes."""
    async with asyncio.timeout(LIVENESS_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        answers = await reader.read()
        writer.close()
    return [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", answers)]


@pytest.mark.parametrize(
    ("data", "statuses"),
    [
        (POST + b"X: " + b"x" * 1024 + b"\r\n\r\n", [431]),
        (POST + b"X: x\r\n" * 8 + b"\r\n", [431]),
        (POST + b"Content-Length: 2001\r\n\r\n", [413]),
        (POST + b"Content-Length: 1600\r\n\r\n" + b"x" * 1600, [503]),
        ((POST + b"Content-Length: 0\r\n\r\n") * 3, [200, 503]),
        (POST, [408]),
        (POST + b"Content-Length: 5\r\n\r\nx", [408]),
        (POST + b"Content-Length: 1500\r\n\r\n" + b"x" * 1500, [200]),
        (b"", []),
    ],
)
async def test_each_limit_of_the_configuration_trips(data: bytes, statuses: list[int]):
    """At the endpoint, and what is refused is counted."""
    listening = Listening(Config(router=RouterConfig(port=0), http=HTTP), shared=False)
    server, port = await listening.endpoint(handle)
    assert await exchange(port, data) == statuses
    assert sorted(listening.counters.refused.elements()) == [status for status in statuses if status != 200]
    await server.drain(1.0)
    assert (listening.counters.open_connections, listening.counters.body_bytes) == (0, 0)


async def test_the_limit_of_connections_trips():
    """The one too many is told so, and the others stay."""
    listening = Listening(Config(router=RouterConfig(port=0), http=HTTP), shared=False)
    server, port = await listening.endpoint(handle)
    assert await asyncio.gather(*(exchange(port, b"") for _ in range(3))) == [[], [], [503]]
    assert listening.counters.accepted == 3
    await server.drain(1.0)


async def test_a_port_that_is_taken_is_named_with_its_setting():
    """Unless it is shared on purpose."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        own = RouterConfig(port=port, admin_port=port, metrics_port=port, workers=1)
        alone = Listening(Config(router=own), shared=False)
        for setting, listen in (("router.port", alone.endpoint), ("router.admin_port", alone.admin)):
            with pytest.raises(ConfigError) as refused:
                await listen(handle)
            assert (refused.value.path, str(port) in refused.value.message) == (setting, True)
        shared = Listening(Config(router=own), shared=True)
        server, bound = await shared.endpoint(handle)
        assert bound == port
        await server.drain(0.1)


def test_no_more_connections_are_taken_than_there_are_files_for():
    """What could not be accepted could not be turned away either: it would wait in the kernel."""
    assert fitting(HttpConfig(max_connections=1000), 1000 + OWN_FILES).max_connections == 1000
    assert fitting(HttpConfig(max_connections=1000), 999 + OWN_FILES).max_connections == 999
    assert fitting(HttpConfig(max_connections=1000), 64).max_connections == 1


async def test_the_endpoint_speaks_tls_with_the_files_of_the_configuration(tmp_path: Path):
    """And HTTP no more; files that cannot be used are an error before anything is listened on."""
    authority = new_authority()
    cert, key = write(tmp_path, "endpoint", issue(authority, ()))
    config = Config(router=RouterConfig(port=0, tls_cert=str(cert), tls_key=str(key)))
    listening = Listening(config, shared=False)
    server, port = await listening.endpoint(handle)
    trusting = ssl.create_default_context(cadata=authority.certificate.public_bytes(Encoding.PEM).decode())
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting, server_hostname="localhost")
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()
    assert await exchange(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") == []
    await server.drain(1.0)
    key.unlink()
    with pytest.raises(ConfigError, match=r"endpoint\.key"):
        Listening(config, shared=False)


async def test_metrics_show_the_front():
    """What is refused counts by status; without a certificate none expires."""
    metrics = RouterMetrics(
        ["m"], lambda: 0.0, lambda: False, LinkCounters(), Admission(AdmissionParams(max_running=1))
    )
    metrics.listening = Listening(Config(router=RouterConfig(port=0), http=HTTP), shared=False)
    server, port = await metrics.listening.endpoint(handle)
    await exchange(port, b"nonsense\r\n\r\n")
    await server.drain(1.0)
    steering = Steering(RegionId("near"), RoutingParams(100), 0.0, DemandParams())
    text = metrics.exposition(ClusterView(), 0, steering, ready=True).decode()
    for line in (
        'http_refused_total{status="400"} 1.0',
        'http_refused_total{status="431"} 0.0',
        "http_connections_total 1.0",
        "http_open_connections 0.0",
        "http_body_bytes 0.0",
        "tls_certificate_valid_seconds +Inf",
    ):
        assert f"prfaas_router_{line}\n" in text
