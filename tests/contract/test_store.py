"""The contract of `prfaas.membership.store.Store`, the same for every implementation."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from prfaas.membership.store import Batch, Deleted, Lease, LeaseExpired, Put, Resync, Store, StoreEvent
from tests.contract.conftest import Backend

LIMIT_S = 20.0
SHORT_TTL_S = 2


class Watched:
    """A watch and what it has delivered so far."""

    def __init__(self, batches: AsyncGenerator[Batch, None]) -> None:
        self._batches = batches
        self.events: list[StoreEvent] = []

    async def more(self) -> Batch:
        async with asyncio.timeout(LIMIT_S):
            batch = await anext(self._batches)
        assert batch, "a batch is never empty"
        self.events += batch
        return batch

    async def until(self, count: int) -> list[StoreEvent]:
        while len(self.events) < count:
            await self.more()
        return self.events


@asynccontextmanager
async def watching(store: Store, prefix: str) -> AsyncIterator[Watched]:
    async with aclosing(store.watch(prefix)) as batches:
        watched = Watched(batches)
        await watched.more()
        yield watched


def said(events: list[StoreEvent]) -> list[tuple[str, bytes | None]]:
    """Changes as (key, value or None)."""
    return [(event.entry.key, event.entry.value) if isinstance(event, Put) else _deleted(event) for event in events]


def _deleted(event: StoreEvent) -> tuple[str, bytes | None]:
    assert isinstance(event, Deleted), event
    return event.key, None


def revision_of(event: StoreEvent) -> int:
    assert isinstance(event, Put | Deleted), event
    return event.entry.mod_revision if isinstance(event, Put) else event.revision


def listed(event: StoreEvent) -> dict[str, bytes]:
    assert isinstance(event, Resync), event
    return {entry.key: entry.value for entry in event.snapshot.entries}


async def test_a_put_key_is_read_back_with_the_revision_of_its_write(store: Store):
    """get and list show the value and the revision at which it was written; a key never put is None."""
    revision = await store.put("/a/one", b"1")
    entry = await store.get("/a/one")
    assert entry is not None and (entry.value, entry.mod_revision, entry.lease) == (b"1", revision, None)
    assert await store.get("/a/two") is None
    assert (await store.list("/a/")).entries == (entry,)


async def test_a_listing_is_of_one_prefix_in_key_order(store: Store):
    """Neighbours of the prefix are not in it, and the listing's revision covers every write before it."""
    for key in ("/b/2", "/a/z", "/b/10", "/b", "/b0", "/b/1"):
        revision = await store.put(key, key.encode())
    snapshot = await store.list("/b/")
    assert [entry.key for entry in snapshot.entries] == ["/b/1", "/b/10", "/b/2"]
    assert snapshot.revision >= revision


async def test_revisions_only_grow(store: Store):
    """Whichever key is written, each write has a higher revision than the one before."""
    revisions = [await store.put(f"/k{turn % 3}", b"x") for turn in range(6)]
    assert revisions == sorted(set(revisions))


async def test_compare_and_put_writes_only_over_what_was_read(store: Store):
    """0 expects no key; otherwise the key must stand at the expected revision; a loser changes nothing."""
    first = await store.compare_and_put("/lock", b"a", 0)
    assert first is not None
    assert await store.compare_and_put("/lock", b"b", 0) is None
    assert await store.compare_and_put("/lock", b"a", 0) is None, "the same value is not a claim to the same write"
    second = await store.compare_and_put("/lock", b"c", first)
    assert second is not None and second > first
    assert await store.compare_and_put("/lock", b"d", first) is None
    entry = await store.get("/lock")
    assert entry is not None and (entry.value, entry.mod_revision) == (b"c", second)


async def test_of_many_who_compare_one_wins(store: Store):
    """However they interleave, a key that must not exist is created once."""
    wins = await asyncio.gather(*(store.compare_and_put("/leader", b"%d" % turn, 0) for turn in range(8)))
    assert sum(win is not None for win in wins) == 1


