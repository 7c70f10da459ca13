"""One shard of the prefix-cache pool: who may read and write what, and until when (R14-R23).

Keys run from the start of a prompt, and all positions count from there. The process around it moves the bytes: after
each call it carries out what `take` returns. A get keeps its memory from `Serve` to `got`, a put from its grant to
`released`, whatever becomes of leases in between.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prfaas.kvcache.counts import Counts
from prfaas.kvcache.objects import (
    Command,
    Dropped,
    GetId,
    Granted,
    Leased,
    LeaseId,
    ObjectKey,
    OpId,
    PutId,
    Refused,
    Stored,
)
from prfaas.kvcache.pins import Pins
from prfaas.kvcache.prefix import Change
from prfaas.kvcache.reading import Reading
from prfaas.kvcache.snapshots import pieces
from prfaas.kvcache.stock import SELF, Stock
from prfaas.kvcache.stock import ShardSpec as ShardSpec
from prfaas.kvcache.writing import Writing


class Shard:
    def __init__(self, spec: ShardSpec) -> None:
        self._out: list[Command] = []
        self._pins = Pins()
        self._stock = Stock(spec, self._pins, self._out)
        self.counts = Counts()
        self._reading = Reading(self._stock, self._pins, self._out, self.counts, not spec.state_bytes)
        self._writing = Writing(spec, self._stock, self._pins, self._out, self.counts)

    @property
    def stock(self) -> Stock:
        """To read: bytes by state, padding, evictions by cause."""
        return self._stock

    @property
    def leases(self) -> int:
        return self._reading.leases

    @property
    def gets(self) -> int:
        return self._reading.gets

    @property
    def puts(self) -> int:
        return self._writing.puts

    def take(self) -> tuple[Command, ...]:
        """What is to be done since the last time, in order."""
        commands = tuple(self._out)
        self._out.clear()
        return commands

    # -- leases and gets

    def lease(
        self,
        lease: LeaseId,
        holder: str,
        tenant: str,
        keys: bytes,
        limit_tokens: int,
        joint: bool,
        now: float,
        ttl_s: float,
    ) -> Leased:
        """Look up, and pin what is found until the lease ends: with `joint`, KV up to the last state within
        `limit_tokens` and that state, else KV alone, in whole units. No lease when that is nothing."""
        return self._reading.lease(lease, holder, tenant, keys, limit_tokens, joint, now, ttl_s)

    def renew(self, lease: LeaseId, now: float, ttl_s: float) -> bool:
        """False when it had ended."""
        return self._reading.renew(lease, now, ttl_s)

    def release(self, lease: LeaseId, now: float) -> bool:
        """True when the lease held to the end (R17)."""
        return self._reading.release(lease, now)

    def get(self, get: GetId, lease: LeaseId, first_tokens: int, stop_tokens: int, state: bool, now: float) -> None:
        """Rows `first_tokens:stop_tokens` of what is leased, and with `state` the state at `stop_tokens`. Answered
        through `take`: by `Serve`, at once or after `Load`s, or by `Miss`."""
        return self._reading.get(get, lease, first_tokens, stop_tokens, state, now)

    def got(self, get: GetId, now: float) -> bool:
        """A `Serve` has been sent or given up, and nobody reads its windows any more. True when the lease has held to
        this moment: otherwise the reading has failed, however good the bytes look (R17)."""
        return self._reading.got(get, now)

    # -- the lower tier

    def loaded(self, op: OpId, ok: bool) -> None:
        """Answers `Load`. Not ok: damaged or lost. The object leaves the index, with all that stands on it."""
        loaded = self._stock.loaded(op, ok)
        if loaded.resident is not None:
            self._reading.arrived(op, loaded.resident)
        if loaded.lost:
            self._reading.lost(loaded.lost)
            self._writing.publish_sealed()

    def spilled(self, op: OpId, ok: bool) -> None:
        """Answers `Spill`. Not ok: the object stays in memory alone."""
        self._stock.spilled(op, ok)

    # -- puts

    def put(
        self,
        put: PutId,
        holder: str,
        tenant: str,
        keys: bytes,
        stop_tokens: int,
        states: Sequence[int],
        checksums: Mapping[ObjectKey, int],
        now: float,
        ttl_s: float,
        unproven: Sequence[int] = (),
    ) -> Granted | Refused:
        """Room for what is missing of the KV of the complete units of `keys[:stop_tokens]` and of these states, of
        which `unproven` are periodic ones; what others have put or are putting is not missing. One stretch is granted,
        the first, with the states in it; where no KV is missing, the last state that is. All of that or nothing is
        reserved."""
        return self._writing.put(put, holder, tenant, keys, stop_tokens, states, checksums, now, ttl_s, unproven)

    def received(self, put: PutId) -> None:
        """All of it is here and verified. It is published whole, as soon as what it stands on is (R22)."""
        self._writing.received(put)

    def lost(self, put: PutId, cause: Dropped = Dropped.LOST) -> None:
        """It will never be whole. Its memory waits in quarantine until `released` (R16)."""
        self._writing.lost(put, cause)

    def released(self, put: PutId) -> None:
        """The pump has passed its barrier: no thread touches the windows of this put any more. For every put that was
        granted, also after `received`."""
        self._writing.released(put)

    # -- time, restarts, watchers

    def tick(self, now: float) -> None:
        """Ends the leases and the puts whose time has passed. Several times a second."""
        self._reading.expire(now)
        self._writing.expire(now)

    def recovered(self, objects: Iterable[Stored]) -> None:
        """What the lower tier has, told to a new shard before anything else. What hangs on nothing is dropped."""
        self._stock.recovered(objects)

    def snapshot(self, piece_bytes: int) -> Iterator[tuple[Change, ...]]:
        """The index as changes from empty, in pieces of at most so many bytes of keys (and at least one change).

        It is read as the pieces are asked for, while the index goes on changing. Whoever applies all pieces and then
        all changes since the first piece was asked for, or both as they come, has what the shard has. All `take` has
        to have been handed on before a piece is asked for."""
        return pieces(self._stock.cache.index, SELF, piece_bytes)

    def check(self) -> None:
        self._stock.check()
        self._writing.check()
        pins: Counter[ObjectKey] = Counter(self._reading.pinned())
        pins.update(self._writing.pinned())
        self._stock.check_users(pins, self._reading.readers())
