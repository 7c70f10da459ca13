"""Two routers that both believe they lead, each with a view of its own of one store: harmless, because of epochs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Never

from prfaas.cluster import Incarnation, NodeId, Plan, RegionId
from prfaas.flows.control import ControlParams, slow_loop
from prfaas.live.control_ports import LiveControlPorts
from prfaas.live.steering import Steering
from prfaas.membership.election import Election
from prfaas.membership.etcd import EtcdStore
from prfaas.membership.follow import ClusterFollower
from prfaas.membership.follow_plan import PlanFollower
from prfaas.membership.memory import MemoryStore
from prfaas.membership.plans import PlanRecord, plan_key, read
from prfaas.membership.server import EmbeddedStoreServer
from prfaas.membership.store import Put
from prfaas.scheduling.congestion import LinkEstimator
from prfaas.scheduling.demand import DemandParams
from prfaas.scheduling.rebalance import RebalanceParams, Rebalancer
from prfaas.scheduling.rule import RoutingParams

LIMIT_S = 20.0
PD = RegionId("b")
PLANS = 40
#: Of both loops, in which they might do harm.
ROUNDS = 5
#: They never come to make a plan of their own.
PARAMS = ControlParams(model="m", pd_region=PD, threshold_tokens=700, report_s=0.02, slow_period_s=3600.0)


class SureOfItself(Election):
    """A leader that never hears of another. `asked` counts how often it was asked whether it leads."""

    asked = 0

    @property
    def leads(self) -> bool:
        self.asked += 1
        return True


class Leader:
    def __init__(self, store: EtcdStore, name: str) -> None:
        self.store, self.name = store, name
        self.follower = ClusterFollower(store, "c", PD)
        steering = Steering(PD, RoutingParams(threshold_tokens=700), 0.0, DemandParams())
        self.election = SureOfItself(store, "c", name, lambda: self.follower.view().highest_epoch)
        self.ports = LiveControlPorts(store, "c", name, self.follower, self.election, steering, "auto")
        self.refused = 0

    async def plan(self, made: list[tuple[int, str]]) -> None:
        """One after the other, each under the epoch that follows what this router knows."""
        while self.follower.view().highest_epoch < PLANS:
            epoch = self.follower.view().highest_epoch + 1
            if await self.ports.publish(Plan(epoch, 700, {NodeId("d0"): 1.0}, self.name)):
                made.append((epoch, self.name))
            else:
                self.refused += 1
            await self.follower.wait_for(lambda view, epoch=epoch: view.highest_epoch >= epoch, LIMIT_S)  # type: ignore[misc]

    def steer(self) -> "asyncio.Task[Never]":
        return asyncio.create_task(slow_loop(self.ports, LinkEstimator(), Rebalancer(RebalanceParams()), PARAMS))


class Place:
    def __init__(self) -> None:
        self.memory = MemoryStore()
        self.server = EmbeddedStoreServer(self.memory, "127.0.0.1", 0)

    async def come_back_empty(self) -> None:
        port = self.server.port
        await self.server.stop()
        self.memory = MemoryStore()
        self.server = EmbeddedStoreServer(self.memory, "127.0.0.1", port)
        await self.server.start()

    def plans(self) -> list[PlanRecord]:
        """All that the store has had, in order."""
        with self.memory.open() as data:
            puts = [event for event in data.changes(lambda key: key == plan_key("c"), 1) if isinstance(event, Put)]
        return [record for put in puts if (record := read(PlanRecord, put.entry.value)) is not None]


@asynccontextmanager
async def two_leaders() -> AsyncIterator[tuple[Place, list[Leader], PlanFollower]]:
    """And a worker that obeys."""
    place = Place()
    await place.server.start()
    stores = [EtcdStore([f"127.0.0.1:{place.server.port}"]) for _ in range(3)]
    leaders = [Leader(store, f"r{number}") for number, store in enumerate(stores[:2])]
    worker = PlanFollower(stores[2], "c", NodeId("d0"), Incarnation(7), lambda held: None)
    tasks = [asyncio.create_task(each.run()) for each in (*(leader.follower for leader in leaders), worker)]
    try:
        yield place, leaders, worker
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for store in stores:
            await store.close()
        await place.server.stop()


async def more_rounds(leaders: list[Leader]) -> None:
    asked = [leader.election.asked for leader in leaders]
    while any(one.election.asked < before + ROUNDS for one, before in zip(leaders, asked, strict=True)):  # noqa: ASYNC110
        await asyncio.sleep(PARAMS.report_s)


async def test_each_epoch_has_one_plan_and_one_maker():
    """However they race: who is second is refused, and makes the next one of what is in force then."""
    made: list[tuple[int, str]] = []
    async with two_leaders() as (place, leaders, worker), asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(leader.plan(made) for leader in leaders))
        last: Plan | None = None
        while last is None or last.epoch < PLANS:
            last = await worker.plan_other_than(last)
        in_store = [(record.epoch, record.made_by) for record in place.plans()]
    epochs = [epoch for epoch, _ in in_store]
    assert epochs == sorted(set(epochs)) and epochs[-1] == PLANS
    assert sorted(made) == in_store
    assert sum(leader.refused for leader in leaders) > 0, "they did not race"


async def test_field_K1_both_put_a_lost_plan_back_and_it_is_one():
    """The store comes back empty: each leader misses the plan. It is there again once, under a higher epoch."""
    async with two_leaders() as (place, leaders, worker), asyncio.timeout(LIMIT_S):
        wanted = Plan(3, 900, {NodeId("d0"): 1.0}, "as it was")
        assert await leaders[0].ports.publish(wanted)
        for leader in leaders:
            await leader.follower.wait_for(lambda view: view.highest_epoch == 3, LIMIT_S)
        steering = [leader.steer() for leader in leaders]
        try:
            await place.come_back_empty()
            assert await worker.plan_other_than(wanted) == Plan(4, 900, {NodeId("d0"): 1.0}, "as it was")
            for leader in leaders:
                await leader.follower.wait_for(lambda view: view.highest_epoch == 4, LIMIT_S)
            await more_rounds(leaders)
            assert [record.epoch for record in place.plans()] == [4]
        finally:
            for task in steering:
                task.cancel()
            await asyncio.gather(*steering, return_exceptions=True)
