"""A worker's registration and a router's view of it, over the embedded server, through everything the store may do."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from prfaas.cluster import ClusterView, Incarnation, Namespace, Node, NodeId, NodeKind, NodeLoad, Pool, RegionId, Role
from prfaas.errors import DeadlineExceeded
from prfaas.membership.etcd import EtcdStore
from prfaas.membership.follow import ClusterFollower
from prfaas.membership.memory import MemoryStore
from prfaas.membership.records import Kind, Measured, key_of, read_node, read_telemetry
from prfaas.membership.registration import NodeReplaced, Registration
from prfaas.membership.server import EmbeddedStoreServer
from prfaas.membership.store import Entry, Put

PD = RegionId("pd")
LIMIT_S = 15.0
INTERVAL_S = 0.05


class Cluster:
    """A store server with one follower, and workers that register with it."""

    def __init__(self) -> None:
        self.memory = MemoryStore()
        self.server = EmbeddedStoreServer(self.memory, "127.0.0.1", 0)

    async def stop_server(self) -> None:
        await self.server.stop()

    async def start_server(self, *, empty: bool = False) -> None:
        if empty:
            self.memory = MemoryStore()
            self.server = EmbeddedStoreServer(self.memory, "127.0.0.1", self.server.port)
        await self.server.start()

    async def forget_leases(self) -> None:
        """As after an outage longer than every lease."""
        with self.memory.open() as data:
            data.expire(float("inf"))

    async def entry(self, kind: Kind, node: str) -> Entry | None:
        return await self.memory.get(key_of("c", kind, node))

    def puts(self, kind: Kind, node: str) -> list[Entry]:
        """Every value the key has had."""
        key = key_of("c", kind, node)
        with self.memory.open() as data:
            return [event.entry for event in data.changes(lambda other: other == key, 1) if isinstance(event, Put)]

    async def incarnation(self, node: str) -> str | None:
        entry = await self.entry(Kind.NODE, node)
        record = read_node(NodeId(node), entry.value) if entry else None
        return record.incarnation if record else None


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    await cluster.start_server()
    yield cluster
    await cluster.stop_server()


@asynccontextmanager
async def a_store(cluster: Cluster) -> AsyncIterator[EtcdStore]:
    store = EtcdStore([cluster.server.endpoint])
    yield store
    await store.close()


@asynccontextmanager
async def following(cluster: Cluster, grace_s: float = 30.0) -> AsyncIterator[ClusterFollower]:
    async with a_store(cluster) as store:
        follower = ClusterFollower(store, "c", PD, grace_s=grace_s)
        task = asyncio.create_task(follower.run(), name="follower")
        try:
            yield follower
        finally:
            await ended(task)


@asynccontextmanager
async def registered(
    cluster: Cluster,
    node: Node,
    measure: Callable[[], Measured] = lambda: Measured(NodeLoad()),
    interval_s: float = INTERVAL_S,
    lease_ttl_s: float = 30.0,
) -> AsyncIterator[tuple[Registration, asyncio.Task[None]]]:
    async with a_store(cluster) as store:
        registration = Registration(store, "c", node, measure, lease_ttl_s=lease_ttl_s, interval_s=interval_s)
        task = asyncio.create_task(registration.run(), name=f"registration-{node.id}")
        try:
            await registration.wait_published(LIMIT_S)
            yield registration, task
        finally:
            await ended(task)


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError, NodeReplaced):
        await task


def a_node(name: str, role: Role = Role.DECODE, incarnation: int = 1) -> Node:
    return Node(
        id=NodeId(name),
        region=PD,
        kind=NodeKind.PD,
        role=role,
        incarnation=Incarnation(incarnation),
        namespace=Namespace("ns"),
        model="tiny",
        rpc_address=f"{name}:1",
        max_context_tokens=4096,
    )


def decodes(*names: str) -> Callable[[ClusterView], bool]:
    return lambda view: view.decode == names


async def until(condition: Callable[[], bool]) -> None:
    """For what has no event of its own: time that must pass, or what a test itself counts."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + LIMIT_S
    while not condition():
        assert loop.time() < deadline, "the condition did not come true"
        await asyncio.sleep(0.005)


