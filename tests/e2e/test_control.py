"""The control plane of a live cluster: t follows the link, roles follow the plan, and leaders, plans and the store may
come and go meanwhile."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prfaas.cluster import NodeId
from prfaas.cluster import Plan as RolePlan
from prfaas.errors import StaleEpoch
from prfaas.membership.direct import publish_plan
from prfaas.membership.etcd import EtcdStore
from prfaas.membership.plans import PlanRecord, plan_key, read, readable
from services.http_client import ask
from services.local_cluster import LocalCluster, Plan, Wan, local_cluster
from tests.contract.conftest import Backend, Embedded, RealEtcd
from tests.e2e.client import at_rest, eventually, metrics, total
from tests.e2e.conftest import StartCluster
from tests.e2e.load import Kind, Load, loaded
from tests.e2e.reference import Alone
from tests.etcd_process import start_etcd

pytestmark = pytest.mark.asyncio(loop_scope="session")

ModelDir = Callable[[str], Path]
Reference = Callable[[str], Alone]

KEY = "sesame"
MIX = tuple(Kind(tokens, 4) for tokens in (300, 800, 1500, 3000, 6000))
STREAMS = (Kind(200, 120), Kind(400, 60))
PREFILLS = (Kind(2500, 2), Kind(4000, 2))


async def admin(cluster: LocalCluster, method: str, path: str, body: object = None, router: str = "router") -> str:
    status, answer = await asyncio.to_thread(
        ask, method, f"{cluster.admin[router]}/admin/v1/{path}", key=KEY, body=body
    )
    assert status == 200, answer
    return answer


async def threshold(cluster: LocalCluster, router: str = "router") -> float:
    return total(await metrics(cluster, router), "prfaas_router_threshold_tokens")


async def role(cluster: LocalCluster, node: str) -> str:
    samples = await metrics(cluster, node)
    [now] = [each for each in ("prefill", "decode", "mixed") if total(samples, "prfaas_worker_role", role=each)]
    return now


async def set_line(cluster: LocalCluster, mbit: float) -> None:
    url = cluster.metrics["wan-relay"].replace("/metrics", f"/rate?mbit={mbit}")
    status, answer = await asyncio.to_thread(ask, "POST", url)
    assert status == 200, answer


async def test_field_L1_t_rises_when_the_link_is_throttled_and_falls_again(
    start_embedded: StartCluster, model_dir: ModelDir, alone: Reference
):
    """The line drops from 200 Mbit/s to 16: more stays local. It comes back: t returns to what it was."""
    plan = Plan(model_dir=model_dir("cost_model"), threshold_tokens=600, wan=Wan(mbit=200, rtt_ms=20), rebalance=False)
    async with start_embedded(plan) as cluster:
        async with loaded(cluster, alone("cost_model"), MIX, per_s=6) as load:

            async def known() -> bool:
                """enough has been seen of requests and of the link"""
                samples = await metrics(cluster, "router")
                return len(load.done) > 40 and total(samples, "prfaas_router_link_goodput_bytes_per_second") > 1e6

            async def risen() -> bool:
                """t has risen"""
                return await threshold(cluster) >= 1500

            async def fallen() -> bool:
                """t is what it was"""
                return await threshold(cluster) == 600

            await eventually(known)
            assert await fallen()
            await set_line(cluster, 16)
            await eventually(risen)
            await set_line(cluster, 200)
            await eventually(fallen, seconds=60)
        await eventually(lambda: at_rest(cluster))


async def test_a_line_that_is_cut_keeps_traffic_here_until_it_is_mended(
    start_embedded: StartCluster, model_dir: ModelDir, alone: Reference
):
    """Nobody is told of the cut, and nothing comes to its end that could fail: the senders' reports alone open the
    link's breaker, before what is on the line is overdue. Nobody's request fails, and the line is used again when it
    carries again."""
    plan = Plan(model_dir=model_dir("cost_model"), threshold_tokens=500, wan=Wan(mbit=400, rtt_ms=10), rebalance=False)
    async with start_embedded(plan) as cluster:
        line = cluster.metrics["wan-relay"].removesuffix("/metrics")
        async with loaded(cluster, alone("cost_model"), PREFILLS, per_s=6) as load:

            async def remote() -> bool:
                """the latest request was prefilled far away"""
                return bool(load.done) and load.done[max(load.done)].receipt["path"] == "remote"

            async def noticed() -> bool:
                """the reports have opened the breaker of the link"""
                samples = await metrics(cluster, "router")
                return total(samples, "prfaas_router_breakers_opened_total", around="link", cause="stalled") > 0

            async def kept_here() -> bool:
                """what has come since is prefilled here"""
                since = [one for number, one in load.done.items() if number > sent]
                return any(one.receipt["reason"] == "breaker_open" for one in since)

            await eventually(remote)
            assert not await noticed()
            await asyncio.to_thread(ask, "POST", f"{line}/cut?seconds=60")
            await eventually(noticed)
            samples = await metrics(cluster, "router")
            assert total(samples, "prfaas_router_breakers_opened_total", around="link", cause="slow") == 0
            sent = max(load.sent)
            await eventually(kept_here)
            await asyncio.to_thread(ask, "POST", f"{line}/mend")
            sent = max(load.sent)
            await eventually(remote, seconds=60)
        await eventually(lambda: at_rest(cluster))


async def test_a_flip_under_load_loses_and_repeats_nothing(start: StartCluster, model_dir: ModelDir, alone: Reference):
    """A node that decodes finishes its streams, prefills for a while, and decodes again, with requests coming in."""
    plan = Plan(
        model_dir=model_dir("cost_model"),
        threshold_tokens=100_000,
        pd_roles=("mixed", "decode", "decode"),
        rebalance=False,
        admin_key=KEY,
    )
    async with start(plan) as cluster:
        async with loaded(cluster, alone("cost_model"), STREAMS, per_s=8) as load:
            served = 0
            for wanted in ("prefill", "decode", "mixed", "prefill", "decode"):
                epoch = json.loads(await admin(cluster, "POST", "workers/decode-1/flip", {"role": wanted}))["epoch"]

                async def flipped(wanted: str = wanted, epoch: int = epoch, served: int = served) -> bool:
                    """the node serves in its new role, and requests are answered"""
                    samples = await metrics(cluster, "decode-1")
                    done = total(samples, "prfaas_worker_phase", phase="serving") == 1
                    carried_out = total(samples, "prfaas_worker_plan_epoch") == epoch
                    return (
                        done and carried_out and await role(cluster, "decode-1") == wanted and len(load.done) > served
                    )

                await eventually(flipped)
                served = len(load.done) + 10
        assert total(await metrics(cluster, "decode-1"), "prfaas_worker_role_changes_total") == 5
        assert any(one.receipt["prefill"] == "decode-1" != one.receipt["decode"] for one in load.done.values())
        await eventually(lambda: at_rest(cluster))


async def test_a_shift_of_demand_flips_a_node_under_load(
    start_embedded: StartCluster, model_dir: ModelDir, alone: Reference
):
    """Long outputs want two nodes that decode. Then come long prompts and short outputs: the leader makes one of them
    prefill, while requests come in, and none is lost or repeated."""
    options = ("--demand-half-life-s", "10", "--role-dwell-s", "4", "--role-warm-up-s", "2", "--report-s", "0.5")
    plan = Plan(
        model_dir=model_dir("cost_model"),
        threshold_tokens=5000,
        pd_roles=("prefill", "decode", "decode"),
        slow_period_s=2,
        admin_key=KEY,
        extra={"router": options},
    )
    async with start_embedded(plan) as cluster:
        async with loaded(cluster, alone("cost_model"), STREAMS, per_s=12) as load:

            async def planned_for() -> bool:
                """the leader has seen enough, and holds on to the roles"""
                state = json.loads(await admin(cluster, "GET", "scheduler"))
                last = state["last_round"] or {"outcome": None}
                return state["leads"] and (last["outcome"] == "proposal" or last.get("reason") == "hysteresis")

            await eventually(planned_for, seconds=60)
            assert await prefilling(cluster) == 1
            await load.now(PREFILLS)

            async def shifted() -> bool:
                """two of the three prefill"""
                return await prefilling(cluster) == 2

            await eventually(shifted, seconds=60)
            more = len(load.sent) + 20
            await eventually(lambda: served(load, more))
        assert sum([total(await metrics(cluster, node), "prfaas_worker_role_changes_total") for node in PD3]) == 1
        await eventually(lambda: at_rest(cluster))


async def test_a_stale_leaders_plan_is_refused(start: StartCluster, model_dir: ModelDir):
    """A plan of an old epoch changes nothing, whether its maker respects what is in the store or overwrites it, and the
    cluster goes on to the next plan."""
    plan = Plan(model_dir=model_dir("cost_model"), admin_key=KEY, threshold_tokens=700, rebalance=False)
    async with start(plan) as cluster, store_of(cluster) as store:
        for wanted in ("decode", "mixed", "decode"):
            await admin(cluster, "POST", "workers/decode-0/flip", {"role": wanted})
            await eventually(lambda wanted=wanted: has_role(cluster, "decode-0", wanted))
        stale = RolePlan(2, 5, {NodeId("decode-0"): 1.0, NodeId("decode-1"): 1.0}, "from a leader of the past")
        with pytest.raises(StaleEpoch) as refused:
            await publish_plan(store, cluster.plan.cluster, stale, "stale")
        assert (refused.value.seen, refused.value.current) == (2, 3)
        await store.put(plan_key(cluster.plan.cluster), readable(PlanRecord.of(stale, "stale")))

        async def refused_by_all() -> bool:
            """both PD nodes and the router have refused it"""
            counts = [total(await metrics(cluster, node), "prfaas_worker_refused_plans_total") for node in PD]
            state = json.loads(await admin(cluster, "GET", "scheduler"))
            return min(counts) >= 1 and state["refused_plans"] >= 1

        await eventually(refused_by_all)
        assert [await role(cluster, node) for node in PD] == ["decode", "mixed"]
        assert await threshold(cluster) == 700
        told = json.loads(await admin(cluster, "POST", "workers/decode-0/flip", {"role": "mixed"}))
        assert told["epoch"] == 4
        await eventually(lambda: has_role(cluster, "decode-0", "mixed"))


@pytest.mark.parametrize("empty", [False, True], ids=["with its data", "empty"])
@pytest.mark.parametrize("kind", [pytest.param("embedded", marks=pytest.mark.slow), "etcd"])
async def test_field_K1_the_plan_outlives_the_store(
    kind: str, empty: bool, tmp_path: Path, model_dir: ModelDir, alone: Reference
):
    """While the store is away everything is served and no role changes; when it is back, even empty, the plan is there
    under an epoch that all accept, and the next one is obeyed."""
    async with a_store(kind, tmp_path) as (backend, endpoint):
        plan = Plan(
            model_dir=model_dir("cost_model"),
            etcd=(endpoint,),
            admin_key=KEY,
            slow_period_s=3600,
            threshold_tokens=700,
            log_dir=tmp_path / "logs",
        )
        async with local_cluster(plan) as cluster:
            await eventually(lambda: leads(cluster))
            await admin(cluster, "POST", "workers/decode-0/flip", {"role": "decode"})
            await eventually(lambda: has_role(cluster, "decode-0", "decode"))
            await backend.stop()
            if empty:
                await backend.lose_data()
            async with loaded(cluster, alone("cost_model"), STREAMS, per_s=5) as load:
                await eventually(lambda: served(load, 10))
            assert [await role(cluster, node) for node in PD] == ["decode", "mixed"]
            await backend.start()

            async with store_of(cluster) as store:

                async def in_force() -> bool:
                    """the store has the plan"""
                    entry = await store.get(plan_key(cluster.plan.cluster))
                    record = read(PlanRecord, entry.value) if entry else None
                    return record is not None and record.shares["decode-0"] == 0.0 and record.epoch == 1 + empty

                await eventually(in_force, seconds=60)
            assert [await role(cluster, node) for node in PD] == ["decode", "mixed"]
            await admin(cluster, "POST", "workers/decode-0/flip", {"role": "mixed"})
            await eventually(lambda: has_role(cluster, "decode-0", "mixed"))


PD = ("decode-0", "decode-1")
PD3 = (*PD, "decode-2")


async def has_role(cluster: LocalCluster, node: str, wanted: str) -> bool:
    """the node has the role"""
    return await role(cluster, node) == wanted


async def prefilling(cluster: LocalCluster) -> int:
    return [await role(cluster, node) for node in PD3].count("prefill")


async def leads(cluster: LocalCluster) -> bool:
    """the router leads"""
    return total(await metrics(cluster, "router"), "prfaas_router_leads") == 1


async def served(load: Load, count: int) -> bool:
    """so many requests have been answered"""
    return len(load.done) >= count


@asynccontextmanager
async def store_of(cluster: LocalCluster) -> AsyncIterator[EtcdStore]:
    store = EtcdStore(cluster.store_endpoints)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def a_store(kind: str, directory: Path) -> AsyncIterator[tuple[Backend, str]]:
    """A store that the test can stop, start and empty, and its endpoint."""
    if kind == "embedded":
        embedded = Embedded()
        await embedded.start()
        backend, endpoint = embedded, f"127.0.0.1:{embedded.server.port}"
    else:
        backend = RealEtcd(await asyncio.to_thread(start_etcd, directory / "etcd"))
        endpoint = backend.etcd.endpoint
    try:
        yield backend, endpoint
    finally:
        await backend.close()
