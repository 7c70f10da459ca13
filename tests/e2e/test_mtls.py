"""A cluster whose services ask each other for certificates: it answers as any other, keeps KV to itself and lets nobody
in who has none."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import pytest_asyncio

from prfaas.process import end
from prfaas.transfer.frames import HEADER_BYTES, OF_ATTEMPT, Header, Kind, decode
from prfaas.transfer.greeting import Hello, unpack
from services.free_ports import free_ports
from services.http_client import ask, fetch
from services.local_cluster import LocalCluster, Plan, local_cluster, store_of
from tests.e2e.client import LIVENESS_S, complete, eventually, metrics, total
from tests.e2e.reference import Alone, token_ids

pytestmark = pytest.mark.asyncio(loop_scope="session")

GRACE_S = 10.0
LONG = 1500


class Witness:
    """Passes on what goes to `target_port`, and keeps the headers and the payloads of the frames that went there."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self.headers: list[Header] = []
        self.payloads: list[bytes] = []
        #: Attempt, the lane's salt and the counter of each frame that was sealed.
        self.nonces: list[tuple[str, int, int]] = []

    @asynccontextmanager
    async def listening(self, port: int) -> AsyncIterator[None]:
        async with await asyncio.start_server(self._relay, "127.0.0.1", port):
            yield

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, to_them = await asyncio.open_connection("127.0.0.1", self._target_port)
        back = asyncio.create_task(_copy(theirs, writer))
        salt = 0
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                packed = await reader.readexactly(HEADER_BYTES)
                header = decode(packed)
                payload = await reader.readexactly(header.wire_bytes)
                if header.kind is Kind.HELLO:
                    salt = unpack(payload, Hello).salt
                if header.sealed:
                    self.nonces.append((header.attempt, salt, header.counter))
                self.headers.append(header)
                self.payloads.append(payload)
                to_them.write(packed + payload)
                await to_them.drain()
        to_them.close()
        await back


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def watched(
    model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[LocalCluster, Witness]]:
    """One prefill and one decode worker, and a witness on the KV path between them."""
    kv_port, seen_port = free_ports(2)
    witness = Witness(kv_port)
    plan = Plan(
        model_dir=model_dir("cost_model"),
        threshold_tokens=1000,
        pd_roles=("decode",),
        log_dir=tmp_path_factory.mktemp("logs"),
        extra={"decode-worker": ("--kv-port", str(kv_port), "--kv-advertise", f"a=127.0.0.1:{seen_port}")},
        mtls=True,
    )
    async with witness.listening(seen_port), local_cluster(plan) as cluster:
        yield cluster, witness


async def test_a_request_is_answered_and_its_kv_is_sealed(
    watched: tuple[LocalCluster, Witness], alone: Callable[[str], Alone]
):
    """Prefilled in the other region, decoded here, token by token as a single engine would; of what crossed every frame
    of the attempt was encrypted, and none was not."""
    cluster, witness = watched
    done = await complete(cluster, token_ids(LONG), 8)
    assert done.receipt["path"] == "remote" and done.receipt["recomputed_tokens"] == 1
    assert done.token_ids == alone("cost_model").answer(token_ids(LONG), 8)
    of_attempt = [header for header in witness.headers if header.kind in OF_ATTEMPT]
    assert sum(header.length for header in of_attempt if header.kind is Kind.DATA) == done.receipt["kv_bytes"]
    assert all(header.sealed for header in of_attempt)


async def test_each_lane_is_sealed_with_a_salt_of_its_dialler(watched: tuple[LocalCluster, Witness]):
    """No two lanes of a process have the same, and nobody else has a say in it: a nonce cannot be had twice."""
    cluster, witness = watched
    await complete(cluster, token_ids(10 * LONG), 1)
    hellos = [unpack(payload, Hello) for header, payload in _frames(witness) if header.kind is Kind.HELLO]
    salts = [hello.salt for hello in hellos if hello.node == "prefill-0"]
    assert len(salts) > 1 and len(set(salts)) == len(salts)
    assert len(set(witness.nonces)) == len(witness.nonces) > 1


async def test_nobody_is_refused_in_a_cluster_at_work(watched: tuple[LocalCluster, Witness]):
    """Self-checks, links and the store: each has the certificate it needs, and that is valid for a while."""
    cluster, _ = watched
    await complete(cluster, token_ids(100), 4)
    for name in ("prefill-0", "decode-0"):
        samples = await metrics(cluster, name)
        assert total(samples, "prfaas_worker_rpc_refused_total") == 0
        assert samples["prfaas_worker_certificate_valid_seconds"] > 3600


async def test_neither_tickets_nor_keys_are_told(watched: tuple[LocalCluster, Witness]):
    """Not in a receipt, and not in any log of any process: neither in hex nor as Python writes bytes."""
    cluster, witness = watched
    done = await complete(cluster, token_ids(LONG + 1), 4)
    tickets = {payload[:64] for header, payload in _frames(witness) if header.kind is Kind.OFFER}
    assert tickets
    assert cluster.plan.log_dir is not None
    told = str(done.receipt) + "".join(path.read_text() for path in cluster.plan.log_dir.iterdir())
    for ticket in tickets:
        assert ticket[:16].hex() not in told and repr(ticket[:16])[2:-1] not in told
    for word in ("ticket=", "key_out", "key_back"):
        assert word not in told


async def test_a_router_without_a_certificate_is_refused(watched: tuple[LocalCluster, Witness]):
    """It may read the store and finds the workers there, but gets nothing out of them: no request of its is served, and
    both sides count it."""
    cluster, _ = watched
    async with plain_router(cluster) as endpoint:
        prompt = {"model": cluster.plan.model_dir.name, "prompt": token_ids(8), "max_tokens": 1}
        status, answer = await asyncio.to_thread(ask, "POST", f"{endpoint}/v1/completions", key="none", body=prompt)
        assert status == 503, answer
        _, told = await asyncio.to_thread(fetch, f"{endpoint}/metrics")
        assert "prfaas_router_link_failures_total 0.0" not in told
        assert "prfaas_router_link_failures_total " in told

        async def counted() -> bool:
            samples = await metrics(cluster, "decode-0")
            return total(samples, "prfaas_worker_rpc_refused_total", reason="handshake") > 0

        await eventually(counted)
    assert (await complete(cluster, token_ids(8), 1)).receipt["path"] == "local"


@asynccontextmanager
async def plain_router(cluster: LocalCluster) -> AsyncIterator[str]:
    """Another router of the cluster, with the certificate that the store wants and none for the workers."""
    store = store_of(cluster)
    [port] = free_ports(1)
    options = ["--port", str(port), "--model-dir", str(cluster.plan.model_dir), "--cluster-name", cluster.plan.cluster]
    options += ["--store-endpoints", store.endpoints[0], "--store-ca", store.ca]
    options += ["--store-cert", store.cert, "--store-key", store.key]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli", "router", *options, env={**os.environ}, stderr=asyncio.subprocess.DEVNULL
    )
    try:

        async def ready() -> bool:
            with suppress(OSError):
                status, _ = await asyncio.to_thread(fetch, f"http://127.0.0.1:{port}/ready")
                return status == 200
            return False

        async with asyncio.timeout(LIVENESS_S):
            await eventually(ready)
        yield f"http://127.0.0.1:{port}"
    finally:
        await end(process, GRACE_S)


def _frames(witness: Witness) -> Iterator[tuple[Header, bytes]]:
    return zip(witness.headers, witness.payloads, strict=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