async def test_delete_is_idempotent(store: Store):
    """A deleted key can be created again, and deleting what is not there is no error."""
    await store.put("/gone", b"x")
    await store.delete("/gone")
    await store.delete("/gone")
    assert await store.get("/gone") is None
    assert await store.compare_and_put("/gone", b"y", 0) is not None


async def test_a_watch_begins_with_the_listing_and_tells_every_change_in_order(store: Store):
    """Changes of other prefixes are not told; values and deletions arrive in the order of their revisions."""
    await store.put("/w/old", b"0")
    async with watching(store, "/w/") as watched:
        assert listed(watched.events[0]) == {"/w/old": b"0"}
        await store.put("/w/a", b"1")
        await store.put("/other", b"x")
        await store.put("/w/a", b"2")
        await store.delete("/w/old")
        events = (await watched.until(4))[1:]
    assert said(events) == [("/w/a", b"1"), ("/w/a", b"2"), ("/w/old", None)]
    revisions = [revision_of(event) for event in events]
    assert revisions == sorted(set(revisions))


async def test_a_waiting_watch_is_woken_by_each_change(store: Store):
    """Nobody has to ask: a change reaches the watch that is waiting for one."""
    async with watching(store, "/w/") as watched:
        for turn in range(3):
            waiting = asyncio.create_task(watched.more())
            await asyncio.sleep(0)
            await store.put("/w/a", b"%d" % turn)
            assert said(await waiting) == [("/w/a", b"%d" % turn)]


async def test_two_watches_do_not_disturb_each_other(store: Store):
    """Both see everything under their prefix, and closing one leaves the other."""
    async with watching(store, "/w/") as wide:
        async with watching(store, "/w/x/") as narrow:
            await store.put("/w/x/1", b"1")
            assert said((await narrow.until(2))[1:]) == [("/w/x/1", b"1")]
        await store.put("/w/x/2", b"2")
        assert said((await wide.until(3))[1:]) == [("/w/x/1", b"1"), ("/w/x/2", b"2")]


async def test_a_slow_watch_misses_nothing(store: Store):
    """Changes made while nobody takes the batches are all told later."""
    async with watching(store, "/w/") as watched:
        for turn in range(300):
            await store.put(f"/w/{turn % 7}", b"%d" % turn)
        assert [value for _, value in said((await watched.until(301))[1:])] == [b"%d" % turn for turn in range(300)]


async def test_revoking_a_lease_deletes_its_keys_at_once(store: Store):
    """Keys of other leases and of none stay; a key put again under another lease has left the first."""
    lease, other = await store.grant(60), await store.grant(60)
    await store.put("/l/mine", b"x", lease)
    await store.put("/l/moved", b"x", lease)
    await store.put("/l/moved", b"y", other)
    await store.put("/l/free", b"x")
    entry = await store.get("/l/mine")
    assert entry is not None and entry.lease == lease
    async with watching(store, "/l/") as watched:
        await store.revoke(lease)
        assert said((await watched.until(2))[1:]) == [("/l/mine", None)]
    assert [entry.key for entry in (await store.list("/l/")).entries] == ["/l/free", "/l/moved"]
    await store.revoke(lease)


async def test_a_lease_that_is_not_kept_alive_takes_its_keys_along(store: Store):
    """The watch tells of it without anybody asking the store, and the lease is unknown from then on."""
    kept, lost = await store.grant(SHORT_TTL_S), await store.grant(SHORT_TTL_S)
    await store.put("/l/kept", b"x", kept)
    await store.put("/l/lost", b"x", lost)

    async def keep() -> None:
        while True:
            assert await store.keep_alive(kept) >= 1
            await asyncio.sleep(SHORT_TTL_S / 4)

    async with watching(store, "/l/") as watched:
        keeper = asyncio.create_task(keep())
        assert said((await watched.until(2))[1:]) == [("/l/lost", None)]
        keeper.cancel()
    assert [entry.key for entry in (await store.list("/l/")).entries] == ["/l/kept"]
    with pytest.raises(LeaseExpired):
        await store.keep_alive(lost)


