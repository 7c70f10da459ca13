"""Requests while the cache goes away and comes back: they are served, and what they are told is right."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from services.local_cluster import PD_REGION, LocalCluster, Plan, local_cluster
from tests.e2e.client import Completed, complete, metrics, total

FAMILY = "cost_model"
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


@pytest.mark.parametrize("sig", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
async def test_requests_are_served_without_the_cache_and_with_it_again(
    model_dir: Callable[[str], Path], tmp_path: Path, sig: signal.Signals
):
    """Shards that die, or that stand still, cost what they would have spared and nothing else; those that come back
    have what they had on their disks."""
    async with local_cluster(Plan(model_dir=model_dir(FAMILY), pools=1, pool_dir=tmp_path / "pools")) as cluster:
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


async def test_a_prefix_that_never_arrives_costs_the_only_decode_node_one_attempt(model_dir: Callable[[str], Path]):
    """The shard promises a prefix and begins to send it, but its pump stands still: the node that waited in vain is not
    to blame, and serves the request without the cache."""
    plan = Plan(
        pools=1,
        model_dir=model_dir(FAMILY),
        threshold_tokens=0,
        pd_roles=("mixed",),
        extra={"decode-worker": ("--cache-get-timeout-s", "1")},
    )
    async with local_cluster(plan) as cluster:
        expected = (await complete(cluster, PROMPT, TOKENS)).token_ids
        async with asyncio.timeout(LIVENESS_S):
            while not await borrowed(cluster):
                await answers_right(cluster, expected)
        pump = pump_of(cluster, f"pool-{PD_REGION}-0")
        pump.suspend()
        try:
            answer = await answers_right(cluster, expected)
        finally:
            pump.resume()
        lost, served = answer.receipt["attempts"]
        assert lost["route"]["use_cache"] and "a cached prefix was lost" in lost["detail"]
        assert not served["route"]["use_cache"] and served["ending"] == "done"
        assert {each["route"]["decode"] for each in (lost, served)} == {"decode-0"}


async def borrowed(cluster: LocalCluster) -> float:
    """Tokens of KV that the decode node had from its region's cache."""
    return total(await metrics(cluster, "decode-0"), "prfaas_worker_cache_held_tokens_total")


def pump_of(cluster: LocalCluster, name: str) -> psutil.Process:
    children = psutil.Process(cluster.processes[name].pid).children()
    [pump] = [child for child in children if "prfaas.transfer.pump" in child.cmdline()]
    return pump
