"""The shard's feed: numbers without gaps, what was missed for who comes back, and an end for who does not read."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

import pytest

from prfaas.cluster import Incarnation, Namespace
from prfaas.kvcache.feed import Changes, Heartbeat, SnapshotBegin, SnapshotChunk, SnapshotEnd, Update
from prfaas.kvcache.prefix import Change, ChangeKind
from prfaas.node import pool_feed
from prfaas.node.pool_feed import MESSAGE_BYTES, WAITING_BYTES, Feed, SlowReader
from prfaas.rpc.cache import Watch
from prfaas.rpc.cache_updates import MAX_UPDATE_BYTES, pack_update

LIFE, OTHER = Incarnation(7), Incarnation(8)
LIVENESS_S = 10.0


def change(number: int, units: int = 1) -> Change:
    return Change(ChangeKind.KV_ADDED, number.to_bytes(16, "big") * units)


def feed(*pieces: tuple[Change, ...]) -> Feed:
    def snapshot(_nbytes: int) -> Iterator[tuple[Change, ...]]:
        return iter(pieces)

    return Feed(LIFE, Namespace("n"), snapshot)


async def take(updates: AsyncGenerator[Update, None], count: int) -> list[Update]:
    async with asyncio.timeout(LIVENESS_S):
        return [await anext(updates) for _ in range(count)]


async def test_who_knows_nothing_is_given_a_snapshot_and_then_what_changes():
    """What changes while the snapshot is being told follows behind it, with the next number."""
    told = feed((change(1),), (change(2),))
    told.publish([change(1)])
    told.publish([change(2)])
    async with aclosing(told.watch(Watch("r"))) as updates:
        [begin, first] = await take(updates, 2)
        told.publish([change(3)])
        [second, end, changes] = await take(updates, 3)
    assert begin.kind == SnapshotBegin(Namespace("n"))
    assert [first.kind, second.kind] == [SnapshotChunk(0, (change(1),)), SnapshotChunk(1, (change(2),))]
    assert end.kind == SnapshotEnd(2)
    assert {begin.seq, first.seq, second.seq, end.seq} == {2}
    assert (changes.seq, changes.kind) == (3, Changes((change(3),)))


async def test_who_was_there_goes_on_from_where_it_was():
    told = feed()
    for number in range(5):
        told.publish([change(number)])
    async with aclosing(told.watch(Watch("r", LIFE, 3))) as updates:
        missed = await take(updates, 2)
        told.publish([change(5)])
        [heard, after] = await take(updates, 2)
    assert [(each.seq, each.kind) for each in missed] == [(4, Changes((change(3),))), (5, Changes((change(4),)))]
    assert (heard.seq, heard.kind) == (5, Heartbeat())
    assert (after.seq, after.kind) == (6, Changes((change(5),)))
    async with aclosing(told.watch(Watch("r", LIFE, 6))) as updates:
        [heartbeat] = await take(updates, 1)
    assert (heartbeat.seq, heartbeat.kind) == (6, Heartbeat())


@pytest.mark.parametrize("known", [Watch("r", OTHER, 3), Watch("r", LIFE, 9)])
async def test_who_knows_another_life_or_the_future_begins_anew(known: Watch):
    told = feed()
    for number in range(5):
        told.publish([change(number)])
    async with aclosing(told.watch(known)) as updates:
        [first] = await take(updates, 1)
    assert isinstance(first.kind, SnapshotBegin)


async def test_what_is_not_kept_any_more_takes_a_snapshot(monkeypatch: pytest.MonkeyPatch):
    """What is kept for those who come back is bounded in bytes."""
    monkeypatch.setattr(pool_feed, "KEPT_BYTES", 1000)
    told = feed()
    for number in range(100):
        told.publish([change(number)])
    async with aclosing(told.watch(Watch("r", LIFE, 98))) as updates:
        assert isinstance((await take(updates, 1))[0].kind, Changes)
    async with aclosing(told.watch(Watch("r", LIFE, 10))) as updates:
        assert isinstance((await take(updates, 1))[0].kind, SnapshotBegin)


async def test_who_does_not_read_is_cut_off():
    """What waits for it does not grow without bound, and others go on."""
    told = feed()
    async with aclosing(told.watch(Watch("slow"))) as slow, aclosing(told.watch(Watch("quick"))) as quick:
        await take(slow, 2)
        await take(quick, 2)
        sent = 0
        while sent <= WAITING_BYTES:
            told.publish([change(1, units=128)])
            sent += 128 * 16
            await take(quick, 1)
        with pytest.raises(SlowReader):
            await take(slow, 1)
        told.publish([change(2)])
        assert (await take(quick, 1))[0].seq == told.seq
    assert told.watchers == 0 and told.cut_off == 1


async def test_messages_are_short_enough_for_the_wire():
    """However much changes at once, and however long its keys are."""
    told = feed()
    async with aclosing(told.watch(Watch("r"))) as updates:
        await take(updates, 2)
        many = [change(number, units=1 + number % 128) for number in range(1000)]
        told.publish(many)
        got: list[Change] = []
        while len(got) < len(many):
            [update] = await take(updates, 1)
            assert isinstance(update.kind, Changes)
            assert pack_update(update).ByteSize() <= MAX_UPDATE_BYTES
            assert sum(len(each.keys) for each in update.kind.changes) <= MESSAGE_BYTES + 2048
            got += update.kind.changes
    assert got == many


async def test_a_feed_that_closes_ends_its_watches():
    told = feed()
    async with aclosing(told.watch(Watch("r"))) as updates:
        await take(updates, 2)
        told.close()
        async with asyncio.timeout(LIVENESS_S):
            assert [each async for each in updates if not isinstance(each.kind, Heartbeat)] == []
