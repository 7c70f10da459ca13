"""A shard with everything that happens around it: bytes in memory, a pump that may write late, and a tier below.

Each object's bytes are its key. Whoever reads anything else has read memory that was given to others.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from prfaas.cluster import NodeId
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS, KEY_BYTES
from prfaas.kvcache.layout import Window
from prfaas.kvcache.objects import (
    Alarm,
    Discarded,
    Drop,
    Granted,
    Kind,
    Leased,
    LeaseId,
    Load,
    Miss,
    ObjectKey,
    Published,
    PutId,
    Refused,
    Serve,
    Spill,
    Stored,
)
from prfaas.kvcache.prefix import Change, PrefixIndex
from prfaas.kvcache.shard import Shard, ShardSpec
from tests.unit.kvcache.prompts import keys, tokens

BLOCK = 64
#: Of a unit 2 blocks, of a state 4.
UNIT, STATE = 100, 250
SHARD = NodeId("shard")
FAR = 1e6


def spec(blocks: int = 1000, lower_bytes: int | None = None, state_bytes: int = STATE, **more: object) -> ShardSpec:
    return ShardSpec(
        memory_bytes=blocks * BLOCK,
        unit_bytes=UNIT,
        state_bytes=state_bytes,
        lower_bytes=lower_bytes,
        block_bytes=BLOCK,
        **more,  # type: ignore[arg-type]
    )


def keys_of(tenant: str, word: str) -> bytes:
    """Each tenant has its salt, so that equal words have other keys."""
    return keys(tenant[0].upper() + word)[KEY_BYTES:]


def object_at(path: bytes, boundary: int, kind: Kind = Kind.KV) -> ObjectKey:
    return ObjectKey(kind, path[(boundary - 1) * KEY_BYTES : boundary * KEY_BYTES])


def object_of(path: bytes, window: Window) -> ObjectKey:
    return object_at(path, window.stop // HASH_UNIT_TOKENS, Kind.STATE if window.state else Kind.KV)


@dataclass
class World:
    spec: ShardSpec
    now: float = 0.0
    memory: dict[int, ObjectKey] = field(default_factory=dict)
    #: The lower tier: the header of each object.
    below: dict[ObjectKey, bytes] = field(default_factory=dict)
    orders: deque[Load | Spill | Drop] = field(default_factory=deque)
    keys: dict[str, bytes] = field(default_factory=dict)
    granted: dict[str, Granted] = field(default_factory=dict)
    served: dict[str, tuple[Window, ...]] = field(default_factory=dict)
    missed: dict[str, str] = field(default_factory=dict)
    published: set[str] = field(default_factory=set)
    discarded: dict[str, str] = field(default_factory=dict)
    alarms: list[Alarm] = field(default_factory=list)
    #: Objects whose reading failed by order of the test.
    damaged: set[ObjectKey] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.shard = Shard(self.spec)
        self.follower = PrefixIndex()
        self.changes: list[Change] = []

    def obey(self) -> None:
        for command in self.shard.take():
            match command:
                case Change():
                    self.follower.apply(SHARD, command)
                    self.changes.append(command)
                case Load() | Spill() | Drop():
                    self.orders.append(command)
                case Serve(get=get, windows=windows):
                    self.served[get] = windows
                    self.reads(get)
                case Miss(get=get, cause=cause):
                    self.missed[get] = cause.value
                case Published(put=put):
                    self.published.add(put)
                case Discarded(put=put, cause=cause):
                    self.discarded[put] = cause.value
                case Alarm():
                    self.alarms.append(command)

    def put(
        self,
        put: str,
        tenant: str,
        word: str,
        states: Sequence[int] = (),
        unproven: Sequence[int] = (),
        checksums: dict[ObjectKey, int] | None = None,
        ttl_s: float = FAR,
        holder: str = "w0",
    ) -> Granted | Refused:
        path = keys_of(tenant, word)
        at = [tokens(unit) for unit in states]
        late = [tokens(unit) for unit in unproven]
        answer = self.shard.put(
            PutId(put), holder, tenant, path, tokens(len(word)), at, checksums or {}, self.now, ttl_s, late
        )
        if isinstance(answer, Granted) and answer:
            self.keys[put], self.granted[put] = path, answer
        self.obey()
        return answer

    def write(self, put: str) -> None:
        """The pump puts bytes where it was told to, as long as it has not been released."""
        for window in self.granted[put].windows:
            self.memory[window.offset] = object_of(self.keys[put], window)

    def received(self, put: str) -> None:
        self.write(put)
        self.shard.received(PutId(put))
        self.obey()

    def lost(self, put: str) -> None:
        self.shard.lost(PutId(put))
        self.obey()

    def released(self, put: str) -> None:
        """A last late frame, and then none."""
        self.write(put)
        self.granted.pop(put)
        self.shard.released(PutId(put))
        self.obey()

    def stored(self, tenant: str, word: str, states: Sequence[int] = (), put: str | None = None) -> None:
        """Put, received, released, and written through."""
        name = put or f"put {tenant} {word}"
        assert self.put(name, tenant, word, states)
        self.received(name)
        self.released(name)
        self.settle()

    def lease(
        self,
        lease: str,
        tenant: str,
        word: str,
        limit_tokens: int | None = None,
        joint: bool = True,
        ttl_s: float = FAR,
    ) -> Leased:
        path = keys_of(tenant, word)
        limit = tokens(len(word)) if limit_tokens is None else limit_tokens
        found = self.shard.lease(LeaseId(lease), "w0", tenant, path, limit, joint, self.now, ttl_s)
        if found:
            self.keys[lease] = path
        self.obey()
        return found

    def get(self, get: str, lease: str, first: int, stop: int, state: bool = False) -> None:
        self.keys[get] = self.keys[lease]
        self.shard.get(get, LeaseId(lease), first, stop, state, self.now)  # type: ignore[arg-type]
        self.obey()

    def got(self, get: str) -> bool:
        self.reads(get)
        del self.served[get]
        held = self.shard.got(get, self.now)  # type: ignore[arg-type]
        self.obey()
        return held

    def reads(self, get: str) -> None:
        for window in self.served[get]:
            if window.state and not self.spec.state_bytes:
                continue
            assert self.memory[window.offset] == object_of(self.keys[get], window), "read what is another's"

    def release(self, lease: str) -> bool:
        held = self.shard.release(LeaseId(lease), self.now)
        self.obey()
        return held

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.shard.tick(self.now)
        self.obey()

    def below_does(self, ok: bool = True) -> None:
        """The lower tier carries out one order."""
        order = self.orders.popleft()
        match order:
            case Load(op=op, key=key, window=window):
                assert key in self.below, "what is to be loaded was dropped"
                if ok:
                    self.memory[window.offset] = key
                else:
                    self.damaged.add(key)
                self.shard.loaded(op, ok)
            case Spill(op=op, key=key, path=path, window=window):
                assert self.memory[window.offset] == key, "what was to be written has gone"
                if ok:
                    self.below[key] = path
                self.shard.spilled(op, ok)
            case Drop(key=key):
                self.below.pop(key, None)
        self.obey()

    def settle(self, ok: bool = True) -> None:
        while self.orders:
            self.below_does(ok)

    def restart(self) -> None:
        """Killed, and started again on what the lower tier has."""
        below = self.below
        self.__init__(self.spec, self.now)  # type: ignore[misc]
        self.below = below
        self.shard.recovered([Stored(key, path) for key, path in self.below.items()])
        self.obey()

    def finds(self, tenant: str, word: str) -> tuple[int, int]:
        """(joint, KV) in units, by the index events."""
        match = self.follower.find(keys_of(tenant, word), tokens(len(word))).at(SHARD)
        return match.joint // HASH_UNIT_TOKENS, match.kv // HASH_UNIT_TOKENS

    def check(self) -> None:
        self.shard.check()
        self.follower.check()
        held = self.shard.stock.cache.index
        mine = {(run.path_keys(run.stop), tuple(sorted(run.states))) for run in held.runs()}
        theirs = {(run.path_keys(run.stop), tuple(sorted(run.states))) for run in self.follower.runs()}
        assert mine == theirs, "whoever follows the events has something else"
