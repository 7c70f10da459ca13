"""Canaries on a live cluster whose KV path is poisoned by somebody who makes every checksum right again: nothing but an
answer that is known beforehand can show it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from services.free_ports import free_ports
from services.http_client import fetch
from services.local_cluster import LocalCluster, Plan, local_cluster
from tests.e2e.client import at_rest, complete, eventually, metrics, total
from tests.e2e.reference import Alone, token_ids
from tests.e2e.tamper import Tamper
from tests.e2e.test_negative_controls import first_kv_block, first_state

pytestmark = pytest.mark.asyncio(loop_scope="session")

PERIOD_S, LENGTH, OUTPUT = 1.0, 300, 24
FAMILIES = ("cost_model", pytest.param("kimi_linear", marks=pytest.mark.slow))


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=FAMILIES)
async def tampered(
    request: pytest.FixtureRequest,
    model_dir: Callable[[str], Path],
    alone: Callable[[str], Alone],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[LocalCluster, Tamper, Alone]]:
    """One prefill worker, one PD node, the man in the middle between them, and a router that is to prefill remotely
    whatever can be."""
    reference = alone(request.param)
    kv_port, tamper_port = free_ports(2)
    tamper = Tamper(reference.engine.info.layout, kv_port)
    path = ("--kv-port", str(kv_port), "--kv-advertise", f"127.0.0.1:{kv_port}")
    plan = Plan(
        model_dir=model_dir(request.param),
        mode="always",
        pd_roles=("mixed",),
        canary_period_s=PERIOD_S,
        log_dir=tmp_path_factory.mktemp("logs"),
        extra={
            "decode-worker": (*path, "--kv-advertise", f"a=127.0.0.1:{tamper_port}"),
            # What canaries cost on this machine is not what they cost where a share of 1 % is meant.
            "router": ("--canary-max-share", "1"),
        },
    )
    async with await tamper.start(tamper_port), local_cluster(plan) as cluster:
        yield cluster, tamper, reference


async def verdicts(cluster: LocalCluster, verdict: str) -> float:
    return total(await metrics(cluster, "router"), "prfaas_router_canaries_total", verdict=verdict)


async def ready(cluster: LocalCluster) -> tuple[int, str]:
    return await asyncio.to_thread(fetch, f"{cluster.endpoint}/ready")


async def test_canaries_of_a_path_that_is_well_are_right_and_are_nobodys_requests(
    tampered: tuple[LocalCluster, Tamper, Alone],
):
    """They count nowhere but among canaries, and leave nothing behind on the workers."""
    cluster, _, _ = tampered
    before = await metrics(cluster, "router")

    async def some_are_right() -> bool:
        """three canaries came back right"""
        return await verdicts(cluster, "right") >= 3

    await eventually(some_are_right)
    after = await metrics(cluster, "router")
    assert await verdicts(cluster, "wrong") == await verdicts(cluster, "failed") == 0
    for name in ("prfaas_router_requests_total", "prfaas_router_prompt_tokens_total", "prfaas_router_routes_total"):
        assert total(after, name) == total(before, name) == 0
    assert (await ready(cluster))[0] == 200


@pytest.mark.parametrize("target", [first_state, first_kv_block])
async def test_field_C15_a_poisoned_path_is_found_and_nothing_wrong_is_served(
    tampered: tuple[LocalCluster, Tamper, Alone], target: Callable[..., bool]
):
    """One state or one block of keys zeroed: the prefill worker is left out, the router says that it is not ready and
    why, and what it is asked all the same it answers right. All of it passes with the damage."""
    cluster, tamper, reference = tampered
    tamper.target = target

    async def red() -> bool:
        """readiness is red"""
        return (await ready(cluster))[0] == 503

    async def green() -> bool:
        """readiness is green again"""
        return (await ready(cluster))[0] == 200

    try:
        await eventually(red)
        assert "poisoned" in (await ready(cluster))[1]
        assert total(await metrics(cluster, "router"), "prfaas_router_shunned_workers", why="distrusted") == 1
        done = await complete(cluster, token_ids(LENGTH), OUTPUT)
        assert done.receipt["path"] == "local"
        assert done.token_ids == reference.answer(token_ids(LENGTH), OUTPUT)
    finally:
        tamper.target = None
    await eventually(green)
    done = await complete(cluster, token_ids(LENGTH), OUTPUT)
    assert done.receipt["path"] == "remote"
    assert done.token_ids == reference.answer(token_ids(LENGTH), OUTPUT)
    await eventually(lambda: at_rest(cluster))
