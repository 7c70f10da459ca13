"""The cluster's store in virtual time: the real `Revisions` behind a network delay, with outages and loss of its data.

It offers of the `membership.store.Store` port what the simulated control plane needs, and tells its watchers of every
change one hop later. A store that comes back tells them all that it now has, which may be nothing. A watch may break,
which ends as `membership.store` says, and may say again what it has said.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress

from prfaas.errors import PeerUnavailable
from prfaas.membership.revisions import Revisions
from prfaas.membership.store import Batch, Entry, Lease, LeaseExpired, Resync, Snapshot
from prfaas.sim.kernel import Kernel

HISTORY = 1000

Watcher = Callable[[Batch], None]


class SimStore:
    def __init__(self, kernel: Kernel, hop_s: float) -> None:
        self._kernel, self._hop_s = kernel, hop_s
        self._data = Revisions(HISTORY)
        self._watchers: list[Watcher] = []
        self._broken_watches: Counter[Watcher] = Counter()
        self._leases = 0
        self.up = True

    def watch(self, watcher: Watcher) -> None:
        """Tell of everything from now on, first of all that there is."""
        self._watchers.append(watcher)
        self._later((watcher,), [self._listing()])

    def break_watch(self, watcher: Watcher, for_s: float) -> None:
        """It hears of nothing for so long, and then of all that there is, as when the history does not go back so
        far."""
        self._broken_watches[watcher] += 1

        def mend() -> None:
            self._broken_watches[watcher] -= 1
            self._later((watcher,), [self._listing()])

        self._kernel.call_later(for_s, mend)

    def repeat(self, watcher: Watcher, changes: int) -> None:
        """It hears of the latest changes again."""
        after = max(self._data.compacted, self._data.revision - changes)
        self._later((watcher,), [*self._data.changes(_all, after)])

    def put_now(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """A write that arrives at this moment. Raises PeerUnavailable, LeaseExpired."""
        self._reach()
        before = self._data.revision
        revision = self._data.put(key, value, lease)
        self._tell(before)
        return revision

    def grant_now(self, ttl_s: int) -> Lease:
        self._reach()
        self._leases += 1
        lease = Lease(self._leases)
        self._data.grant(lease, ttl_s, self._kernel.now())
        return lease

    def renew_now(self, lease: Lease) -> None:
        """Raises PeerUnavailable, LeaseExpired."""
        self._reach()
        self._data.renew(lease, self._kernel.now())

    def get_now(self, key: str) -> Entry | None:
        self._reach()
        return self._data.get(key)

    async def get(self, key: str) -> Entry | None:
        await self._kernel.sleep(2 * self._hop_s)
        return self.get_now(key)

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        await self._kernel.sleep(2 * self._hop_s)
        return self.put_now(key, value, lease)

    async def compare_and_put(
        self, key: str, value: bytes, expected_mod_revision: int, lease: Lease | None = None
    ) -> int | None:
        await self._kernel.sleep(self._hop_s)
        entry = self.get_now(key)
        if (entry.mod_revision if entry else 0) != expected_mod_revision:
            return None
        revision = self.put_now(key, value, lease)
        await self._kernel.sleep(self._hop_s)
        return revision

    def fail(self) -> None:
        """Cannot be reached from now on."""
        self.up = False

    def recover(self, empty: bool) -> None:
        """Can be reached again, with its data or without. Leases that it still has begin their time again, as etcd's do
        with a new leader."""
        self.up = True
        if empty:
            self._data = Revisions(HISTORY)
        for number in range(1, self._leases + 1):
            with suppress(LeaseExpired):
                self._data.renew(Lease(number), self._kernel.now())
        self._later(tuple(self._watchers), [self._listing()])

    def tick(self) -> None:
        """Let leases end that are over."""
        if self.up:
            before = self._data.revision
            self._data.expire(self._kernel.now())
            self._tell(before)

    def _reach(self) -> None:
        if not self.up:
            raise PeerUnavailable("store", "no answer")
        self.tick()

    def _listing(self) -> Resync:
        return Resync(Snapshot(self._data.revision, self._data.select(_all)))

    def _tell(self, after: int) -> None:
        if self._data.revision == after:
            return
        self._later(tuple(self._watchers), [*self._data.changes(_all, after)])

    def _later(self, watchers: Iterable[Watcher], events: Batch) -> None:
        def tell() -> None:
            if self.up:
                for watcher in watchers:
                    if not self._broken_watches[watcher]:
                        watcher(events)

        self._kernel.call_later(self._hop_s, tell)


def _all(key: str) -> bool:
    return True
