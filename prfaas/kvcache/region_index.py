"""A router's copies of what the shards of all regions hold, and the match of a prompt in one region.

Each shard numbers what it tells: (incarnation, seq). A copy that missed something, or that has not had all of a
snapshot yet, is *stale* and finds nothing. All copies together take a bounded number of bytes: over that, what was
matched longest ago is forgotten, so that a match may be too short and is never too long.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prfaas.cluster import Incarnation, NodeId
from prfaas.kvcache.hashing import KEY_BYTES
from prfaas.kvcache.placement import PROMPT_UNITS, shard_of
from prfaas.kvcache.prefix import Change, ChangeKind, PrefixIndex
from prfaas.kvcache.radix import Run
from prfaas.request import Match

#: How much is forgotten at once when the bound is reached.
_FORGET_PART = 0.05


@dataclass(slots=True)
class _Copy:
    """`seq` of the last changes that it has. It is good for matches when `whole`."""

    incarnation: Incarnation
    seq: int
    whole: bool
    heard_at: float


class RegionIndex:
    """`bound_bytes`: of memory, as estimated, for all copies together."""

    def __init__(self, bound_bytes: int) -> None:
        self._bound_bytes = bound_bytes
        self._index = PrefixIndex()
        self._copies: dict[NodeId, _Copy] = {}
        self._turn = 1
        #: Leaves in the order in which they will be looked at when something has to be forgotten, and the turn in which
        #: each was last used when it was put here.
        self._leaves: deque[tuple[Run, int]] = deque()
        self.forgotten_units = 0

    @property
    def nbytes(self) -> int:
        """An estimate."""
        return self._index.nbytes

    def begin(self, shard: NodeId, incarnation: Incarnation, seq: int, now: float) -> None:
        """A snapshot begins. The next changes are numbered `seq + 1`, and may come between its pieces."""
        self._index.remove_owner(shard)
        self._copies[shard] = _Copy(incarnation, seq, False, now)

    def piece(self, shard: NodeId, changes: Iterable[Change]) -> None:
        """A part of the snapshot that has begun. Raises ValueError for keys that no prompt has."""
        if shard in self._copies:
            self._apply(shard, changes)

    def end(self, shard: NodeId) -> None:
        """The snapshot is whole, unless something was missed while it came."""
        copy = self._copies.get(shard)
        if copy is not None:
            copy.whole = True

    def changes(self, shard: NodeId, incarnation: Incarnation, seq: int, changes: Iterable[Change], now: float) -> bool:
        """False when something before was missed: nothing of the shard is known from here, until its next snapshot."""
        copy = self._copies.get(shard)
        if copy is None or copy.incarnation != incarnation or seq != copy.seq + 1:
            self.forget(shard)
            return False
        copy.seq, copy.heard_at = seq, now
        self._apply(shard, changes)
        return True

    def heartbeat(self, shard: NodeId, incarnation: Incarnation, seq: int, now: float) -> bool:
        """The shard says that its last changes were numbered `seq`. False as for `changes`."""
        copy = self._copies.get(shard)
        if copy is None or copy.incarnation != incarnation or seq != copy.seq:
            self.forget(shard)
            return False
        copy.heard_at = now
        return True

    def forget(self, shard: NodeId) -> None:
        """The shard is gone, or has to be learned anew."""
        if self._copies.pop(shard, None) is not None:
            self._index.remove_owner(shard)

    def hold(self, shard: NodeId) -> None:
        """The shard cannot be heard: until its next message it finds nothing."""
        copy = self._copies.get(shard)
        if copy is not None:
            copy.heard_at = -math.inf

    def match(self, shards: Sequence[NodeId], keys: bytes, limit_tokens: int, heard_since: float = -math.inf) -> Match:
        """How much of a prompt one region holds. `shards` are all that the region has: they say which of them keeps it.
        Those that were silent since then find nothing."""
        self._turn += 1
        if not shards or not keys:
            return Match()
        shard = shard_of(keys, shards)
        if not self._counts(shard, heard_since):
            return Match()
        found = self._index.find(keys, limit_tokens)
        for run, _ in found.path:
            run.used = self._turn
        return found.at(shard)

    def holders(self, keys: bytes, limit_tokens: int, heard_since: float = -math.inf) -> dict[NodeId, Match]:
        """What each of the best holders has of a prompt, where each keeps prompts by itself. Those that were silent
        since then find nothing."""
        self._turn += 1
        found = self._index.find(keys, limit_tokens)
        for run, _ in found.path:
            run.used = self._turn
        return {owner: match for owner, match in found.best().items() if self._counts(owner, heard_since)}

    def _counts(self, owner: NodeId, heard_since: float) -> bool:
        copy = self._copies.get(owner)
        return copy is not None and copy.whole and copy.heard_at > heard_since

    def check(self) -> None:
        self._index.check()
        assert self.nbytes <= self._bound_bytes, f"{self.nbytes} bytes of {self._bound_bytes}"
        queued = {id(run) for run, _ in self._leaves}
        for run in self._index.runs():
            assert run.holders.keys() <= self._copies.keys(), "a shard that nobody knows"
            assert run.children or id(run) in queued, "a leaf that will never be forgotten"

    def _apply(self, shard: NodeId, changes: Iterable[Change]) -> None:
        for change in changes:
            if not 0 < len(change.keys) <= PROMPT_UNITS * KEY_BYTES or len(change.keys) % KEY_BYTES:
                raise ValueError(f"{shard} tells of {len(change.keys)} bytes of keys")
            if change.kind is ChangeKind.KV_ADDED:
                self._notice(self._index.insert(change.keys, shard))
            else:
                self._index.apply(shard, change)
            if self._index.nbytes > self._bound_bytes:
                self._forget_some()

    def _notice(self, run: Run) -> None:
        """Only new runs have never been used; and leaves stay leaves until they go, others never become any."""
        if run.used:
            return
        run.used = self._turn
        self._leaves.append((run, run.used))
        if len(self._leaves) > 1.25 * self._index.runs_count + 16:
            self._leaves = deque(leaf for leaf in self._leaves if leaf[0].parent is not None)

    def _forget_some(self) -> None:
        """By second chance: a leaf that was matched since it was last looked at is looked at once more."""
        goal_bytes = int((1 - _FORGET_PART) * self._bound_bytes)
        while self._index.nbytes > goal_bytes and self._leaves:
            run, seen = self._leaves.popleft()
            if run.parent is None:
                continue
            if run.used > seen:
                self._leaves.append((run, run.used))
                continue
            self.forgotten_units += run.stop - run.start
            keys = run.path_keys(run.start + 1)
            for owner in list(run.holders):
                self._index.remove(keys, owner)