async def test_a_worker_appears_with_its_load_changes_role_and_leaves_at_once(cluster: Cluster):
    """Registered means seen; a stop removes both keys without waiting for the lease."""
    running = 3
    async with following(cluster) as router:
        assert router.age_s() == float("inf") and router.view() == ClusterView()
        async with registered(cluster, a_node("d"), lambda: Measured(NodeLoad(active_sequences=running))) as (
            worker,
            task,
        ):
            seen = await router.wait_for(
                lambda view: NodeId("d") in view.nodes and view.nodes[NodeId("d")].load.active_sequences == 3, LIMIT_S
            )
            assert seen.decode == ("d",)
            running = 4
            await router.wait_for(lambda view: view.nodes[NodeId("d")].load.active_sequences == 4, LIMIT_S)
            worker.update(Role.PREFILL)
            await worker.wait_published(LIMIT_S)
            await router.wait_for(lambda view: view.local_prefill == ("d",) and not view.decode, LIMIT_S)
            assert router.age_s() < LIMIT_S
            worker.stop()
            await router.wait_for(lambda view: not view.nodes, LIMIT_S)
            await task
        assert await cluster.entry(Kind.NODE, "d") is None and await cluster.entry(Kind.TELEMETRY, "d") is None


async def test_telemetry_is_numbered_one_key_and_at_most_one_put_per_interval(cluster: Cluster):
    """Whatever else happens, the store gets no more than a report per interval from a node."""
    interval_s = 0.1
    loop = asyncio.get_running_loop()
    begin = loop.time()
    async with registered(cluster, a_node("d"), interval_s=interval_s) as (worker, _):
        for turn in range(10):
            worker.update(Role.PREFILL if turn % 2 == 0 else Role.DECODE)
            await worker.wait_published(LIMIT_S)
        await until(lambda: len(cluster.puts(Kind.TELEMETRY, "d")) >= 3)
        elapsed_s = loop.time() - begin
        reports = [read_telemetry(entry.value) for entry in cluster.puts(Kind.TELEMETRY, "d")]
    assert len(cluster.puts(Kind.NODE, "d")) == 11
    assert [report.seq for report in reports if report] == list(range(1, len(reports) + 1))
    assert len(reports) <= elapsed_s / interval_s + 1


async def test_field_K1_an_outage_of_the_store_changes_nothing_and_ends_by_itself(cluster: Cluster):
    """The view stands while the store is gone; afterwards the same incarnation goes on under the same lease."""
    async with following(cluster) as router, registered(cluster, a_node("d", incarnation=7)) as (_, task):
        before = await router.wait_for(decodes("d"), LIMIT_S)
        entry = await cluster.entry(Kind.NODE, "d")
        await cluster.stop_server()
        await until(lambda: router.age_s() > 10 * INTERVAL_S)
        assert router.view().nodes[NodeId("d")].incarnation == before.nodes[NodeId("d")].incarnation == 7
        assert not task.done()
        await cluster.start_server()
        await until(lambda: router.age_s() < 5 * INTERVAL_S)
        assert await cluster.entry(Kind.NODE, "d") == entry


async def test_field_K1_a_lost_lease_is_granted_again_and_its_keys_put_again(cluster: Cluster):
    """After an outage longer than the lease the same incarnation is back, under another lease."""
    async with following(cluster) as router, registered(cluster, a_node("d", incarnation=7)) as (worker, _):
        await router.wait_for(decodes("d"), LIMIT_S)
        first = await cluster.entry(Kind.NODE, "d")
        await cluster.stop_server()
        await cluster.forget_leases()
        assert await cluster.entry(Kind.NODE, "d") is None
        await cluster.start_server()
        await until(lambda: len(cluster.puts(Kind.NODE, "d")) == 2)
        second = await cluster.entry(Kind.NODE, "d")
        assert first is not None and second is not None
        assert second.value == first.value and second.lease not in (None, first.lease)
        await worker.wait_published(LIMIT_S)
        heard_at = time.monotonic() - router.age_s()
        await until(lambda: time.monotonic() - router.age_s() > heard_at + INTERVAL_S / 5)
        await router.wait_for(decodes("d"), LIMIT_S)


