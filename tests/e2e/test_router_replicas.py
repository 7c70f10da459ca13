"""Two routers on a store of three members: either may die, and so may the store's leader."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from services.http_client import ask
from services.local_cluster import LocalCluster, Plan, local_cluster
from tests.e2e.client import LIVENESS_S, at_rest, eventually, metrics, openai_client, total
from tests.e2e.load import Kind, loaded
from tests.e2e.reference import Alone, token_ids
from tests.etcd_process import ETCD, EtcdCluster, start_etcd_cluster

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(ETCD is None, reason="no etcd on this machine: install etcd-server"),
]

KEY = "sesame"
ROUTERS = ("router", "router-1")
PD_NODES = ("decode-0", "decode-1")
MIX = (Kind(200, 20), Kind(900, 8), Kind(1500, 4))
#: Of a router that is killed the lead is another's in less: its lease, and the other one's next look.
LEAD_MOVES_S = 15.0
STREAM = Kind(100, 1500)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def store(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EtcdCluster]:
    members = await asyncio.to_thread(start_etcd_cluster, tmp_path_factory.mktemp("etcd-cluster"))
    try:
        yield members
    finally:
        members.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(
    store: EtcdCluster, model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalCluster]:
    """Two routers; everybody's first choice of the store's members is the one that leads it."""
    leader = await asyncio.to_thread(store.leader)
    logs = tmp_path_factory.mktemp("logs")
    plan = Plan(
        model_dir=model_dir("cost_model"),
        routers=2,
        admin_key=KEY,
        rebalance=False,
        threshold_tokens=700,
        etcd=(leader.endpoint, *(other.endpoint for other in store.others(leader))),
        log_dir=logs,
        cluster=logs.name,
    )
    async with local_cluster(plan) as cluster:
        yield cluster


def at(cluster: LocalCluster, router: str) -> LocalCluster:
    """The cluster as clients of this router see it."""
    return replace(cluster, endpoint=cluster.endpoints[router])


async def the_leader(cluster: LocalCluster, seconds: float = LIVENESS_S) -> str:
    """Once exactly one router leads."""
    leaders: list[str] = []

    async def one_leads() -> bool:
        """exactly one router leads"""
        known = [name for name in ROUTERS if name in cluster.metrics]
        leaders[:] = [name for name in known if total(await metrics(cluster, name), "prfaas_router_leads")]
        return len(leaders) == 1

    await eventually(one_leads, seconds)
    return leaders[0]


async def flip(cluster: LocalCluster, router: str, node: str, role: str) -> int:
    """The epoch of the plan, once the node has carried it out."""
    url = f"{cluster.admin[router]}/admin/v1/workers/{node}/flip"
    status, answer = await asyncio.to_thread(ask, "POST", url, key=KEY, body={"role": role})
    assert status == 200, answer
    epoch: int = json.loads(answer)["epoch"]

    async def done() -> bool:
        """the node has its role"""
        samples = await metrics(cluster, node)
        return (total(samples, "prfaas_worker_plan_epoch"), total(samples, "prfaas_worker_role", role=role)) == (
            epoch,
            1,
        )

    await eventually(done)
    return epoch


async def roles(cluster: LocalCluster) -> list[str]:
    every = [await metrics(cluster, node) for node in PD_NODES]
    return [
        role for one in every for role in ("prefill", "decode", "mixed") if total(one, "prfaas_worker_role", role=role)
    ]


@dataclass
class Stream:
    """A long answer, as text. `task` ends with it, or with what ended it."""

    text: str = ""
    finish: str | None = None
    task: "asyncio.Task[None] | None" = None

    @classmethod
    async def begun(cls, cluster: LocalCluster) -> "Stream":
        """Once some of it has come."""
        stream = cls()
        stream.task = asyncio.create_task(stream._read(cluster))

        async def under_way() -> bool:
            """the stream has begun"""
            return len(stream.text) > 10

        await eventually(under_way)
        return stream

    async def _read(self, cluster: LocalCluster) -> None:
        async with openai_client(cluster) as client:
            async for chunk in await client.completions.create(
                model=cluster.plan.model_dir.name,
                prompt=token_ids(STREAM.prompt_tokens),
                max_tokens=STREAM.max_tokens,
                temperature=0,
                stream=True,
            ):
                for choice in chunk.choices:
                    self.text += choice.text
                    self.finish = choice.finish_reason or self.finish

    async def end(self) -> BaseException | None:
        assert self.task is not None
        [error] = await asyncio.wait_for(asyncio.gather(self.task, return_exceptions=True), LIVENESS_S)
        return error if isinstance(error, BaseException) else None


async def test_field_K1_the_store_loses_its_leader_under_load(
    store: EtcdCluster, pair: LocalCluster, alone: Callable[[str], Alone]
):
    """All requests of both routers are answered, no role changes and no process is started again, and afterwards the
    cluster obeys a new plan."""
    await the_leader(pair)
    epoch = await flip(pair, await the_leader(pair), "decode-0", "decode")
    processes = {name: process.pid for name, process in pair.processes.items()}
    reference = alone("cost_model")
    async with (
        loaded(at(pair, "router"), reference, MIX, 4) as one,
        loaded(at(pair, "router-1"), reference, MIX, 4) as two,
    ):
        lost = await asyncio.to_thread(store.leader)
        lost.kill()
        before = len(one.done), len(two.done)
        await asyncio.to_thread(store.leader)

        async def both_serve() -> bool:
            """both routers have answered requests since"""
            return len(one.done) > before[0] + 8 and len(two.done) > before[1] + 8

        await eventually(both_serve)
        assert await roles(pair) == ["decode", "mixed"]
        assert await flip(pair, await the_leader(pair), "decode-0", "mixed") == epoch + 1
    assert {name: process.pid for name, process in pair.processes.items()} == processes
    assert all(process.returncode is None for process in pair.processes.values())
    await eventually(lambda: at_rest(pair))
    await asyncio.to_thread(lost.start_again)


async def test_a_router_that_is_told_twice_to_stop_says_so_to_its_streams(pair: LocalCluster):
    """Not that a worker was lost, which was not. What was sent before is right, and the worker is free again."""
    leader = await the_leader(pair)
    [router] = set(ROUTERS) - {leader}
    stays = await Stream.begun(at(pair, leader))
    cut = await Stream.begun(at(pair, router))
    process, metrics_at = pair.processes[router], pair.metrics.pop(router)
    process.send_signal(signal.SIGTERM)

    async def draining() -> bool:
        """the router takes nothing new"""
        try:
            await asyncio.to_thread(ask, "GET", f"{pair.endpoints[router]}/ready")
        except OSError:
            return True
        return False

    await eventually(draining)
    process.send_signal(signal.SIGTERM)
    error = await cut.end()
    assert isinstance(error, openai.APIError) and "the router is stopping" in str(error), repr(error)
    assert cut.finish is None and await asyncio.wait_for(process.wait(), LIVENESS_S) == 0
    assert await stays.end() is None
    assert stays.finish == "length" and stays.text.startswith(cut.text)
    await eventually(lambda: at_rest(pair))
    await pair.start_again(router)

    async def serves() -> bool:
        """it is back"""
        try:
            status, _ = await asyncio.to_thread(ask, "GET", metrics_at.replace("/metrics", "/ready"))
        except OSError:
            return False
        return status == 200

    await eventually(serves)
    pair.metrics[router] = metrics_at


async def test_a_router_that_is_killed_takes_only_its_own_connections(
    pair: LocalCluster, alone: Callable[[str], Alone]
):
    """Its streams end; those of the other one do not, nor does any request that comes to it. What the dead router held
    on the workers is given back, and the lead is the other's within its time."""
    victim = await the_leader(pair)
    [survivor] = set(ROUTERS) - {victim}
    epoch = await flip(pair, victim, "decode-1", "decode")
    lost, kept = await asyncio.gather(Stream.begun(at(pair, victim)), Stream.begun(at(pair, survivor)))
    async with loaded(at(pair, survivor), alone("cost_model"), MIX, 6) as load:
        pair.metrics.pop(victim)
        os.kill(pair.processes[victim].pid, signal.SIGKILL)
        assert await lost.end() is not None and lost.finish is None
        assert await the_leader(pair, LEAD_MOVES_S) == survivor
        assert await kept.end() is None and kept.finish == "length"
        assert kept.text.startswith(lost.text) and len(lost.text) < len(kept.text)
        assert await flip(pair, survivor, "decode-1", "mixed") == epoch + 1
        assert load.done
    await eventually(lambda: at_rest(pair))
