"""Routes follow what the regions' caches hold, as the router's index of their pools knows it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from services.local_cluster import PD_REGION, PREFILL_REGION, LocalCluster, Plan
from tests.e2e.client import complete, eventually, metrics, total
from tests.e2e.conftest import StartCluster
from tests.e2e.reference import Alone, token_ids

pytestmark = pytest.mark.asyncio(loop_scope="session")

UNIT = 64
KEY_BYTES = 16


async def told_of(cluster: LocalCluster, units: int) -> bool:
    """the router has heard of so many blocks of the PD region's pool"""
    samples = await metrics(cluster, "router")
    return total(samples, "prfaas_router_pool_update_bytes_total", region=PD_REGION) > units * (KEY_BYTES + 1)


async def test_a_conversation_that_was_long_is_short_when_its_history_is_cached(
    start_embedded: StartCluster, model_dir: Callable[[str], Path], alone: Callable[[str], Alone]
):
    """The first turn goes to the other region. Of the second the PD region has all but the new question: it stays, and
    prefill takes from the cache exactly what the index promised."""
    plan = Plan(model_dir=model_dir("cost_model"), threshold_tokens=1000, pools=1)
    async with start_embedded(plan) as cluster:
        for region in (PREFILL_REGION, PD_REGION):
            await eventually(partial(_followed, cluster, region))
        first = await complete(cluster, token_ids(3000), 40)
        assert (first.receipt["path"], first.receipt["reason"]) == ("remote", "long_prompt")
        history = 3000 + 40 - 1
        await eventually(partial(told_of, cluster, history // UNIT))
        turn = token_ids(3000) + first.token_ids + token_ids(100, seed=1)
        second = await complete(cluster, turn, 8)
        assert (second.receipt["path"], second.receipt["reason"]) == ("local", "short_prompt")
        held = history // UNIT * UNIT
        assert second.receipt["uncached_tokens"] == len(turn) - held
        assert second.receipt["cache"]["matched_joint_tokens"] == second.receipt["cache"]["reported_tokens"] == held
        assert second.token_ids == alone("cost_model").answer(turn, 8)
        samples = await metrics(cluster, "router")
        assert total(samples, "prfaas_router_cached_tokens_total") == held
        assert total(samples, "prfaas_router_cache_error_tokens_count") == 1
        assert total(samples, "prfaas_router_cache_error_tokens_sum") == 0


async def _followed(cluster: LocalCluster, region: str) -> bool:
    """the index of the region's pool is current"""
    samples = await metrics(cluster, "router")
    return total(samples, "prfaas_router_pool_shards", region=region, state="current") == 1