async def test_field_K1_a_store_that_comes_back_empty_never_empties_the_view(cluster: Cluster):
    """All workers register again with their incarnations, and no view in between lacks one of them."""
    async with (
        following(cluster) as router,
        registered(cluster, a_node("d0", incarnation=7)),
        registered(cluster, a_node("d1", incarnation=8)),
    ):
        await router.wait_for(decodes("d0", "d1"), LIMIT_S)
        views: list[ClusterView] = []
        recorder = asyncio.create_task(
            router.wait_for(lambda view: views.append(view) or False, 4 * LIMIT_S)  # type: ignore[func-returns-value]
        )
        await cluster.stop_server()
        await cluster.start_server(empty=True)
        await until(lambda: bool(cluster.puts(Kind.TELEMETRY, "d0") and cluster.puts(Kind.TELEMETRY, "d1")))
        assert await cluster.incarnation("d0") == f"{7:016x}" and await cluster.incarnation("d1") == f"{8:016x}"
        registered_again = len(views)
        await until(lambda: len(views) > registered_again + 3)
        recorder.cancel()
        assert all(set(view.nodes) == {"d0", "d1"} for view in views)


async def test_a_node_that_does_not_return_to_an_empty_store_leaves_after_the_grace(cluster: Cluster):
    """Who died with the store is gone once there was time to come back."""
    async with following(cluster, grace_s=0.5) as router:
        async with registered(cluster, a_node("d")):
            await router.wait_for(decodes("d"), LIMIT_S)
            await cluster.stop_server()
        assert set(router.view().nodes) == {"d"}
        await cluster.start_server(empty=True)
        await router.wait_for(lambda view: not view.nodes, LIMIT_S)


async def test_field_C3_a_restarted_worker_takes_over_its_id_at_once(cluster: Cluster):
    """No lease is waited for. The predecessor, still alive, notices at its next renewal, ends, and takes nothing
    along."""
    async with (
        following(cluster) as router,
        registered(cluster, a_node("d", incarnation=1), lease_ttl_s=1.0) as (_, old),
    ):
        await router.wait_for(decodes("d"), LIMIT_S)
        async with registered(cluster, a_node("d", incarnation=2)):
            await router.wait_for(lambda view: view.nodes[NodeId("d")].incarnation == 2, LIMIT_S)
            with pytest.raises(NodeReplaced) as replaced:
                async with asyncio.timeout(LIMIT_S):
                    await asyncio.shield(old)
            assert replaced.value.incarnation == f"{2:016x}"
            assert await cluster.incarnation("d") == f"{2:016x}"
            assert router.view().nodes[NodeId("d")].incarnation == 2


async def test_a_predecessor_whose_lease_was_lost_does_not_take_the_id_back(cluster: Cluster):
    """To register again is to look first who holds the id."""
    async with registered(cluster, a_node("d", incarnation=1)) as (_, old):
        await cluster.forget_leases()
        await cluster.memory.put(
            key_of("c", Kind.NODE, "d"),
            b'{"id":"d","region":"pd","kind":"pd","role":"decode","incarnation":"00000000000000aa","namespace":"ns",'
            b'"model":"tiny","rpc_address":"d:1","max_context_tokens":1}',
        )
        with pytest.raises(NodeReplaced):
            async with asyncio.timeout(LIMIT_S):
                await asyncio.shield(old)
        assert await cluster.incarnation("d") == "00000000000000aa"


async def test_a_record_deleted_by_hand_is_put_again(cluster: Cluster):
    """A slip of an operator does not cost a node until its restart."""
    async with registered(cluster, a_node("d"), lease_ttl_s=1.0):
        await cluster.memory.delete(key_of("c", Kind.NODE, "d"))
        await until(lambda: len(cluster.puts(Kind.NODE, "d")) == 2)
        assert await cluster.incarnation("d") == f"{1:016x}"


