"""Workers that die, clients that leave, bytes that change on the way: the client's stream is right or says that it is
not."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from services.local_cluster import LocalCluster, Plan, Wan
from tests.e2e.client import LIVENESS_S, at_rest, complete, eventually, metrics, openai_client, over_pd_nodes, total
from tests.e2e.conftest import StartCluster
from tests.e2e.reference import Alone, token_ids

pytestmark = pytest.mark.asyncio(loop_scope="session")

ModelDir = Callable[[str], Path]
Reference = Callable[[str], Alone]


async def test_field_C2_a_prefill_worker_killed_in_mid_transfer(
    start: StartCluster, model_dir: ModelDir, alone: Reference
):
    """The client still gets its tokens, and the reservation that the dead worker was filling is gone within 5 s."""
    plan = Plan(model_dir=model_dir("cost_model"), threshold_tokens=500, wan=Wan(mbit=2, rtt_ms=10))
    async with start(plan) as cluster:
        ids = token_ids(6000)
        asking = asyncio.create_task(complete(cluster, ids, 8))
        quiet = total(await metrics(cluster, "wan-relay"), "prfaas_relay_bytes_total", direction="forward")

        async def crossing() -> bool:
            """KV is crossing the line"""
            samples = await metrics(cluster, "wan-relay")
            return total(samples, "prfaas_relay_bytes_total", direction="forward") > quiet + 20_000

        await eventually(crossing)
        assert await over_pd_nodes(cluster, "prfaas_worker_kv_spans") == 1
        os.kill(cluster.processes["prefill-0"].pid, signal.SIGKILL)

        async def released() -> bool:
            """the dead worker's reservation was taken back"""
            return await over_pd_nodes(cluster, "prfaas_worker_kv_spans") == 0

        await eventually(released, seconds=5)
        done = await asking
        assert done.token_ids == alone("cost_model").answer(ids, 8)
        assert done.receipt["path"] == "local"
        assert [attempt["ending"] for attempt in done.receipt["attempts"]] == ["prefill_lost", "done"]
        account = done.receipt["ttft_account"]
        assert abs(account["unaccounted"]) <= 0.001 and account["queue"] > 0.1  # the lost attempt was a wait
        cluster.metrics.pop("prefill-0")
        await eventually(lambda: at_rest(cluster))


@pytest.mark.parametrize("length", [300, 6000], ids=["local", "remote"])
async def test_field_D1_a_client_that_leaves(quick: LocalCluster, length: int):
    """Wherever the request is, everything upstream is cancelled within a second."""
    for first_token in (False, True):
        async with openai_client(quick) as client:
            stream = asyncio.create_task(_read(client, quick, token_ids(length), first_token))
            if first_token:
                await stream
            else:
                await eventually(lambda: _busy(quick))
                stream.cancel()
                await asyncio.gather(stream, return_exceptions=True)
        await eventually(lambda: at_rest(quick), seconds=1)


async def _read(client: object, cluster: LocalCluster, ids: list[int], first_token: bool) -> None:
    stream = await client.completions.create(  # type: ignore[attr-defined]
        model=cluster.plan.model_dir.name, prompt=ids, max_tokens=2000, temperature=0, stream=True
    )
    async for _ in stream:
        if first_token:
            await stream.close()
            return


async def _busy(cluster: LocalCluster) -> bool:
    """the request has reached a worker"""
    return await over_pd_nodes(cluster, "prfaas_worker_reservations") > 0


async def test_a_decode_node_killed_before_the_first_token(start: StartCluster, model_dir: ModelDir, alone: Reference):
    """Until the first token any retry is allowed: the other PD node takes the request over."""
    plan = Plan(model_dir=model_dir("cost_model"), threshold_tokens=500, wan=Wan(mbit=2, rtt_ms=10))
    async with start(plan) as cluster:
        ids = token_ids(3000)
        asking = asyncio.create_task(complete(cluster, ids, 8))
        await eventually(lambda: _busy(cluster))
        for node in ("decode-0", "decode-1"):
            if total(await metrics(cluster, node), "prfaas_worker_reservations"):
                os.kill(cluster.processes[node].pid, signal.SIGKILL)
                cluster.metrics.pop(node)
                cluster.processes.pop(node)
                break
        done = await asking
        assert done.token_ids == alone("cost_model").answer(ids, 8)
        assert len(done.receipt["attempts"]) == 2


async def test_field_C3_a_worker_restarted_under_its_id(start: StartCluster, model_dir: ModelDir, alone: Reference):
    """A second process with the same id takes over at once; requests go on, and the first one ends by itself."""
    plan = Plan(model_dir=model_dir("cost_model"), threshold_tokens=500)
    async with start(plan) as cluster:
        first = cluster.processes["prefill-0"]
        command = psutil.Process(first.pid).cmdline()
        metrics_port = command.index("--metrics-port") + 1
        command[metrics_port] = "0"
        second = await asyncio.create_subprocess_exec(*command)
        try:
            assert await asyncio.wait_for(first.wait(), LIVENESS_S) == 1
            cluster.metrics.pop("prefill-0")
            done = await complete(cluster, token_ids(2000), 8)
            assert (done.receipt["path"], done.receipt["prefill"]) == ("remote", "prefill-0")
            assert done.token_ids == alone("cost_model").answer(token_ids(2000), 8)
        finally:
            second.terminate()
            await second.wait()
