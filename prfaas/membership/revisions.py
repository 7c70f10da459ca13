"""Keys with revisions, leases and a bounded history: what a store is, without clock or sockets.

Every change takes the next revision; all keys of an ended lease go in one. `_log` holds the changes after
`compacted`, so any state since then can be rebuilt and any watch resumed. A fresh store stands at revision 1, like
etcd.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from prfaas.errors import PrfaasError
from prfaas.membership.store import Deleted, Entry, Lease, LeaseExpired, Put

#: Whether a key belongs to what was asked for.
Covers = Callable[[str], bool]


class HistoryGone(PrfaasError):
    """The revision asked for is older than the kept history or has not happened."""

    def __init__(self, revision: int, compacted: int) -> None:
        super().__init__(f"revision {revision} is not in the history after {compacted}")
        self.revision, self.compacted = revision, compacted


@dataclass(frozen=True, slots=True)
class _Change:
    revision: int
    key: str
    before: Entry | None
    after: Entry | None


@dataclass(slots=True)
class _Term:
    ttl_s: int
    ends_at: float
    #: A dict for its order: keys are deleted in the order in which they were put.
    keys: dict[str, None] = field(default_factory=dict)


class Revisions:
    def __init__(self, history_limit: int) -> None:
        self.revision = 1
        self.compacted = 0
        self._history_limit = history_limit
        self._entries: dict[str, Entry] = {}
        self._log: deque[_Change] = deque()
        self._terms: dict[Lease, _Term] = {}
        self._none_ends_before = math.inf

    def get(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def select(self, covers: Covers, at: int | None = None) -> tuple[Entry, ...]:
        """Entries in key order, now or as they were at revision `at`. Raises HistoryGone."""
        entries = self._entries if at is None else self._entries_at(at)
        return tuple(entries[key] for key in sorted(entries) if covers(key))

    def _entries_at(self, revision: int) -> dict[str, Entry]:
        if not self.compacted <= revision <= self.revision:
            raise HistoryGone(revision, self.compacted)
        entries = dict(self._entries)
        for change in reversed(self._log):
            if change.revision <= revision:
                break
            if change.before is None:
                del entries[change.key]
            else:
                entries[change.key] = change.before
        return entries

    def changes(self, covers: Covers, after: int) -> list[Put | Deleted]:
        """The changes later than revision `after`, oldest first. Raises HistoryGone."""
        if after < self.compacted:
            raise HistoryGone(after, self.compacted)
        events: list[Put | Deleted] = []
        for change in reversed(self._log):
            if change.revision <= after:
                break
            if covers(change.key):
                events.append(Deleted(change.key, change.revision) if change.after is None else Put(change.after))
        events.reverse()
        return events

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        if lease is not None and lease not in self._terms:
            raise LeaseExpired(lease)
        self._commit({key: (value, lease)})
        return self.revision

    def delete(self, covers: Covers) -> int:
        """How many keys there were to delete."""
        keys = [entry.key for entry in self.select(covers)]
        self._commit(dict.fromkeys(keys))
        return len(keys)

    def _commit(self, writes: dict[str, tuple[bytes, Lease | None] | None]) -> None:
        """Apply all writes (None deletes) as one revision."""
        if not writes:
            return
        self.revision += 1
        for key, write in writes.items():
            before = self._entries.pop(key, None)
            if before is not None and before.lease is not None:
                del self._terms[before.lease].keys[key]
            after = None
            if write is not None:
                value, lease = write
                after = self._entries[key] = Entry(key, value, self.revision, lease)
                if lease is not None:
                    self._terms[lease].keys[key] = None
            self._log.append(_Change(self.revision, key, before, after))
        if len(self._log) > self._history_limit:
            self.compact(self._log[len(self._log) - self._history_limit - 1].revision)

    def compact(self, revision: int) -> None:
        """Forget the changes up to and including `revision`. Raises HistoryGone for one that has not happened."""
        if revision > self.revision:
            raise HistoryGone(revision, self.compacted)
        while self._log and self._log[0].revision <= revision:
            self._log.popleft()
        self.compacted = max(self.compacted, revision)

    def grant(self, lease: Lease, ttl_s: int, now: float) -> None:
        assert lease not in self._terms, "lease ids are never used twice"
        self._terms[lease] = _Term(ttl_s, now + ttl_s)
        self._none_ends_before = min(self._none_ends_before, now + ttl_s)

    def renew(self, lease: Lease, now: float) -> int:
        """The lease's whole time, which starts again. Raises LeaseExpired."""
        term = self._terms.get(lease)
        if term is None:
            raise LeaseExpired(lease)
        term.ends_at = now + term.ttl_s
        return term.ttl_s

    def revoke(self, lease: Lease) -> None:
        """Raises LeaseExpired."""
        if lease not in self._terms:
            raise LeaseExpired(lease)
        self._commit(dict.fromkeys(self._terms[lease].keys))
        del self._terms[lease]

    def expire(self, now: float) -> None:
        """Cheap until one ends: this is asked before every operation."""
        if now < self._none_ends_before:
            return
        for lease in [lease for lease, term in self._terms.items() if term.ends_at <= now]:
            self.revoke(lease)
        self._none_ends_before = min((term.ends_at for term in self._terms.values()), default=math.inf)

    def next_expiry(self) -> float | None:
        """No lease ends before then; one may end then. None when there is none."""
        return None if math.isinf(self._none_ends_before) else self._none_ends_before

    def check(self) -> None:
        leased = {(entry.lease, key) for key, entry in self._entries.items() if entry.lease is not None}
        assert leased == {(lease, key) for lease, term in self._terms.items() for key in term.keys}
        revisions = [change.revision for change in self._log]
        assert revisions == sorted(revisions), "history out of order"
        assert all(self.compacted < revision <= self.revision for revision in revisions)
        assert len(self._log) <= self._history_limit
        assert all(self._none_ends_before <= term.ends_at for term in self._terms.values())
        assert all(entry.mod_revision <= self.revision for entry in self._entries.values())
