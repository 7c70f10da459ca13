"""Long prompts go remote, short ones stay, PD nodes hand over to each other: seen in receipts, metrics and bytes."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from services.local_cluster import PD_REGION, PREFILL_REGION, LocalCluster, Plan, Wan
from tests.e2e.client import at_rest, complete, eventually, metrics, over_pd_nodes, total
from tests.e2e.conftest import StartCluster
from tests.e2e.reference import Alone, token_ids

pytestmark = pytest.mark.asyncio(loop_scope="session")

ModelDir = Callable[[str], Path]
Reference = Callable[[str], Alone]


async def test_long_goes_remote_and_short_stays(start: StartCluster, model_dir: ModelDir, alone: Reference):
    """The line between the regions carries the KV of the long prompt, all of it, and nothing of the short one."""
    plan = Plan(model_dir=model_dir("cost_model"), threshold_tokens=1000, wan=Wan(mbit=500, rtt_ms=10))
    async with start(plan) as cluster:
        quiet = total(await metrics(cluster, "wan-relay"), "prfaas_relay_bytes_total")
        short = await complete(cluster, token_ids(1000), 8)
        assert (short.receipt["path"], short.receipt["reason"]) == ("local", "short_prompt")
        assert total(await metrics(cluster, "wan-relay"), "prfaas_relay_bytes_total") == quiet

        # With another beginning: of the same one the region would have nearly all of the longer prompt.
        long = await complete(cluster, token_ids(1001, seed=1), 8)
        assert (long.receipt["path"], long.receipt["reason"]) == ("remote", "long_prompt")
        crossed = alone("cost_model").engine.info.layout.size_bytes(1000)
        assert long.receipt["kv_bytes"] == crossed
        relayed = total(await metrics(cluster, "wan-relay"), "prfaas_relay_bytes_total", direction="forward") - quiet
        assert crossed <= relayed <= crossed * 1.02 + 4096
        assert await over_pd_nodes(cluster, "prfaas_worker_kv_received_bytes_total") == crossed
        for done, ids in ((short, token_ids(1000)), (long, token_ids(1001, seed=1))):
            assert done.token_ids == alone("cost_model").answer(ids, 8)

        samples = await metrics(cluster, "router")
        assert total(samples, "prfaas_router_routes_total", path="local") == 1
        assert total(samples, "prfaas_router_routes_total", path="remote", reason="long_prompt") == 1
        assert total(samples, "prfaas_router_kv_transfer_bytes_total", path="remote") == crossed
        assert total(samples, "prfaas_router_kv_transfer_bytes_total", path="local") == 0
        await eventually(partial(_link_is_measured, cluster, crossed))


async def _link_is_measured(cluster: LocalCluster, crossed: int) -> bool:
    """what went over the line, and how long the way is, shows at the sender and in the router"""
    sender, router = await metrics(cluster, "prefill-0"), await metrics(cluster, "router")
    return (
        total(sender, "prfaas_worker_kv_sent_bytes_total", peer_region=PD_REGION) == crossed
        and total(sender, "prfaas_worker_kv_lanes", peer_region=PD_REGION) > 0
        and 0 < total(sender, "prfaas_worker_kv_rtt_seconds", peer_region=PD_REGION) < 1
        and 0 < total(router, "prfaas_router_link_rtt_seconds", peer_region=PREFILL_REGION) < 1
    )


async def test_pd_nodes_hand_over_to_each_other(start: StartCluster, model_dir: ModelDir, alone: Reference):
    """With one PD node prefilling and one decoding, a short prompt's KV moves inside the region (PD-P to PD-D)."""
    plan = Plan(
        model_dir=model_dir("cost_model"), threshold_tokens=5000, prefill_workers=0, pd_roles=("prefill", "decode")
    )
    async with start(plan) as cluster:
        done = await complete(cluster, token_ids(700), 8)
        assert (done.receipt["path"], done.receipt["prefill"], done.receipt["decode"]) == (
            "local",
            "decode-0",
            "decode-1",
        )
        assert done.receipt["kv_bytes"] == alone("cost_model").engine.info.layout.size_bytes(699)
        assert done.token_ids == alone("cost_model").answer(token_ids(700), 8)


async def test_a_mixed_node_keeps_its_own_kv(quick: LocalCluster, alone: Reference):
    """Prefill and decode on one node move nothing."""
    done = await complete(quick, token_ids(300), 8)
    assert done.receipt["prefill"] == done.receipt["decode"]
    assert done.receipt["kv_bytes"] == 0
    assert done.token_ids == alone("cost_model").answer(token_ids(300), 8)


async def test_a_decode_node_prefills_when_nobody_else_can(start: StartCluster, model_dir: ModelDir, alone: Reference):
    """A PD node with role decode accepts bounded fallback prefill, however long the prompt."""
    plan = Plan(model_dir=model_dir("cost_model"), threshold_tokens=100, prefill_workers=0, pd_roles=("decode",))
    async with start(plan) as cluster:
        done = await complete(cluster, token_ids(1500), 8)
        assert (done.receipt["path"], done.receipt["reason"]) == ("local", "no_remote_prefill")
        assert done.token_ids == alone("cost_model").answer(token_ids(1500), 8)


async def test_the_account_sums_to_the_time_to_first_token(quick: LocalCluster):
    """Each term is measured by itself, and next to nothing is left over."""
    done = await complete(quick, token_ids(3000), 4)
    account = done.receipt["ttft_account"]
    assert sum(account.values()) == pytest.approx(done.receipt["ttft_seconds"], rel=1e-6)
    assert account["prefill"] > 0 and account["transfer_exposed"] > 0 and account["first_decode_step"] > 0
    assert abs(account["unaccounted"]) <= 0.001


async def test_many_requests_leave_nothing_behind(quick: LocalCluster, alone: Reference):
    """Sixty-four requests of all lengths at once are all answered rightly, and every counter returns to base line."""
    prompts = [token_ids(50 + 53 * number, seed=number) for number in range(64)]
    done = await asyncio.gather(*(complete(quick, ids, 8) for ids in prompts))
    assert [one.token_ids for one in done] == [alone("cost_model").answer(ids, 8) for ids in prompts]
    assert {one.receipt["path"] for one in done} == {"local", "remote"}
    await eventually(lambda: at_rest(quick))
