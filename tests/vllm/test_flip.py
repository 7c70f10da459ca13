"""A PD node of vLLM engines takes another role under load: its server goes on, no request fails, and the answers are
those of one server alone."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.local_cluster import LocalCluster
from tests.e2e.client import Completed, at_rest, complete, eventually, metrics, total
from tests.vllm.admin import KEY, flip
from tests.vllm.conftest import StartCluster
from tests.vllm.prompts import token_ids
from tests.vllm.servers import server_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

LENGTHS, OUTPUT, AT_ONCE = (40, 300, 800, 1500), 48, 3
NODES, FLIPPED = ("decode-0", "decode-1"), "decode-1"
ROLES = ("prefill", "decode", "prefill", "mixed")
#: Requests that are answered in each role before it is taken away again.
SERVED = 8
LIVENESS_S = 120.0


async def test_a_flip_under_load_needs_no_new_server(start: StartCluster) -> None:
    prompts = [token_ids(length, seed=length) for length in LENGTHS]
    async with start("qwen3", prefill_workers=0, pd_roles=("mixed", "mixed"), admin_key=KEY) as cluster:
        alone = [await complete(cluster, ids, OUTPUT) for ids in prompts]
        assert all(one.receipt["prefill"] == one.receipt["decode"] for one in alone)
        wanted = [one.token_ids for one in alone]
        servers = [server_of(cluster, node).pid for node in NODES]
        async with _asking(cluster, prompts, wanted) as done:
            for role in ROLES:
                epoch = await flip(cluster, FLIPPED, role)
                await eventually(lambda role=role, epoch=epoch: _serves_as(cluster, role, epoch), LIVENESS_S)
                since = len(done)
                await eventually(lambda since=since: _answered(done, since + SERVED), LIVENESS_S)
        await eventually(lambda: at_rest(cluster), LIVENESS_S)
        assert servers == [server_of(cluster, node).pid for node in NODES]
        assert total(await metrics(cluster, FLIPPED), "prfaas_worker_role_changes_total") == len(ROLES)
    crossed = [one.receipt for one in done if one.receipt["prefill"] != one.receipt["decode"]]
    assert {FLIPPED} <= {receipt["prefill"] for receipt in crossed}
    assert {FLIPPED} <= {receipt["decode"] for receipt in crossed}


@asynccontextmanager
async def _asking(
    cluster: LocalCluster, prompts: list[list[int]], wanted: list[list[int]]
) -> AsyncIterator[list[Completed]]:
    """Some requests at a time while the body runs, each answered, and with the wanted tokens."""
    done, numbers, over = list[Completed](), itertools.count(), asyncio.Event()

    async def ask() -> None:
        while not over.is_set():
            which = next(numbers) % len(prompts)
            one = await complete(cluster, prompts[which], OUTPUT)
            assert one.token_ids == wanted[which], one.receipt
            done.append(one)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(ask())
        yield done
        over.set()


async def _serves_as(cluster: LocalCluster, role: str, epoch: int) -> bool:
    """the node has carried out the plan"""
    samples = await metrics(cluster, FLIPPED)
    serving = total(samples, "prfaas_worker_phase", phase="serving") == 1
    followed = total(samples, "prfaas_worker_plan_epoch") == epoch
    return serving and followed and total(samples, "prfaas_worker_role", role=role) == 1


async def _answered(done: list[Completed], count: int) -> bool:
    """so many requests have been answered"""
    return len(done) >= count
