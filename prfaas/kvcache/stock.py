"""What a shard has, and where: the index, memory, and the tier below, kept in step.

Every published object is indexed. Without a lower tier it is in memory; with one it is written through, may leave
memory and is then *cold*. What leaves the index leaves memory and the lower tier too, with all that stands on it (R21).
Pinned objects and those being read do not go (R18), unless they are lost by damage.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from prfaas.cluster import NodeId
from prfaas.kvcache.blocks import BlockPool, Shortage
from prfaas.kvcache.eviction import Sizes
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS, KEY_BYTES
from prfaas.kvcache.memory import Memory, Place, Resident, Writer
from prfaas.kvcache.node_cache import EVICT_ABOVE, EVICT_BATCH, Gone, NodeCache
from prfaas.kvcache.objects import Command, Drop, Kind, Load, ObjectKey, OpId, Spill, Stored
from prfaas.kvcache.pins import Pins
from prfaas.kvcache.placement import PROMPT_UNITS
from prfaas.kvcache.radix import Run, units
from prfaas.kvcache.states import Checkpoint

#: The one owner in a shard's index.
SELF = NodeId("self")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """`unit_bytes`: window of the KV of one hash unit. `state_bytes`: window of one state, 0 where the model has none
    and resumes anywhere. `lower_bytes`: None without a lower tier. `quota_bytes` of memory for each tenant, None: all
    of it; `quotas` for those that are named."""

    memory_bytes: int
    unit_bytes: int
    state_bytes: int
    lower_bytes: int | None = None
    block_bytes: int = 64 * 1024
    quota_bytes: int | None = None
    quotas: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Loaded:
    """How a reading ended: with the object in memory, or with what was lost by it."""

    key: ObjectKey
    resident: Resident | None
    lost: frozenset[ObjectKey] = frozenset()


class Stock:
    def __init__(self, spec: ShardSpec, pins: Pins, out: list[Command]) -> None:
        self._spec, self._pins, self._out = spec, pins, out
        pool = BlockPool(spec.memory_bytes, spec.block_bytes, quota_bytes=spec.quota_bytes, quotas=spec.quotas)
        self.memory = Memory(pool, spec.unit_bytes, spec.state_bytes)
        if spec.lower_bytes is None:
            sizes = Sizes(state=pool.whole_bytes(spec.state_bytes), unit=pool.whole_bytes(spec.unit_bytes))
            self.cache = NodeCache(SELF, pool.total_bytes, sizes)
        else:
            self.cache = NodeCache(SELF, spec.lower_bytes, Sizes(state=spec.state_bytes, unit=spec.unit_bytes))
        #: Of the lower tier, for what has been granted and is not published.
        self.incoming_bytes = 0
        self.checksums: dict[ObjectKey, int] = {}
        self.evictions: Counter[str] = Counter()
        self._spilling: dict[OpId, Resident] = {}
        self._loading: dict[OpId, Resident] = {}
        self._load_of: dict[ObjectKey, OpId] = {}
        self._last_op = 0

    @property
    def in_operation(self) -> int:
        """Readings and writings of the lower tier that have not been answered."""
        return len(self._spilling) + len(self._loading)

    def reserve(self, places: Sequence[Place], tenant: str, writer: Writer) -> tuple[Resident, ...] | Shortage:
        """Memory for all of them, after making room, or for none. What could not succeed with all that can go gone
        makes no room."""
        pool, needed_bytes = self.memory.pool, self.memory.needed_bytes(places)
        if needed_bytes > pool.quota_bytes(tenant):
            return Shortage.QUOTA
        if needed_bytes > pool.total_bytes - self.memory.in_flight_bytes:
            return Shortage.ROOM
        over_bytes = needed_bytes - pool.free_bytes + pool.total_bytes - int(EVICT_ABOVE * pool.total_bytes)
        if over_bytes > 0:
            self._evict(self._batch(over_bytes, pool.total_bytes))
        while isinstance(placed := self.memory.place(places, tenant, writer), Shortage):
            if placed is Shortage.QUOTA:
                over_bytes = pool.over_quota_bytes(tenant, needed_bytes)
                went = self._evict(self._batch(over_bytes, pool.quota_bytes(tenant)), tenant)
            else:
                went = self._evict(self._batch(needed_bytes, pool.total_bytes))
            if not went:
                break
        return placed

    def lower_room(self, nbytes: int) -> bool:
        """Whether so much more may come, after making room in the tier below."""
        lower_bytes = self._spec.lower_bytes
        if lower_bytes is None:
            return True
        if nbytes + self.incoming_bytes > lower_bytes:
            return False
        over_bytes = self.cache.used_bytes + self.incoming_bytes + nbytes - int(EVICT_ABOVE * lower_bytes)
        if over_bytes > 0:
            self._give_up(max(over_bytes, int(EVICT_BATCH * lower_bytes)))
        return self.cache.used_bytes + self.incoming_bytes + nbytes <= lower_bytes

    def publish(self, keys: bytes, residents: Iterable[Resident], kept: Iterable[Checkpoint]) -> None:
        """All of it at once: `residents` are sealed, and hold what `keys` and `kept` have more than the index."""
        self._out.extend(self.cache.publish(keys, kept))
        for resident in residents:
            self.memory.publish(resident)
            if self._spec.lower_bytes is not None:
                op = self._next_op()
                self._spilling[op] = resident
                self.memory.read(resident)
                self._out.append(Spill(op, resident.key, resident.place.path, resident.window))

    def spilled(self, op: OpId, ok: bool) -> None:
        resident = self._spilling.pop(op)
        if ok:
            self.memory.keep_below(resident)
        self.memory.unread(resident)

    def cold(self, places: Iterable[Place]) -> list[Place]:
        """Those of indexed objects that are not in memory, and that nobody is loading."""
        published, loading = self.memory.published, self._load_of
        return [place for place in places if place.key not in published and place.key not in loading]

    def load(self, places: Sequence[Place], tenant: str) -> Shortage | None:
        """Order that cold objects are brought into memory."""
        placed = self.reserve(places, tenant, Writer(stopped=True))
        if isinstance(placed, Shortage):
            return placed
        for resident in placed:
            op = self._next_op()
            resident.indexed = True
            self._loading[op], self._load_of[resident.key] = resident, op
            self._pins.pin((resident.key,))
            self._out.append(Load(op, resident.key, resident.window))
        return None

    def loaded(self, op: OpId, ok: bool) -> Loaded:
        resident = self._loading.pop(op)
        if not resident.indexed:
            self.memory.let_go(resident)
            return Loaded(resident.key, None)
        self._pins.unpin((resident.key,))
        del self._load_of[resident.key]
        if not ok:
            resident.indexed = False
            self.memory.let_go(resident)
            return Loaded(resident.key, None, self._lose(resident.place, "damaged"))
        self.memory.seal(resident)
        self.memory.publish(resident)
        self.memory.keep_below(resident)
        return Loaded(resident.key, resident)

    def load_of(self, key: ObjectKey) -> OpId | None:
        return self._load_of.get(key)

    def has_state(self, keys: bytes) -> bool:
        step = self.cache.index.end(keys)
        return step is not None and SELF in step.run.states.get(step.matched, {})

    def recovered(self, objects: Iterable[Stored]) -> None:
        """The longest prompts first, so that each is taken up once."""
        assert not self.cache.used_bytes, "a shard recovers before anything else"
        stored = sorted(objects, key=lambda each: (-len(each.path), each.key.kind is Kind.STATE, each.path))
        known = {each.key.unit for each in stored if each.key.kind is Kind.KV}
        for each in stored:
            self._take_up(each, known)
        lower_bytes = self._spec.lower_bytes
        assert lower_bytes is not None, "only a lower tier survives"
        over_bytes = self.cache.used_bytes - int(EVICT_ABOVE * lower_bytes)
        if over_bytes > 0:
            self._give_up(over_bytes)

    def check(self) -> None:
        self.cache.check()
        self.memory.check()
        kv, states = set[ObjectKey](), set[ObjectKey]()
        for run in self.cache.index.runs():
            kv.update(ObjectKey(Kind.KV, run.unit_key(at)) for at in range(run.start + 1, run.stop + 1))
            states.update(ObjectKey(Kind.STATE, run.unit_key(at)) for at in run.states)
        indexed, published = kv | states, self.memory.published.keys()
        assert published <= indexed, "memory has what the index has not"
        if self._spec.lower_bytes is None:
            assert published == indexed, "the index has what is nowhere"
        else:
            assert self.cache.used_bytes + self.incoming_bytes <= self._spec.lower_bytes
        assert self._load_of.keys() <= indexed - published, "what is being loaded is cold"

    def check_users(self, pins: Counter[ObjectKey], readers: Counter[str]) -> None:
        """Given what leases, puts and gets pin and read."""
        self._pins.check(pins + Counter(self._load_of.keys()))
        readers = readers + Counter(resident.owner for resident in self._spilling.values())
        for resident in self.memory.residents():
            assert resident.readers == readers[resident.owner], f"{resident.key} is read by {resident.readers}"

    def _take_up(self, stored: Stored, known: set[bytes]) -> None:
        path, key = stored.path, stored.key
        whole = 0 < units(path) <= PROMPT_UNITS and len(path) % KEY_BYTES == 0 and path[-KEY_BYTES:] == key.unit
        if whole and self.cache.held_units(path) < units(path):
            parts = [path[start : start + KEY_BYTES] for start in range(0, len(path), KEY_BYTES)]
            complete = next((number for number, part in enumerate(parts) if part not in known), len(parts))
            if complete > self.cache.held_units(path):
                self._out.extend(self.cache.publish(path[: complete * KEY_BYTES], ()))
        held = whole and self.cache.held_units(path) == units(path)
        if held and key.kind is Kind.STATE and self._spec.state_bytes:
            self._out.extend(self.cache.publish(path, (Checkpoint(units(path) * HASH_UNIT_TOKENS, True),)))
            held = self.has_state(path)
        if not held:
            self._out.append(Drop(key))
        elif stored.checksum is not None:
            self.checksums[key] = stored.checksum

    def _batch(self, nbytes: int, of_bytes: int) -> int:
        """How much to free where so much is needed. To choose from the index is worth it only for many; to go by the
        order of use costs the same for each, and nobody should wait for more than he needs."""
        return max(nbytes, int(EVICT_BATCH * of_bytes)) if self._spec.lower_bytes is None else max(nbytes, 1)

    def _evict(self, nbytes: int, tenant: str | None = None) -> bool:
        """Make room in memory, of one tenant or of all. Whether anything went."""
        if self._spec.lower_bytes is None:
            return self._give_up(nbytes, tenant)
        return self._cool(nbytes, tenant) or self._forget(nbytes, tenant)

    def _give_up(self, nbytes: int, tenant: str | None = None) -> bool:
        """From the index, in the order of R18."""

        def held(run: Run, boundary: int, state: bool) -> bool:
            return self._held(ObjectKey(Kind.STATE if state else Kind.KV, run.unit_key(boundary)), tenant)

        went = self.cache.give_up(nbytes, held)
        for gone in went:
            assert gone.cause is not None
            self._went(gone, gone.cause.value)
        return bool(went)

    def _cool(self, nbytes: int, tenant: str | None) -> bool:
        """From memory alone, what the lower tier has, the longest unused first."""
        cooled: list[Resident] = []
        for resident in self.memory.longest_unused(below=True):
            if nbytes <= 0:
                break
            if not self._held(resident.key, tenant):
                cooled.append(resident)
                nbytes -= self.memory.needed_bytes((resident.place,))
        for resident in cooled:
            self.memory.withdraw(resident.key)
        self.evictions["cold"] += len(cooled)
        return bool(cooled)

    def _forget(self, nbytes: int, tenant: str | None) -> bool:
        """What only memory has, the longest unused first, each with what stands on it, if nobody holds any of that."""
        pool, went = self.memory.pool, False
        enough_bytes = pool.free_bytes + nbytes
        while pool.free_bytes < enough_bytes and (place := self._forgettable(tenant)) is not None:
            self._lose(place, "unspilled")
            went = True
        return went

    def _forgettable(self, tenant: str | None) -> Place | None:
        for resident in self.memory.longest_unused(below=False):
            if not self._held(resident.key, tenant) and not self._held_above(resident.place):
                return resident.place
        return None

    def _held(self, key: ObjectKey, tenant: str | None = None) -> bool:
        resident = self.memory.published.get(key)
        if resident is not None and (resident.in_use or (tenant is not None and resident.tenant != tenant)):
            return True
        return key in self._pins

    def _held_above(self, place: Place) -> bool:
        if place.kind is Kind.STATE:
            return False
        return any(
            self._held(ObjectKey(kind, run.unit_key(at)))
            for run, start in self.cache.index.below(place.path, SELF)
            for at in range(start + 1, run.stop + 1)
            for kind in Kind
        )

    def _lose(self, place: Place, cause: str) -> frozenset[ObjectKey]:
        """Take an object out of the index by name. Returns all that went."""
        gone = self.cache.remove(place.path) if place.kind is Kind.KV else self.cache.remove_state(place.path)
        return self._went(gone, cause) if gone is not None else frozenset()

    def _went(self, gone: Gone, cause: str) -> frozenset[ObjectKey]:
        self._out.append(gone.change)
        keys = [*(ObjectKey(Kind.STATE, unit) for unit in gone.states), *(ObjectKey(Kind.KV, unit) for unit in gone.kv)]
        self.evictions[cause] += len(keys)
        for key in keys:
            self.checksums.pop(key, None)
            self.memory.withdraw(key)
            if (op := self._load_of.pop(key, None)) is not None:
                self._loading[op].indexed = False
                self._pins.unpin((key,))
            if self._spec.lower_bytes is not None:
                self._out.append(Drop(key))
        return frozenset(keys)

    def _next_op(self) -> OpId:
        self._last_op += 1
        return OpId(self._last_op)
