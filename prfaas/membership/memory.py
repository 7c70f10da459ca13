"""A store in this process: for tests, and behind `EmbeddedStoreServer` for clusters that run without etcd.

A watch reads the bounded history at its own pace: a reader that falls behind it gets a new listing, so nothing is
queued per watch and nothing is lost.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress

from prfaas.membership.revisions import HistoryGone, Revisions
from prfaas.membership.store import Batch, Entry, Lease, LeaseExpired, Resync, Snapshot


class MemoryStore:
    def __init__(self, now: Callable[[], float] = time.monotonic, *, history_limit: int = 10_000) -> None:
        self._now = now
        self._data = Revisions(history_limit)
        self._moved = asyncio.Event()

    @contextmanager
    def open(self) -> Iterator[Revisions]:
        """The data as of now, without expired leases; who waits for a change is woken if there was one."""
        before = self._data.revision
        self._data.expire(self._now())
        try:
            yield self._data
        finally:
            if self._data.revision != before:
                self._moved.set()
                self._moved = asyncio.Event()

    async def moved(self, after: int) -> None:
        """Wait until the store is past revision `after`."""
        while True:
            with self.open() as data:
                if data.revision > after:
                    return
                due = data.next_expiry()
            moved = self._moved
            with suppress(TimeoutError):
                async with asyncio.timeout(None if due is None else max(0.0, due - self._now())):
                    await moved.wait()

    async def get(self, key: str) -> Entry | None:
        with self.open() as data:
            return data.get(key)

    async def list(self, prefix: str) -> Snapshot:
        with self.open() as data:
            return Snapshot(data.revision, data.select(lambda key: key.startswith(prefix)))

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        with self.open() as data:
            return data.put(key, value, lease)

    async def compare_and_put(
        self, key: str, value: bytes, expected_mod_revision: int, lease: Lease | None = None
    ) -> int | None:
        with self.open() as data:
            entry = data.get(key)
            if (entry.mod_revision if entry else 0) != expected_mod_revision:
                return None
            return data.put(key, value, lease)

    async def delete(self, key: str) -> None:
        with self.open() as data:
            data.delete(lambda other: other == key)

    async def watch(self, prefix: str) -> AsyncGenerator[Batch, None]:
        place = -1  # before all history, so that the first batch is a listing
        while True:
            with self.open() as data:
                try:
                    batch: Batch = [*data.changes(lambda key: key.startswith(prefix), place)]
                    place = data.revision
                except HistoryGone:
                    place = data.revision
                    batch = [Resync(Snapshot(place, data.select(lambda key: key.startswith(prefix))))]
            if batch:
                yield batch
            else:
                await self.moved(place)

    async def grant(self, ttl_s: int) -> Lease:
        # Random, as etcd's are: a store that has lost its data must not give an id that an old holder still renews.
        lease = Lease(random.getrandbits(62) + 1)
        with self.open() as data:
            data.grant(lease, ttl_s, self._now())
            return lease

    async def keep_alive(self, lease: Lease) -> int:
        with self.open() as data:
            return data.renew(lease, self._now())

    async def revoke(self, lease: Lease) -> None:
        with self.open() as data, suppress(LeaseExpired):
            data.revoke(lease)

    async def close(self) -> None:
        """Nothing is held open."""