async def test_an_unknown_lease_is_refused_everywhere(store: Store):
    """Nothing is written under a lease that the store does not know."""
    unknown = Lease(12345)
    with pytest.raises(LeaseExpired):
        await store.put("/l/x", b"x", unknown)
    with pytest.raises(LeaseExpired):
        await store.compare_and_put("/l/x", b"x", 0, unknown)
    with pytest.raises(LeaseExpired):
        await store.keep_alive(unknown)
    assert await store.get("/l/x") is None


async def test_a_large_listing_comes_whole(store: Store):
    """2,000 keys of 3 KB, more than gRPC's usual limit of 4 MB, in one listing and at the start of a watch."""
    value = b"v" * 3072
    keys = [f"/n/{number:05}" for number in range(2000)]
    for start in range(0, len(keys), 100):
        await asyncio.gather(*(store.put(key, value) for key in keys[start : start + 100]))
    snapshot = await store.list("/n/")
    assert [entry.key for entry in snapshot.entries] == keys
    async with watching(store, "/n/") as watched:
        assert listed(watched.events[0]) == dict.fromkeys(keys, value)


async def test_a_watch_resumes_after_the_server_was_killed(backend: Backend):
    """After a restart with its data the watch goes on behind the last event: nothing is lost, repeated or listed
    anew."""
    store = backend.store
    async with watching(store, "/w/") as watched:
        await store.put("/w/a", b"1")
        await store.put("/w/x", b"2")
        await store.delete("/w/x")
        await watched.until(4)
        await backend.stop()
        await backend.start()
        await store.put("/w/b", b"3")
        await store.delete("/w/a")
        await store.put("/w/c", b"4")
        assert said((await watched.until(7))[4:]) == [("/w/b", b"3"), ("/w/a", None), ("/w/c", b"4")]


async def test_what_was_under_a_lease_survives_a_restart_within_its_time(backend: Backend):
    """A short outage of the store costs nobody his lease."""
    store = backend.store
    lease = await store.grant(60)
    await store.put("/l/x", b"x", lease)
    await backend.stop()
    await backend.start()
    assert await store.keep_alive(lease) > 0
    entry = await store.get("/l/x")
    assert entry is not None and entry.lease == lease


async def test_a_watch_that_fell_behind_the_history_lists_anew(backend: Backend):
    """When the changes a watch still had to tell are compacted, it says so with a Resync that holds their outcome."""
    store = backend.store
    await store.put("/w/gone", b"x")
    async with watching(store, "/w/") as watched:
        await backend.stop()
        await backend.start()
        await store.delete("/w/gone")
        for turn in range(5):
            revision = await store.put("/w/a", b"%d" % turn)
        await backend.compact(revision)
        assert listed((await watched.more())[0]) == {"/w/a": b"4"}
        await store.put("/w/b", b"after")
        assert said(await watched.more()) == [("/w/b", b"after")]


@pytest.mark.parametrize("before", ["puts", "a deletion", "nothing"])
@pytest.mark.parametrize("writes_after", [0, 40], ids=["new store is behind", "new store is ahead"])
async def test_a_store_that_comes_back_empty_is_noticed(backend: Backend, before: str, writes_after: int):
    """Its revisions begin again; the watch neither waits for the old ones nor takes the new ones for their
    continuation, whatever it had been told last."""
    store = backend.store
    for _ in range(10):
        await store.put("/elsewhere" if before == "nothing" else "/w/before", b"x")
    async with watching(store, "/w/") as watched:
        if before == "a deletion":
            await store.put("/w/gone", b"x")
            await store.delete("/w/gone")
            await watched.until(3)
        await backend.stop()
        await backend.lose_data()
        await backend.start()
        for turn in range(writes_after):
            await store.put("/w/after", b"%d" % turn)
        resync = (await watched.more())[0]
        assert listed(resync) == ({"/w/after": b"39"} if writes_after else {})
        await store.put("/w/more", b"x")
        assert said(await watched.more()) == [("/w/more", b"x")]
