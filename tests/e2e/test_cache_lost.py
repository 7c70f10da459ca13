"""Requests while the cache goes away and comes back: they are served, and what they are told is right."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from services.local_cluster import LocalCluster, Plan, local_cluster
from tests.e2e.client import Completed, complete, metrics, total

FAMILY = "kimi_linear"
PROMPT = [(7 * number + number // 64) % 250 for number in range(1500)]
TOKENS = 12
LIVENESS_S = 60.0


async def answers_right(cluster: LocalCluster, expected: list[int]) -> Completed:
    async with asyncio.timeout(LIVENESS_S):
        answer = await complete(cluster, PROMPT, TOKENS)
    assert answer.token_ids == expected
    return answer


async def hits(cluster: LocalCluster) -> float:
    """Tokens that prefills did not compute, on all workers."""
    name = "prfaas_worker_cache_skipped_tokens_total"
    workers = [process for process in cluster.processes if process.startswith(("prefill", "decode"))]
    return sum([total(await metrics(cluster, worker), name) for worker in workers])


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
async def test_requests_are_served_without_the_cache_and_with_it_again(
    model_dir: Callable[[str], Path], tmp_path: Path, sig: signal.Signals
):
    """Shards that die, or that stand still, cost what they would have spared and nothing else; those that come back
    have what they had on their disks."""
    async with local_cluster(Plan(model_dir=model_dir(FAMILY), pool_dir=tmp_path / "pools")) as cluster:
        expected = (await complete(cluster, PROMPT, TOKENS)).token_ids
        async with asyncio.timeout(LIVENESS_S):
            while not await hits(cluster):
                await answers_right(cluster, expected)
        pools = [name for name in cluster.processes if name.startswith("pool-")]
        for name in pools:
            cluster.processes[name].send_signal(sig)
        for _ in range(4):
            await answers_right(cluster, expected)
        for name in pools:
            if sig is signal.SIGSTOP:
                cluster.processes[name].send_signal(signal.SIGCONT)
            else:
                await cluster.processes[name].wait()
                await cluster.start_again(name)
        before = await hits(cluster)
        async with asyncio.timeout(LIVENESS_S):
            while await hits(cluster) == before:
                await answers_right(cluster, expected)
