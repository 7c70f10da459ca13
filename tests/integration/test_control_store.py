"""Leaders, plans and what routers announce, over a store whose server may go away and come back."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from prfaas.cluster import Incarnation, Namespace, Node, NodeId, NodeKind, Plan, RegionId, Role
from prfaas.errors import PeerUnavailable, StaleEpoch
from prfaas.membership import direct
from prfaas.membership.announce import Announcement
from prfaas.membership.election import Election
from prfaas.membership.etcd import EtcdStore
from prfaas.membership.follow_plan import PlanFollower
from prfaas.membership.memory import MemoryStore
from prfaas.membership.plans import (
    LeaderRecord,
    PinRecord,
    PlanRecord,
    RouterRecord,
    leader_key,
    plan_key,
    read,
    routers_prefix,
)
from prfaas.membership.server import EmbeddedStoreServer
from prfaas.membership.store import Store

LIMIT_S = 20.0
PLAN = Plan(1, 500, {NodeId("d0"): 1.0}, "because")


class Place:
    """An embedded store and clients of it."""

    def __init__(self) -> None:
        self.memory = MemoryStore()
        self.server = EmbeddedStoreServer(self.memory, "127.0.0.1", 0)
        self.clients: list[EtcdStore] = []

    def client(self) -> EtcdStore:
        self.clients.append(EtcdStore([f"127.0.0.1:{self.server.port}"]))
        return self.clients[-1]

    async def come_back_empty(self) -> None:
        port = self.server.port
        await self.server.stop()
        self.memory = MemoryStore()
        self.server = EmbeddedStoreServer(self.memory, "127.0.0.1", port)
        await self.server.start()


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    made = Place()
    await made.server.start()
    yield made
    for client in made.clients:
        await client.close()
    await made.server.stop()


@asynccontextmanager
async def candidate(store: Store, name: str, epoch: int = 0) -> AsyncIterator[Election]:
    election = Election(store, "c", name, lambda: epoch, lease_ttl_s=2.0)
    task = asyncio.create_task(election.run())
    try:
        yield election
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - another task's state
            await asyncio.sleep(0.01)


async def test_one_of_two_leads_and_the_other_follows_when_it_leaves(place: Place):
    """A leader that stops gives the lead up at once, and its record says since when it led."""
    async with candidate(place.client(), "r1", epoch=5) as second:
        async with candidate(place.client(), "r0", epoch=4) as first:
            await until(lambda: first.leads or second.leads)
            assert first.leads is not second.leads
            entry = await place.memory.get(leader_key("c"))
            record = read(LeaderRecord, entry.value) if entry else None
            assert record == (
                LeaderRecord(router="r0", since_epoch=4) if first.leads else LeaderRecord(router="r1", since_epoch=5)
            )
        await until(lambda: second.leads)
        assert not first.leads


async def test_a_leader_without_a_store_stops_leading_when_its_lease_is_over(place: Place):
    """No later than the store would let another one lead."""
    async with candidate(place.client(), "r0") as election:
        await until(lambda: election.leads)
        await place.server.stop()
        await until(lambda: not election.leads)
        await place.server.start()
        await until(lambda: election.leads)


async def test_field_K1_a_store_that_comes_back_empty_elects_again(place: Place):
    """Somebody leads, and not two."""
    async with candidate(place.client(), "r0") as first, candidate(place.client(), "r1") as second:
        await until(lambda: first.leads or second.leads)
        await place.come_back_empty()

        def held() -> bool:
            with place.memory.open() as data:
                return bool(data.select(lambda key: key == leader_key("c")))

        await until(held)
        await until(lambda: first.leads is not second.leads)


async def test_a_plan_is_compared_by_its_epoch(place: Place):
    """The first of an epoch is in force; one of the same or of an earlier epoch is refused with both epochs."""
    store = place.client()
    await direct.publish_plan(store, "c", PLAN, "r0")
    for late in (Plan(1, 9), PLAN):
        with pytest.raises(StaleEpoch) as refused:
            await direct.publish_plan(store, "c", late, "r1")
        assert (refused.value.seen, refused.value.current) == (1, 1)
    await direct.publish_plan(store, "c", Plan(4, 700), "r1")
    entry = await store.get(plan_key("c"))
    assert entry is not None and read(PlanRecord, entry.value) == PlanRecord(
        epoch=4, threshold_tokens=700, made_by="r1"
    )


async def test_of_many_that_publish_at_once_one_wins(place: Place):
    """The others are told, and what is there is one of theirs, whole."""
    stores = [place.client() for _ in range(4)]
    plans = [Plan(2, 100 + number) for number in range(4)]
    outcomes = await asyncio.gather(
        *(
            direct.publish_plan(store, "c", plan, str(plan.threshold_tokens))
            for store, plan in zip(stores, plans, strict=True)
        ),
        return_exceptions=True,
    )
    assert outcomes.count(None) == 1
    assert all(outcome is None or isinstance(outcome, StaleEpoch | PeerUnavailable) for outcome in outcomes)
    entry = await stores[0].get(plan_key("c"))
    record = read(PlanRecord, entry.value) if entry else None
    assert record is not None and record.threshold_tokens == 100 + outcomes.index(None)


async def test_a_worker_follows_the_plan_and_keeps_it_without_a_store(place: Place):
    """The plan there is, then each other one; an outage, also with the data gone, takes none away."""
    store, held = place.client(), []
    follower = PlanFollower(place.client(), "c", NodeId("d0"), Incarnation(7), held.append)
    task = asyncio.create_task(follower.run())
    try:
        async with asyncio.timeout(LIMIT_S):
            await direct.publish_plan(store, "c", PLAN, "r0")
            assert await follower.plan_other_than(None) == PLAN
            await store.put(plan_key("c") + "-of-another-kind", b"{}")
            await place.come_back_empty()
            waiting = asyncio.create_task(follower.plan_other_than(PLAN))
            await direct.publish_plan(store, "c", Plan(2, 1), "r0")
            assert await waiting == Plan(2, 1)
            assert await follower.plan_other_than(None) == Plan(2, 1)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_worker_obeys_a_drain_of_its_own_life_only(place: Place):
    """And takes work again when it is taken back."""
    store, held, other_held = place.client(), list[bool](), list[bool]()
    node = Node(
        id=NodeId("d0"),
        region=RegionId("b"),
        kind=NodeKind.PD,
        role=Role.MIXED,
        incarnation=Incarnation(7),
        namespace=Namespace("n"),
        model="m",
        rpc_address="",
        max_context_tokens=1,
    )
    lives = {node.incarnation: held, Incarnation(8): other_held}
    followers = [PlanFollower(place.client(), "c", node.id, life, told.append) for life, told in lives.items()]
    tasks = [asyncio.create_task(follower.run()) for follower in followers]
    try:
        await until(lambda: bool(held) and bool(other_held))
        await direct.drain(store, "c", node, "r0")
        await until(lambda: bool(held) and held[-1])
        await direct.undrain(store, "c", "d0")
        await until(lambda: not held[-1])
        await until(lambda: len(other_held) >= 3)
        assert not any(other_held)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_pins_that_are_made_at_once_keep_each_other(place: Place):
    """One pins the threshold, one the mode: both are pinned, whoever was first."""
    records = (PinRecord(threshold_tokens=100, made_by="r0"), PinRecord(mode="always", made_by="r1"))
    await asyncio.gather(*(direct.pin(place.client(), "c", record) for record in records))
    store = place.client()
    pinned = await direct.pin(store, "c", PinRecord(threshold_tokens=70, made_by="r2"))
    assert pinned == PinRecord(threshold_tokens=70, mode="always", made_by="r2")
    await direct.unpin(store, "c")
    assert await direct.pin(store, "c", records[0]) == records[0]


async def test_a_router_is_announced_while_it_lives(place: Place):
    """With a number that rises, also after the store came back empty; and it is gone when it stops."""

    def describe(seq: int) -> RouterRecord:
        return RouterRecord(router="r0", arrivals_per_s=1.0, seq=seq)

    announcement = Announcement(place.client(), "c", "r0", describe, interval_s=0.05)
    task = asyncio.create_task(announcement.run())

    def announced() -> int:
        with place.memory.open() as data:
            entries = data.select(lambda key: key == routers_prefix("c") + "r0")
        record = read(RouterRecord, entries[0].value) if entries else None
        return record.seq if record is not None else 0

    await until(lambda: announced() >= 3)
    before = announced()
    await place.come_back_empty()
    await until(lambda: announced() > before)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert announced() == 0
