"""Budgets over every store: what the leader writes is what the nodes obey, and nothing else."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from prfaas.cluster import Budget, NodeId, RegionId
from prfaas.errors import StaleEpoch
from prfaas.membership.budgets import BudgetRecord, BudgetWriter, budget_key
from prfaas.membership.follow_budget import BudgetFollower
from prfaas.membership.plans import read
from prfaas.membership.store import Store
from tests.contract.conftest import Backend

LIMIT_S = 20.0
A, B = RegionId("a"), RegionId("b")
P0, P1 = NodeId("p0"), NodeId("p1")
SPLIT = Budget(A, B, 900.0, {P0: 600.0, P1: 300.0})
ALONE = Budget(A, B, 900.0)


class Obeying:
    """What one node was told, last word first."""

    def __init__(self) -> None:
        self._told: asyncio.Queue[tuple[str, float | None]] = asyncio.Queue()

    def allow(self, region: str, bytes_per_s: float | None) -> None:
        self._told.put_nowait((region, bytes_per_s))

    async def next(self) -> tuple[str, float | None]:
        async with asyncio.timeout(LIMIT_S):
            return await self._told.get()

    @property
    def nothing_more(self) -> bool:
        return self._told.empty()


@asynccontextmanager
async def following(
    store: Store, node: NodeId, *, region: RegionId = A, lapse_s: float = 60.0
) -> AsyncIterator[Obeying]:
    obeying = Obeying()
    task = asyncio.create_task(BudgetFollower(store, "c", region, node, obeying.allow, lapse_s=lapse_s).run())
    try:
        yield obeying
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_each_node_obeys_its_own_part(store: Store):
    """One that is not named may send as much as all together. Each is told of changes only."""
    writer = BudgetWriter(store, "c", "r0")
    async with following(store, P0) as first, following(store, NodeId("p9")) as other:
        await writer.publish(SPLIT)
        assert await first.next() == ("b", 600.0)
        assert await other.next() == ("b", 900.0)
        await writer.publish(SPLIT)
        await writer.publish(ALONE)
        assert await first.next() == ("b", 900.0)
        await store.delete(budget_key("c", A, B))
        assert await first.next() == ("b", None)
        assert await other.next() == ("b", None)


async def test_budgets_of_other_pairs_are_not_meant(store: Store):
    """Another region's, and another target's, which counts by itself."""
    writer, elsewhere = BudgetWriter(store, "c", "r0"), RegionId("ab")
    async with following(store, P0) as first:
        await writer.publish(Budget(elsewhere, B, 1.0))
        await writer.publish(Budget(A, RegionId("c"), 70.0))
        await writer.publish(SPLIT)
        assert {await first.next(), await first.next()} == {("c", 70.0), ("b", 600.0)}
        assert first.nothing_more


async def test_a_budget_that_is_not_repeated_lapses(store: Store):
    """A leader that is gone holds nobody back; a repetition keeps the budget alive, a listing of the old one does not
    bring it back."""
    writer = BudgetWriter(store, "c", "r0")
    async with following(store, P0, lapse_s=1.0) as first:
        await writer.publish(SPLIT)
        assert await first.next() == ("b", 600.0)
        for _ in range(6):
            await asyncio.sleep(0.25)
            await writer.publish(SPLIT)
            assert first.nothing_more
        assert await first.next() == ("b", None)
        await writer.publish(SPLIT)
        assert await first.next() == ("b", 600.0)


async def test_a_late_leader_overwrites_nothing(store: Store):
    """It is told that somebody else has written, and the record stands; whoever still leads after that goes on."""
    late, successor = BudgetWriter(store, "c", "r0"), BudgetWriter(store, "c", "r1")
    await late.publish(SPLIT)
    with pytest.raises(StaleEpoch):
        await successor.publish(ALONE)
    await successor.publish(ALONE)
    with pytest.raises(StaleEpoch):
        await late.publish(SPLIT)
    entry = await store.get(budget_key("c", A, B))
    assert entry is not None
    assert read(BudgetRecord, entry.value) == BudgetRecord(epoch=2, bytes_per_s=900.0, made_by="r1")
    await successor.publish(SPLIT)


async def test_what_cannot_be_read_changes_nothing(store: Store):
    """No rate, no epoch, or an earlier one."""
    writer = BudgetWriter(store, "c", "r0")
    async with following(store, P0) as first:
        for _ in range(3):
            await writer.publish(SPLIT)
        assert await first.next() == ("b", 600.0)
        for value in (
            b"no json",
            b'{"epoch": 9, "bytes_per_s": -1}',
            b'{"bytes_per_s": 5}',
            b'{"epoch": 2, "bytes_per_s": 5}',
        ):
            await store.put(budget_key("c", A, B), value)
        await store.put(budget_key("c", A, RegionId("mark")), b'{"epoch": 1, "bytes_per_s": 7}')
        assert await first.next() == ("mark", 7.0)


async def test_an_outage_of_the_store_is_outlived_by_the_age_of_the_budget_alone(backend: Backend):
    """Nobody can repeat it meanwhile. What the store lists afterwards is no news, and the next repetition is."""
    writer = BudgetWriter(backend.store, "c", "r0")
    async with following(backend.store, P0, lapse_s=1.0) as first:
        await writer.publish(SPLIT)
        assert await first.next() == ("b", 600.0)
        await backend.stop()
        assert await first.next() == ("b", None)
        await backend.start()
        async with asyncio.timeout(LIMIT_S):
            assert await backend.store.get(budget_key("c", A, B)) is not None
        await writer.publish(ALONE)
        assert await first.next() == ("b", 900.0)
