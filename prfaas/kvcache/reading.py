"""Leases on what is in the index, and gets under them (R15, R17).

What a lease has found is pinned until it ends. A get keeps its memory from `Serve` to `got`, whatever becomes of its
lease in between.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prfaas.kvcache.blocks import Shortage
from prfaas.kvcache.counts import Counts
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS
from prfaas.kvcache.layout import Window
from prfaas.kvcache.memory import Resident, places_of
from prfaas.kvcache.objects import Command, GetId, Leased, LeaseId, Miss, Missed, ObjectKey, OpId, Serve
from prfaas.kvcache.pins import Lease, Pins
from prfaas.kvcache.stock import Stock


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


class Reading:
    def __init__(self, stock: Stock, pins: Pins, out: list[Command], counts: Counts, resumes_anywhere: bool) -> None:
        self._stock, self._pins, self._out, self._counts = stock, pins, out, counts
        self._resumes_anywhere = resumes_anywhere
        self._leases: dict[LeaseId, Lease] = {}
        self._gets: dict[GetId, _Get] = {}

    @property
    def leases(self) -> int:
        return len(self._leases)

    @property
    def gets(self) -> int:
        return len(self._gets)

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
        assert lease not in self._leases, f"{lease} exists"
        resume = joint and not self._resumes_anywhere
        found = self._stock.cache.lookup(keys, limit_tokens, resumes=resume)
        aligned_tokens = found.kv // HASH_UNIT_TOKENS * HASH_UNIT_TOKENS
        kv_tokens = found.joint if resume else aligned_tokens
        self._counts.looked_up_tokens += limit_tokens
        self._counts.kv_hit_tokens += found.kv
        if joint:
            self._counts.joint_hit_tokens += kv_tokens
            self._counts.unaligned_tokens += found.kv - aligned_tokens
            self._counts.stateless_tokens += aligned_tokens - kv_tokens
        if not kv_tokens:
            return Leased(0, 0, aligned_tokens)
        boundary = kv_tokens // HASH_UNIT_TOKENS
        pinned = tuple(place.key for place in places_of(keys, 0, boundary, state=resume))
        self._pins.pin(pinned)
        self._stock.memory.use(pinned)
        state_tokens = kv_tokens if joint else 0
        self._leases[lease] = Lease(holder, tenant, keys, kv_tokens, state_tokens, pinned, now + ttl_s)
        return Leased(kv_tokens, state_tokens, aligned_tokens)

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
        places = places_of(held.keys, first, stop, state=state and not self._resumes_anywhere)
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

    def arrived(self, op: OpId, resident: Resident) -> None:
        """What some gets wait for is in memory now."""
        for get, opened in self._gets.items():
            if op in opened.missing:
                opened.missing.remove(op)
                self._read(opened, resident)
                if not opened.missing:
                    self._out.append(Serve(get, opened.windows))

    def lost(self, keys: frozenset[ObjectKey]) -> None:
        """These objects are gone although they were pinned: leases on them are worth nothing."""
        for lease, held in self._leases.items():
            if not held.broken and not keys.isdisjoint(held.pinned):
                held.broken = True
                self._counts.broken_leases += 1
                self._abandon(lease, Missed.DAMAGED)

    def expire(self, now: float) -> None:
        self._expire(lease for lease, held in self._leases.items() if now >= held.expires_at)

    def pinned(self) -> Iterator[ObjectKey]:
        """Once for each lease."""
        for held in self._leases.values():
            yield from held.pinned

    def readers(self) -> Counter[str]:
        """How many gets read each owner's memory."""
        readers: Counter[str] = Counter()
        for opened in self._gets.values():
            readers.update(resident.owner for resident in opened.reading)
            assert not opened.missing or opened.lease in self._leases, "a get that nobody waits for"
        return readers

    def _holds(self, lease: LeaseId, now: float) -> bool:
        """Whether a lease is in force. One whose time has passed ends here, if `tick` was not first."""
        held = self._leases.get(lease)
        if held is not None and now >= held.expires_at:
            self._counts.expired_leases += 1
            self._end(lease)
            return False
        return held is not None and not held.broken

    def _end(self, lease: LeaseId) -> None:
        self._pins.unpin(self._leases.pop(lease).pinned)
        self._abandon(lease, Missed.EXPIRED)

    def _expire(self, leases: Iterable[LeaseId]) -> None:
        for lease in list(leases):
            self._counts.expired_leases += 1
            self._end(lease)

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
        self._counts.misses[cause] += 1
        self._out.append(Miss(get, cause))
