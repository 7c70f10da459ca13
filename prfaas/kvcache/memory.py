"""The memory of a shard: a span of the pool for each object that is there, who reads it and who may still write it.

A span becomes free only when nobody reads it and its writer has been seen to stop (R16).
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from prfaas.kvcache.blocks import BlockClass, BlockPool, BlockState, Fit, Shortage, Wanted
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS, KEY_BYTES
from prfaas.kvcache.layout import Window
from prfaas.kvcache.objects import Kind, ObjectKey


@dataclass(slots=True, eq=False)
class Writer:
    """Whoever fills some spans. `stopped` once no thread of it can touch them."""

    stopped: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """An object within its prompt: `keys` has the units up to its boundary, and maybe more."""

    kind: Kind
    keys: bytes
    boundary: int

    @property
    def key(self) -> ObjectKey:
        stop = self.boundary * KEY_BYTES
        return ObjectKey(self.kind, self.keys[stop - KEY_BYTES : stop])

    @property
    def path(self) -> bytes:
        return self.keys[: self.boundary * KEY_BYTES]

    def window(self, offset: int) -> Window:
        stop = self.boundary * HASH_UNIT_TOKENS
        state = self.kind is Kind.STATE
        return Window(stop if state else stop - HASH_UNIT_TOKENS, stop, offset, state)


@dataclass(slots=True, eq=False)
class Resident:
    """`below`: the lower tier has it too. `indexed`: the index has it, or will once it is loaded. `turn`: its place in
    the order of use, while it is published."""

    owner: str
    key: ObjectKey
    place: Place
    tenant: str
    offset: int
    writer: Writer
    readers: int = 0
    below: bool = False
    indexed: bool = False
    turn: int = 0

    @property
    def in_use(self) -> bool:
        """Taking it out of the index now would free nothing."""
        return self.readers > 0 or not self.writer.stopped

    @property
    def window(self) -> Window:
        return self.place.window(self.offset)


@dataclass(slots=True)
class Memory:
    pool: BlockPool
    unit_bytes: int
    state_bytes: int
    published: dict[ObjectKey, Resident] = field(default_factory=dict)
    #: What is published, by turn: what the lower tier has too, and what it has not.
    _copies: OrderedDict[int, Resident] = field(default_factory=OrderedDict)
    _originals: OrderedDict[int, Resident] = field(default_factory=OrderedDict)
    _turn: int = 0
    #: All that has a span, by owner.
    _all: dict[str, Resident] = field(default_factory=dict)
    _count: int = 0

    def needed_bytes(self, places: Sequence[Place]) -> int:
        return sum(self.pool.whole_bytes(self._nbytes(place)) for place in places)

    def place(self, places: Sequence[Place], tenant: str, writer: Writer) -> tuple[Resident, ...] | Shortage:
        """Spans for all of them, to be filled, or for none. States are large and lie at the other end of the pool."""
        owners = [str(self._count + number) for number in range(len(places))]
        wanted = [
            Wanted(owner, self._nbytes(place), Fit.HIGH if place.kind is Kind.STATE else Fit.LOW)
            for owner, place in zip(owners, places, strict=True)
        ]
        spans = self.pool.reserve_all(wanted, BlockClass.PREFIX, tenant)
        if isinstance(spans, Shortage):
            return spans
        self._count += len(places)
        placed = tuple(
            Resident(owner, place.key, place, tenant, span.offset, writer)
            for owner, place, span in zip(owners, places, spans, strict=True)
        )
        for resident in placed:
            self.pool.move(resident.owner, BlockState.FILLING)
            self._all[resident.owner] = resident
        return placed

    def seal(self, resident: Resident) -> None:
        self.pool.move(resident.owner, BlockState.SEALED)

    def publish(self, resident: Resident) -> None:
        assert resident.key not in self.published
        self.pool.move(resident.owner, BlockState.PUBLISHED)
        resident.indexed = True
        self.published[resident.key] = resident
        self._line_up(resident)

    def use(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            resident = self.published.get(key)
            if resident is not None:
                self._order(resident).pop(resident.turn)
                self._line_up(resident)

    def keep_below(self, resident: Resident) -> None:
        """The lower tier has it too, from now on."""
        published = self.published.get(resident.key) is resident
        if published:
            self._order(resident).pop(resident.turn)
        resident.below = True
        if published:
            self._line_up(resident)

    def longest_unused(self, below: bool) -> Iterator[Resident]:
        """What is published, in that order: what the lower tier has too, or what it has not. To be left alone
        meanwhile."""
        return iter((self._copies if below else self._originals).values())

    def withdraw(self, key: ObjectKey) -> Resident | None:
        """Take a published object's copy out of memory, at once or as soon as nobody uses it."""
        resident = self.published.pop(key, None)
        if resident is not None:
            self._order(resident).pop(resident.turn)
            resident.indexed = False
            self.let_go(resident)
        return resident

    def read(self, resident: Resident) -> None:
        resident.readers += 1

    def unread(self, resident: Resident) -> None:
        resident.readers -= 1
        assert resident.readers >= 0
        if not resident.indexed:
            self.let_go(resident)

    def let_go(self, resident: Resident) -> None:
        """Of what is not published: free it as far as that is safe. To be called again when its last reader or its
        writer has stopped."""
        state = self.pool.state(resident.owner)
        if resident.readers:
            if state is BlockState.PUBLISHED:
                self.pool.move(resident.owner, BlockState.EVICTING)
        elif not resident.writer.stopped:
            if state is not BlockState.QUARANTINE:
                self.pool.move(resident.owner, BlockState.QUARANTINE)
        elif state is not BlockState.FREE:
            if state is BlockState.FILLING:
                self.pool.move(resident.owner, BlockState.QUARANTINE)
            self.pool.free(resident.owner)
            del self._all[resident.owner]

    @property
    def in_flight_bytes(self) -> int:
        """What no eviction can free."""
        pool = self.pool
        return pool.total_bytes - pool.free_bytes - pool.used_bytes(BlockClass.PREFIX, BlockState.PUBLISHED)

    def residents(self) -> Iterator[Resident]:
        return iter(self._all.values())

    def check(self) -> None:
        self.pool.check()
        assert self.pool.spans == len(self._all), "a span that no object has"
        assert len(self._copies) + len(self._originals) == len(self.published)
        for key, resident in self.published.items():
            assert resident.key == key and resident.indexed
            assert self._order(resident)[resident.turn] is resident
            assert self.pool.state(resident.owner) is BlockState.PUBLISHED
        for resident in self._all.values():
            match self.pool.state(resident.owner):
                case BlockState.PUBLISHED:
                    assert self.published.get(resident.key) is resident
                case BlockState.EVICTING:
                    assert resident.readers and not resident.indexed
                case BlockState.QUARANTINE:
                    assert not resident.readers and not resident.writer.stopped
                case BlockState.FILLING | BlockState.SEALED:
                    assert not resident.readers
                case state:
                    raise AssertionError(f"an object in {state}")

    def _order(self, resident: Resident) -> OrderedDict[int, Resident]:
        return self._copies if resident.below else self._originals

    def _line_up(self, resident: Resident) -> None:
        """Behind all others: it has just been used."""
        self._turn += 1
        resident.turn = self._turn
        self._order(resident)[resident.turn] = resident

    def _nbytes(self, place: Place) -> int:
        return self.state_bytes if place.kind is Kind.STATE else self.unit_bytes


def places_of(keys: bytes, first: int, stop: int, state: bool = False) -> tuple[Place, ...]:
    """The KV of units `first:stop`, and with `state` the state at the stop."""
    kv = tuple(Place(Kind.KV, keys, boundary) for boundary in range(first + 1, stop + 1))
    return (*kv, Place(Kind.STATE, keys, stop)) if state else kv
