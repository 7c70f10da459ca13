"""Opposite `prfaas/membership/memory.py`, beyond the contract: its clock and its bound."""

import asyncio
from contextlib import aclosing

from prfaas.membership.memory import MemoryStore
from prfaas.membership.store import Deleted, Put, Resync


async def test_leases_end_by_the_clock_that_was_given():
    """Nothing but that clock ends a lease, and whoever touches the store next finds it ended."""
    now = 0.0
    store = MemoryStore(lambda: now)
    lease = await store.grant(30)
    await store.put("/x", b"x", lease)
    now = 29.0
    assert await store.keep_alive(lease) == 30
    now = 58.0
    assert await store.get("/x") is not None
    async with aclosing(store.watch("/")) as batches:
        assert isinstance((await anext(batches))[0], Resync)
        now = 59.0
        async with asyncio.timeout(5):
            assert isinstance((await anext(batches))[0], Deleted)


async def test_a_reader_that_falls_behind_the_bounded_history_lists_anew():
    """The history does not grow with what nobody reads."""
    store = MemoryStore(history_limit=3)
    async with aclosing(store.watch("/")) as batches:
        await anext(batches)
        for turn in range(3):
            await store.put("/x", b"%d" % turn)
        assert [type(event) for event in await anext(batches)] == [Put, Put, Put]
        for turn in range(4):
            await store.put("/x", b"%d" % turn)
        (event,) = await anext(batches)
        assert isinstance(event, Resync) and [entry.value for entry in event.snapshot.entries] == [b"3"]