async def test_field_K2_a_worker_that_dies_leaves_with_its_lease_and_a_living_one_never_does(cluster: Cluster):
    """One renewer per node keeps even a short lease; the keys of the dead go with theirs."""
    async with following(cluster) as router, registered(cluster, a_node("lives"), lease_ttl_s=1.0):
        lease = await cluster.memory.grant(2)
        entry = await cluster.entry(Kind.NODE, "lives")
        assert entry is not None
        await cluster.memory.put(
            key_of("c", Kind.NODE, "dies"), entry.value.replace(b'"id":"lives"', b'"id":"dies"'), lease
        )
        await router.wait_for(lambda view: set(view.nodes) == {"lives", "dies"}, LIMIT_S)
        await router.wait_for(lambda view: set(view.nodes) == {"lives"}, LIMIT_S)
        assert await cluster.entry(Kind.NODE, "lives") == entry


async def test_registering_while_the_store_is_away_waits_for_it(cluster: Cluster):
    """A worker may start before the store; it is in the view soon after the store is there."""
    await cluster.stop_server()
    async with following(cluster) as router, a_store(cluster) as store:
        worker = Registration(store, "c", a_node("d"), lambda: Measured(NodeLoad()), interval_s=INTERVAL_S)
        task = asyncio.create_task(worker.run())
        with pytest.raises(DeadlineExceeded):
            await worker.wait_published(0.3)
        await cluster.start_server()
        await router.wait_for(decodes("d"), LIMIT_S)
        await ended(task)


async def test_waiting_for_a_view_ends_with_the_deadline(cluster: Cluster):
    """A cluster that does not come together is an error with its name, not a hang."""
    async with following(cluster) as router:
        with pytest.raises(DeadlineExceeded):
            await router.wait_for(decodes("never"), 0.1)


async def test_a_shard_of_the_cache_registers_like_a_worker(cluster: Cluster):
    """It is in the view while it lives, over an outage that outlasts its lease as well, and gone when it leaves."""
    pool = Pool(
        id=NodeId("c0"),
        region=PD,
        incarnation=Incarnation(7),
        namespace=Namespace("ns"),
        rpc_address="c0:1",
        capacity_bytes=1 << 30,
    )
    async with following(cluster) as router, a_store(cluster) as store:
        registration = Registration(store, "c", pool, interval_s=INTERVAL_S, lease_ttl_s=1.0)
        task = asyncio.create_task(registration.run(), name="registration-c0")
        try:
            await registration.wait_published(LIMIT_S)
            view = await router.wait_for(lambda view: bool(view.pools), LIMIT_S)
            assert (dict(view.pools), dict(view.nodes)) == ({pool.id: pool}, {})
            await cluster.forget_leases()
            await router.wait_for(lambda view: not view.pools, LIMIT_S)
            await router.wait_for(lambda view: view.pools.get(pool.id) == pool, LIMIT_S)
            assert await cluster.entry(Kind.TELEMETRY, "c0") is None
        finally:
            await ended(task)
        await router.wait_for(lambda view: not view.pools, LIMIT_S)


async def test_a_shard_that_was_taken_over_ends(cluster: Cluster):
    """As a worker does: one id, one life."""
    first = Pool(id=NodeId("c0"), region=PD, incarnation=Incarnation(7), namespace=Namespace("ns"), rpc_address="c0:1")
    async with a_store(cluster) as store, a_store(cluster) as other:
        old = Registration(store, "c", first, interval_s=INTERVAL_S, lease_ttl_s=1.0)
        task = asyncio.create_task(old.run(), name="registration-c0")
        await old.wait_published(LIMIT_S)
        new = Registration(other, "c", replace(first, incarnation=Incarnation(8)), interval_s=INTERVAL_S)
        again = asyncio.create_task(new.run(), name="registration-c0 again")
        try:
            with pytest.raises(NodeReplaced):
                await asyncio.wait_for(task, LIMIT_S)
        finally:
            await ended(again)
