"""What a shard of the cache says about its index, message by message, and the router's copy that follows it.

The shard numbers its messages of changes, `seq` by `seq` within an incarnation. A copy is current only while every
message has come, once and in order. Whatever else comes (a gap, a step back, another incarnation, a damaged snapshot)
makes it stale: nothing is known of the shard then, and nothing but a whole snapshot makes it current again. A snapshot
takes the place of all that was known, so that a shard that lost everything sends one of nothing.

When a connection breaks or falls silent a current copy is *held*: it is not scored from, but the next message that
follows on the last one shows that nothing was missed.
"""

from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from prfaas.cluster import Incarnation, Namespace, Pool
from prfaas.kvcache.prefix import Change
from prfaas.kvcache.region_index import RegionIndex


@dataclass(frozen=True, slots=True)
class SnapshotBegin:
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """The `number`th piece, from 0, of the changes that make the index out of nothing."""

    number: int
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class SnapshotEnd:
    chunks: int


@dataclass(frozen=True, slots=True)
class Changes:
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Nothing has changed since `seq`."""


@dataclass(frozen=True, slots=True)
class Update:
    """`seq`: of a message of changes its own number, of any other the number of the latest one before it. `snapshot`
    tells the snapshots of an incarnation apart."""

    incarnation: Incarnation
    seq: int
    kind: SnapshotBegin | SnapshotChunk | SnapshotEnd | Changes | Heartbeat
    snapshot: int = 0


class Stale(Enum):
    """Why a copy is not what the shard has. GAP: something was missed. BACKWARD: something came that is past. SNAPSHOT:
    a piece of one is missing. MALFORMED: keys that no prompt has, or another model's."""

    GAP = "gap"
    BACKWARD = "backward"
    INCARNATION = "incarnation"
    SNAPSHOT = "snapshot"
    MALFORMED = "malformed"


class Copy(Enum):
    """CURRENT: scored from. SYNCING: a snapshot is on its way. HELD: complete, but it may have been overtaken. STALE:
    nothing is known."""

    CURRENT = "current"
    SYNCING = "syncing"
    HELD = "held"
    STALE = "stale"


class ShardFeed:
    """The copy of one life of one shard within the index of all shards."""

    def __init__(self, index: RegionIndex, pool: Pool) -> None:
        self._index, self._pool = index, pool
        self.copy = Copy.STALE
        #: The highest number seen; no snapshot may be from before.
        self.seq = 0
        self._snapshot = self._pieces = 0

    def apply(self, update: Update, now: float) -> Stale | None:
        """None when it has followed on what was known."""
        try:
            stale = self._judge(update) or self._apply(update, now)
        except ValueError:
            stale = Stale.MALFORMED
        if stale is not None:
            self.forget()
        return stale

    def hold(self) -> None:
        """The connection is broken, or silent for too long."""
        if self.copy is Copy.CURRENT:
            self._index.hold(self._pool.id)
            self.copy = Copy.HELD
        elif self.copy is Copy.SYNCING:
            self.forget()

    def forget(self) -> None:
        self._index.forget(self._pool.id)
        self.copy = Copy.STALE

    def known_seq(self) -> int | None:
        """What to go on from; None when only a snapshot will do."""
        return self.seq if self.copy in (Copy.CURRENT, Copy.HELD) else None

    def _judge(self, update: Update) -> Stale | None:
        """Whether it is the message that must come now, by its numbers alone."""
        if update.incarnation != self._pool.incarnation:
            return Stale.INCARNATION
        match update.kind:
            case SnapshotBegin(namespace):
                if namespace != self._pool.namespace:
                    return Stale.MALFORMED
                return Stale.BACKWARD if update.seq < self.seq else None
            case Changes():
                expected = self.seq + 1
            case _:
                expected = self.seq
        if update.seq != expected:
            return Stale.GAP if update.seq > expected else Stale.BACKWARD
        return Stale.GAP if self.copy is Copy.STALE else None

    def _apply(self, update: Update, now: float) -> Stale | None:
        shard = self._pool.id
        match update.kind:
            case SnapshotBegin():
                self._index.begin(shard, update.incarnation, update.seq, now)
                self.copy, self.seq = Copy.SYNCING, update.seq
                self._snapshot, self._pieces = update.snapshot, 0
            case SnapshotChunk(number, changes):
                if not self._belongs(update) or number != self._pieces:
                    return Stale.SNAPSHOT
                self._index.piece(shard, changes)
                self._pieces += 1
            case SnapshotEnd(pieces):
                if not self._belongs(update) or pieces != self._pieces:
                    return Stale.SNAPSHOT
                self._index.end(shard)
                self.copy = Copy.CURRENT
            case Changes(changes):
                self.seq = update.seq
                self._index.changes(shard, update.incarnation, update.seq, changes, now)
                self._resume()
            case Heartbeat() if self.copy is Copy.SYNCING:
                return Stale.SNAPSHOT  # the shard has nothing more to say, and the snapshot is not whole
            case Heartbeat():
                self._index.heartbeat(shard, update.incarnation, update.seq, now)
                self._resume()
            case _:
                assert_never(update.kind)
        return None

    def _belongs(self, update: Update) -> bool:
        return self.copy is Copy.SYNCING and update.snapshot == self._snapshot

    def _resume(self) -> None:
        if self.copy is Copy.HELD:
            self.copy = Copy.CURRENT
