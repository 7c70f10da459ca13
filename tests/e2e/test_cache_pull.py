"""A prefix that only the other region's cache has is brought over the line between the regions when that is quicker
than computing it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from services.local_cluster import PD_REGION, PREFILL_REGION, LocalCluster, Plan, Wan
from tests.e2e.client import at_rest, complete, eventually, metrics, total
from tests.e2e.conftest import StartCluster
from tests.e2e.reference import Alone, token_ids

pytestmark = pytest.mark.asyncio(loop_scope="session")

UNIT = 64
TOKENS = 8
KEY_BYTES = 16


async def test_a_prefix_of_the_other_region_is_brought_over_the_line(
    start_embedded: StartCluster, model_dir: Callable[[str], Path], alone: Callable[[str], Alone]
):
    """The PD region has lost what it held, the other region has the prompt still. With a line to spare the prompt
    counts as short: it stays, and its prefix crosses instead of being computed. From then on the PD region has it
    itself."""
    prompt, model = token_ids(12_000), alone("cost_model")
    held, expected, layout = (len(prompt) - 1) // UNIT * UNIT, model.answer(prompt, TOKENS), model.engine.info.layout
    prefix_bytes = layout.bytes_per_token * held + layout.state_bytes
    plan = Plan(
        pools=1,
        model_dir=model_dir("cost_model"),
        threshold_tokens=1000,
        rebalance=False,
        pd_roles=("mixed",),
        wan=Wan(mbit=1000, rtt_ms=4),
        extra={"router": ("--bandwidth", "abundant")},
    )
    async with start_embedded(plan) as cluster:
        for region in (PREFILL_REGION, PD_REGION):
            await eventually(partial(followed, cluster, region, 1))
        cold = await complete(cluster, prompt, TOKENS)
        assert (cold.receipt["path"], cold.token_ids) == ("remote", expected)
        for region in (PREFILL_REGION, PD_REGION):
            await eventually(partial(told_of, cluster, region, held // UNIT))
        await eventually(partial(at_rest, cluster))
        await begin_again(cluster, PD_REGION)

        told, before = await told_bytes(cluster, PD_REGION), await crossed(cluster)
        pulled = await complete(cluster, prompt, TOKENS)
        assert (pulled.receipt["path"], pulled.receipt["reason"]) == ("local", "short_prompt")
        assert pulled.receipt["pull"]["chosen"] and pulled.receipt["pull"]["tokens"] == held
        assert pulled.receipt["cache"]["matched_joint_tokens"] == 0
        assert pulled.receipt["cache"]["reported_tokens"] == held
        assert pulled.receipt["cache"]["pulled_bytes"] == prefix_bytes
        assert pulled.token_ids == expected
        assert prefix_bytes <= await crossed(cluster) - before <= 1.1 * prefix_bytes

        await eventually(partial(told_of, cluster, PD_REGION, held // UNIT, told))
        await eventually(partial(at_rest, cluster))
        before = await crossed(cluster)
        own = await complete(cluster, prompt, TOKENS)
        assert own.receipt["path"] == "local" and own.receipt["pull"] is None
        assert (own.receipt["cache"]["reported_tokens"], own.receipt["cache"]["pulled_bytes"]) == (held, 0)
        assert own.token_ids == expected
        assert await crossed(cluster) - before < 0.01 * prefix_bytes
        samples = await metrics(cluster, "decode-0")
        assert total(samples, "prfaas_worker_cache_pulls_total", outcome="longer") == 1
        assert total(samples, "prfaas_worker_cache_pulls_total") == 1


async def begin_again(cluster: LocalCluster, region: str) -> None:
    """The region's only shard dies and comes back with nothing; the router knows."""
    name = f"pool-{region}-0"
    cluster.processes[name].kill()
    await cluster.processes[name].wait()
    await eventually(partial(followed, cluster, region, 0))
    await cluster.start_again(name)
    await eventually(partial(followed, cluster, region, 1))


async def followed(cluster: LocalCluster, region: str, shards: int) -> bool:
    """of so many shards of the region the router's index is current"""
    samples = await metrics(cluster, "router")
    return total(samples, "prfaas_router_pool_shards", region=region, state="current") == shards


async def told_bytes(cluster: LocalCluster, region: str) -> float:
    return total(await metrics(cluster, "router"), "prfaas_router_pool_update_bytes_total", region=region)


async def told_of(cluster: LocalCluster, region: str, units: int, before: float = 0) -> bool:
    """the router has heard of so many blocks of the region's pool"""
    return await told_bytes(cluster, region) - before > units * (KEY_BYTES + 1)


async def crossed(cluster: LocalCluster) -> float:
    """Bytes that the line has carried, towards the PD region."""
    return total(await metrics(cluster, "wan-relay"), "prfaas_relay_bytes_total", direction="forward")
