"""Puts: room that is granted, filled, and published whole or not at all (R16, R19, R22).

A put keeps its memory from its grant to `released`, whatever has become of it by then.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prfaas.kvcache.blocks import Shortage
from prfaas.kvcache.counts import Counts
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS
from prfaas.kvcache.memory import Place, places_of
from prfaas.kvcache.objects import (
    Alarm,
    Command,
    Discarded,
    Dropped,
    Granted,
    Kind,
    ObjectKey,
    Published,
    PutId,
    Refused,
)
from prfaas.kvcache.pins import Pins
from prfaas.kvcache.puts import Phase, Put, Stretch, missing
from prfaas.kvcache.radix import first_units, units
from prfaas.kvcache.states import Checkpoint
from prfaas.kvcache.stock import ShardSpec, Stock


class Writing:
    def __init__(self, spec: ShardSpec, stock: Stock, pins: Pins, out: list[Command], counts: Counts) -> None:
        self._spec, self._stock, self._pins, self._out, self._counts = spec, stock, pins, out, counts
        self._puts: dict[PutId, Put] = {}
        #: What is granted and not published, and by which put.
        self._filling: dict[ObjectKey, PutId] = {}

    @property
    def puts(self) -> int:
        return len(self._puts)

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
        the first, as much as one transfer moves, with the states in it; where no KV is missing, the last state that is.
        All of that or nothing is reserved."""
        if put in self._puts:
            return self._refuse(Refused.KNOWN)
        wanted = min(stop_tokens // HASH_UNIT_TOKENS, units(keys))
        keys = first_units(keys, wanted)
        self._compare(keys, tenant, checksums)
        stretch = self._missing(keys, states)
        if stretch is None:
            return Granted(stop_tokens, stop_tokens)
        base = tuple(place.key for place in places_of(keys, 0, min(stretch.first, self._stock.cache.held_units(keys))))
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
        self.publish_sealed()

    def lost(self, put: PutId, cause: Dropped = Dropped.LOST) -> None:
        """It will never be whole. Its memory waits in quarantine until `released` (R16)."""
        opened = self._puts.get(put)
        if opened is not None and opened.phase is Phase.FILLING:
            self._discard(put, cause)
            self.publish_sealed()

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

    def expire(self, now: float) -> None:
        self._expire(put for put, opened in self._puts.items() if now >= opened.expires_at)

    def publish_sealed(self) -> None:
        """What is whole goes into the index as soon as what it stands on is there; where that will never come, it is
        discarded. One may stand on another."""
        waiting = [put for put, opened in self._puts.items() if opened.phase is Phase.SEALED]
        while [put for put in waiting if self._try(put)]:
            waiting = [put for put in waiting if put in self._puts and self._puts[put].phase is Phase.SEALED]

    def pinned(self) -> Iterator[ObjectKey]:
        """Once for each put that stands on it."""
        for opened in self._puts.values():
            if opened.phase is not Phase.OVER:
                yield from opened.base

    def check(self) -> None:
        filling: dict[ObjectKey, PutId] = {}
        incoming_bytes = 0
        for put, each in self._puts.items():
            assert each.phase is not Phase.OVER or not each.writer.stopped, f"{put} is over and still here"
            if each.phase is not Phase.OVER:
                filling |= {resident.key: put for resident in each.residents}
                incoming_bytes += self._lower_bytes(each.stretch)
        assert filling == self._filling, "what is being filled"
        assert incoming_bytes == self._stock.incoming_bytes
        assert not self._filling.keys() & self._stock.memory.published.keys(), "published before it was written"

    def _expire(self, puts: Iterable[PutId]) -> None:
        for put in list(puts):
            if self._puts[put].phase is not Phase.OVER:
                self._discard(put, Dropped.EXPIRED)
        self.publish_sealed()

    def _missing(self, keys: bytes, states: Sequence[int]) -> Stretch | None:
        boundaries = {tokens // HASH_UNIT_TOKENS for tokens in states if tokens % HASH_UNIT_TOKENS == 0}
        usable = sorted(at for at in boundaries if 0 < at <= units(keys) and self._spec.state_bytes)
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
        self._counts.refused[cause] += 1
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
                    self._counts.alarms += 1
                    self._out.append(Alarm(key, tenant, kept, offered))

    def _try(self, put: PutId) -> bool:
        """Whether it is over now."""
        opened = self._puts[put]
        keys, stretch = opened.keys, opened.stretch
        held = self._stock.cache.held_units(first_units(keys, stretch.first))
        if held < stretch.first:
            below = places_of(keys, held, stretch.first)
            if all(place.key in self._filling for place in below):
                return False
            self._discard(put, Dropped.HOLE)
            return True
        self._leave(opened)
        states = [(at * HASH_UNIT_TOKENS, at * HASH_UNIT_TOKENS not in opened.unproven) for at in stretch.states]
        kept = (Checkpoint(tokens, proven) for tokens, proven in states)
        self._stock.publish(first_units(keys, stretch.stop), opened.residents, kept)
        self._counts.published += 1
        self._out.append(Published(put))
        self._over(put)
        return True

    def _discard(self, put: PutId, cause: Dropped) -> None:
        opened = self._puts[put]
        self._leave(opened)
        for resident in opened.residents:
            self._stock.checksums.pop(resident.key, None)
            self._stock.memory.let_go(resident)
        self._counts.discarded[cause] += 1
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
