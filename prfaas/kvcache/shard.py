"""One shard of the prefix-cache pool: who may read and write what, and until when (R14-R23).

A segment of a prompt is a prompt of its own here: keys run from its start, all positions count from there. The process
around it moves the bytes: after each call it carries out what `take` returns. A get keeps its memory from `Serve` to
`got`, a put from its grant to `released`, whatever becomes of leases in between.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prfaas.kvcache.blocks import Shortage
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS
from prfaas.kvcache.layout import Window
from prfaas.kvcache.memory import Place, Resident
from prfaas.kvcache.objects import (
    Alarm,
    Command,
    Discarded,
    Dropped,
    GetId,
    Granted,
    Kind,
    Leased,
    LeaseId,
    Miss,
    Missed,
    ObjectKey,
    OpId,
    Published,
    PutId,
    Refused,
    Serve,
    Stored,
)
from prfaas.kvcache.pins import Lease, Pins
from prfaas.kvcache.prefix import Change
from prfaas.kvcache.puts import Phase, Put, Stretch, missing
from prfaas.kvcache.radix import first_units, units
from prfaas.kvcache.snapshots import pieces
from prfaas.kvcache.states import Checkpoint
from prfaas.kvcache.stock import SELF, Stock
from prfaas.kvcache.stock import ShardSpec as ShardSpec


@dataclass(slots=True)
class Counts:
    """Since the start. Of what was looked up for a prefill (`joint`), tokens whose KV was there and could not be
    resumed from: behind the last whole unit within the limit, or for want of a state."""

    looked_up_tokens: int = 0
    kv_hit_tokens: int = 0
    joint_hit_tokens: int = 0
    unaligned_tokens: int = 0
    stateless_tokens: int = 0
    expired_leases: int = 0
    broken_leases: int = 0
    misses: Counter[Missed] = field(default_factory=Counter)
    refused: Counter[Refused] = field(default_factory=Counter)
    discarded: Counter[Dropped] = field(default_factory=Counter)
    published: int = 0
    alarms: int = 0


@dataclass(slots=True, eq=False)
class _Get:
    """`missing` are readings of the lower tier that it waits for. `empty` are windows of no bytes."""

    lease: LeaseId
    empty: tuple[Window, ...]
    missing: set[OpId] = field(default_factory=set)
    reading: list[Resident] = field(default_factory=list)

    @property
    def windows(self) -> tuple[Window, ...]:
        windows = (*(resident.window for resident in self.reading), *self.empty)
        return tuple(sorted(windows, key=lambda window: (window.stop, window.state)))


class Shard:
    def __init__(self, spec: ShardSpec) -> None:
        self._resumes_anywhere = not spec.state_bytes
        self._spec = spec
        self._out: list[Command] = []
        self._pins = Pins()
        self._stock = Stock(spec, self._pins, self._out)
        self._leases: dict[LeaseId, Lease] = {}
        self._gets: dict[GetId, _Get] = {}
        self._puts: dict[PutId, Put] = {}
        #: What is granted and not published, and by which put.
        self._filling: dict[ObjectKey, PutId] = {}
        self.counts = Counts()

    @property
    def stock(self) -> Stock:
        """To read: bytes by state, padding, evictions by cause."""
        return self._stock

    @property
    def leases(self) -> int:
        return len(self._leases)

    @property
    def gets(self) -> int:
        return len(self._gets)

    @property
    def puts(self) -> int:
        return len(self._puts)

    def take(self) -> tuple[Command, ...]:
        """What is to be done since the last time, in order."""
        commands = tuple(self._out)
        self._out.clear()
        return commands

    # -- leases

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
    ) -> Leased | None:
        """Look up, and pin what is found until the lease ends: with `joint`, KV up to the last state within
        `limit_tokens` and that state, else KV alone, in whole units. None, and no lease, when that is nothing."""
        assert lease not in self._leases, f"{lease} exists"
        resume = joint and not self._resumes_anywhere
        found = self._stock.cache.lookup(keys, limit_tokens, resumes=resume)
        aligned_tokens = found.kv // HASH_UNIT_TOKENS * HASH_UNIT_TOKENS
        kv_tokens = found.joint if resume else aligned_tokens
        self.counts.looked_up_tokens += limit_tokens
        self.counts.kv_hit_tokens += found.kv
        if joint:
            self.counts.joint_hit_tokens += kv_tokens
            self.counts.unaligned_tokens += found.kv - aligned_tokens
            self.counts.stateless_tokens += aligned_tokens - kv_tokens
        if not kv_tokens:
            return None
        boundary = kv_tokens // HASH_UNIT_TOKENS
        pinned = tuple(place.key for place in _places(keys, 0, boundary, state=resume))
        self._pins.pin(pinned)
        self._stock.memory.use(pinned)
        state_tokens = kv_tokens if joint else 0
        self._leases[lease] = Lease(holder, tenant, keys, kv_tokens, state_tokens, pinned, now + ttl_s)
        return Leased(kv_tokens, state_tokens)

    def renew(self, lease: LeaseId, now: float, ttl_s: float) -> bool:
        """False when it had ended."""
        if not self._holds(lease, now):
            return False
        self._leases[lease].expires_at = now + ttl_s
        return True

    def release(self, lease: LeaseId, now: float) -> bool:
        """True when the lease held to the end (R17)."""
        held = self._holds(lease, now)
        if lease in self._leases:
            self._end(lease)
        return held

    # -- gets

    def get(self, get: GetId, lease: LeaseId, first_tokens: int, stop_tokens: int, state: bool, now: float) -> None:
        """Rows `first_tokens:stop_tokens` of what is leased, and with `state` the state at `stop_tokens`. Answered
        through `take`: by `Serve`, at once or after `Load`s, or by `Miss`."""
        assert get not in self._gets, f"{get} exists"
        if not self._holds(lease, now):
            broken = lease in self._leases
            return self._miss(get, Missed.DAMAGED if broken else Missed.EXPIRED)
        held = self._leases[lease]
        nothing = first_tokens == stop_tokens and not state
        if not 0 <= first_tokens <= stop_tokens <= held.kv_tokens or nothing:
            return self._miss(get, Missed.OUTSIDE)
        if state and stop_tokens != held.state_tokens:
            return self._miss(get, Missed.OUTSIDE)
        first, stop = first_tokens // HASH_UNIT_TOKENS, -(-stop_tokens // HASH_UNIT_TOKENS)
        if first_tokens == stop_tokens:
            first = stop
        places = _places(held.keys, first, stop, state=state and not self._resumes_anywhere)
        shortage = self._stock.load(self._stock.cold(places), held.tenant)
        if shortage is not None:
            return self._miss(get, Missed.QUOTA if shortage is Shortage.QUOTA else Missed.NO_ROOM)
        empty = (Window(stop_tokens, stop_tokens, 0, True),) if state and self._resumes_anywhere else ()
        opened = self._gets[get] = _Get(lease, empty)
        for place in places:
            resident, op = self._stock.memory.published.get(place.key), self._stock.load_of(place.key)
            if resident is not None:
                self._read(opened, resident)
            else:
                assert op is not None, "what is leased is in memory or below"
                opened.missing.add(op)
        if not opened.missing:
            self._out.append(Serve(get, opened.windows))
        return None

    def got(self, get: GetId, now: float) -> bool:
        """A `Serve` has been sent or given up, and nobody reads its windows any more. True when the lease has held to
        this moment: otherwise the reading has failed, however good the bytes look (R17)."""
        opened = self._gets.pop(get)
        assert not opened.missing, f"{get} was not served"
        for resident in opened.reading:
            self._stock.memory.unread(resident)
        return self._holds(opened.lease, now)

    # -- the lower tier

    def loaded(self, op: OpId, ok: bool) -> None:
        """Answers `Load`. Not ok: damaged or lost. The object leaves the index, with all that stands on it."""
        loaded = self._stock.loaded(op, ok)
        if loaded.resident is not None:
            for get, opened in self._gets.items():
                if op in opened.missing:
                    opened.missing.remove(op)
                    self._read(opened, loaded.resident)
                    if not opened.missing:
                        self._out.append(Serve(get, opened.windows))
        if loaded.lost:
            self._break(loaded.lost)

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
        if put in self._puts:
            return self._refuse(Refused.KNOWN)
        wanted = min(stop_tokens // HASH_UNIT_TOKENS, units(keys))
        keys = first_units(keys, wanted)
        self._compare(keys, tenant, checksums)
        stretch = self._missing(keys, states)
        if stretch is None:
            return Granted(stop_tokens, stop_tokens)
        base = tuple(place.key for place in _places(keys, 0, min(stretch.first, self._stock.cache.held_units(keys))))
        self._pins.pin(base)
        opened = Put(holder, keys, stretch, frozenset(unproven), base, now + ttl_s)
        refused = self._reserve(opened, tenant)
        if refused is not None:
            self._pins.unpin(base)
            return self._refuse(refused)
        self._puts[put] = opened
        for resident in opened.residents:
            self._filling[resident.key] = put
            if resident.key in checksums:
                self._stock.checksums[resident.key] = checksums[resident.key]
        first_tokens, stop_tokens = (at * HASH_UNIT_TOKENS for at in (stretch.first, stretch.stop))
        windows = tuple(resident.window for resident in opened.residents)
        return Granted(first_tokens, stop_tokens, tuple(at * HASH_UNIT_TOKENS for at in stretch.states), windows)

    def received(self, put: PutId) -> None:
        """All of it is here and verified. It is published whole, as soon as what it stands on is (R22)."""
        opened = self._puts.get(put)
        if opened is None or opened.phase is not Phase.FILLING:
            return
        opened.move(Phase.SEALED)
        for resident in opened.residents:
            self._stock.memory.seal(resident)
        self._publish_sealed()

    def lost(self, put: PutId) -> None:
        """It will never be whole. Its memory waits in quarantine until `released` (R16)."""
        opened = self._puts.get(put)
        if opened is not None and opened.phase is Phase.FILLING:
            self._discard(put, Dropped.LOST)
            self._publish_sealed()

    def released(self, put: PutId) -> None:
        """The pump has passed its barrier: no thread touches the windows of this put any more. For every put that was
        granted, also after `received`."""
        opened = self._puts.get(put)
        if opened is None:
            return
        self.lost(put)
        opened.writer.stopped = True
        if opened.phase is Phase.OVER:
            self._close(put)

    # -- time, restarts, watchers

    def holder_lost(self, holder: str, now: float) -> None:
        """Ends all its leases and its puts, as if they had expired."""
        self._expire(
            [lease for lease, held in self._leases.items() if held.holder == holder],
            [put for put, opened in self._puts.items() if opened.holder == holder],
        )

    def tick(self, now: float) -> None:
        """Ends the leases and the puts whose time has passed. Several times a second."""
        self._expire(
            [lease for lease, held in self._leases.items() if now >= held.expires_at],
            [put for put, opened in self._puts.items() if now >= opened.expires_at],
        )

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
        pins: Counter[ObjectKey] = Counter()
        readers: Counter[str] = Counter()
        for held in self._leases.values():
            pins.update(held.pinned)
        for opened in self._gets.values():
            readers.update(resident.owner for resident in opened.reading)
            assert not opened.missing or opened.lease in self._leases, "a get that nobody waits for"
        filling: dict[ObjectKey, PutId] = {}
        incoming_bytes = 0
        for put, each in self._puts.items():
            assert each.phase is not Phase.OVER or not each.writer.stopped, f"{put} is over and still here"
            if each.phase is not Phase.OVER:
                pins.update(each.base)
                filling |= {resident.key: put for resident in each.residents}
                incoming_bytes += self._lower_bytes(each.stretch)
        assert filling == self._filling, "what is being filled"
        assert incoming_bytes == self._stock.incoming_bytes
        assert not self._filling.keys() & self._stock.memory.published.keys(), "published before it was written"
        self._stock.check_users(pins, readers)

    def _holds(self, lease: LeaseId, now: float) -> bool:
        """Whether a lease is in force. One whose time has passed ends here, if `tick` was not first."""
        held = self._leases.get(lease)
        if held is not None and now >= held.expires_at:
            self.counts.expired_leases += 1
            self._end(lease)
            return False
        return held is not None and not held.broken

    def _end(self, lease: LeaseId) -> None:
        self._pins.unpin(self._leases.pop(lease).pinned)
        self._abandon(lease, Missed.EXPIRED)

    def _expire(self, leases: Iterable[LeaseId], puts: Iterable[PutId]) -> None:
        for lease in leases:
            self.counts.expired_leases += 1
            self._end(lease)
        for put in puts:
            if self._puts[put].phase is not Phase.OVER:
                self._discard(put, Dropped.EXPIRED)
        self._publish_sealed()

    def _break(self, lost: frozenset[ObjectKey]) -> None:
        for lease, held in self._leases.items():
            if not held.broken and not lost.isdisjoint(held.pinned):
                held.broken = True
                self.counts.broken_leases += 1
                self._abandon(lease, Missed.DAMAGED)
        self._publish_sealed()

    def _abandon(self, lease: LeaseId, cause: Missed) -> None:
        """Its gets that wait for the lower tier come to nothing. Those that were served are being read."""
        for get in [get for get, opened in self._gets.items() if opened.lease == lease and opened.missing]:
            for resident in self._gets.pop(get).reading:
                self._stock.memory.unread(resident)
            self._miss(get, cause)

    def _read(self, opened: _Get, resident: Resident) -> None:
        self._stock.memory.read(resident)
        opened.reading.append(resident)

    def _miss(self, get: GetId, cause: Missed) -> None:
        self.counts.misses[cause] += 1
        self._out.append(Miss(get, cause))

    def _missing(self, keys: bytes, states: Sequence[int]) -> Stretch | None:
        boundaries = {tokens // HASH_UNIT_TOKENS for tokens in states if tokens % HASH_UNIT_TOKENS == 0}
        usable = sorted(at for at in boundaries if 0 < at <= units(keys) and not self._resumes_anywhere)
        lacking = [at for at in usable if not self._stock.has_state(first_units(keys, at))]
        return missing(keys, lacking, self._stock.cache.held_units(keys), self._filling.keys())

    def _reserve(self, opened: Put, tenant: str) -> Refused | None:
        """All the room that a put needs, or none."""
        needed_bytes = self._lower_bytes(opened.stretch)
        if not self._stock.lower_room(needed_bytes):
            return Refused.NO_ROOM
        placed = self._stock.reserve(opened.stretch.places(opened.keys), tenant, opened.writer)
        if isinstance(placed, Shortage):
            return Refused.QUOTA if placed is Shortage.QUOTA else Refused.NO_ROOM
        opened.residents = placed
        self._stock.incoming_bytes += needed_bytes
        return None

    def _refuse(self, cause: Refused) -> Refused:
        self.counts.refused[cause] += 1
        return cause

    def _lower_bytes(self, stretch: Stretch) -> int:
        kv_units, states = stretch.stop - stretch.first, len(stretch.states)
        return kv_units * self._spec.unit_bytes + states * self._spec.state_bytes

    def _compare(self, keys: bytes, tenant: str, checksums: Mapping[ObjectKey, int]) -> None:
        """R14."""
        if not checksums:
            return
        for boundary in range(1, units(keys) + 1):
            for kind in Kind:
                key = Place(kind, keys, boundary).key
                kept, offered = self._stock.checksums.get(key), checksums.get(key)
                if kept is not None and offered is not None and kept != offered:
                    self.counts.alarms += 1
                    self._out.append(Alarm(key, tenant, kept, offered))

    def _publish_sealed(self) -> None:
        """What is whole goes into the index as soon as what it stands on is there; where that will never come, it is
        discarded. One may stand on another."""
        waiting = [put for put, opened in self._puts.items() if opened.phase is Phase.SEALED]
        while [put for put in waiting if self._try(put)]:
            waiting = [put for put in waiting if put in self._puts and self._puts[put].phase is Phase.SEALED]

    def _try(self, put: PutId) -> bool:
        """Whether it is over now."""
        opened = self._puts[put]
        keys, stretch = opened.keys, opened.stretch
        held = self._stock.cache.held_units(first_units(keys, stretch.first))
        if held < stretch.first:
            below = _places(keys, held, stretch.first)
            if all(place.key in self._filling for place in below):
                return False
            self._discard(put, Dropped.HOLE)
            return True
        self._leave(opened)
        states = [(at * HASH_UNIT_TOKENS, at * HASH_UNIT_TOKENS not in opened.unproven) for at in stretch.states]
        kept = (Checkpoint(tokens, proven) for tokens, proven in states)
        self._stock.publish(first_units(keys, stretch.stop), opened.residents, kept)
        self.counts.published += 1
        self._out.append(Published(put))
        self._over(put)
        return True

    def _discard(self, put: PutId, cause: Dropped) -> None:
        opened = self._puts[put]
        self._leave(opened)
        for resident in opened.residents:
            self._stock.checksums.pop(resident.key, None)
            self._stock.memory.let_go(resident)
        self.counts.discarded[cause] += 1
        self._out.append(Discarded(put, cause))
        self._over(put)

    def _leave(self, opened: Put) -> None:
        """It fills nothing any more."""
        self._pins.unpin(opened.base)
        self._stock.incoming_bytes -= self._lower_bytes(opened.stretch)
        for resident in opened.residents:
            del self._filling[resident.key]

    def _over(self, put: PutId) -> None:
        opened = self._puts[put]
        opened.move(Phase.OVER)
        if opened.writer.stopped:
            self._close(put)

    def _close(self, put: PutId) -> None:
        for resident in self._puts.pop(put).residents:
            if not resident.indexed:
                self._stock.memory.let_go(resident)


def _places(keys: bytes, first: int, stop: int, state: bool = False) -> tuple[Place, ...]:
    """The KV of units `first:stop`, and with `state` the state at the stop."""
    kv = tuple(Place(Kind.KV, keys, boundary) for boundary in range(first + 1, stop + 1))
    return (*kv, Place(Kind.STATE, keys, stop)) if state else kv
