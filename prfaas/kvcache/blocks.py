"""Who owns which bytes of a KV pool: contiguous runs of fixed-size blocks, each for a purpose and in a state (R1).

A span lies in one run, because every reader wants it whole: the engine views a tensor of all tokens as one array, and a
part goes from socket to its place in one call. The price is fragmentation, which whole blocks and placement keep small.
Free runs are disjoint, sorted and never touch each other. Spans that ever shared a byte have different generations.
Each class of owners may always have its floor, whatever the others want (R19), and no tenant more than its quota (R20).
"""

import bisect
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

BLOCK_BYTES = 64 * 1024
#: Generations travel as 32 bits and wrap; 0 is never given out.
GENERATIONS = (1 << 32) - 1
_NO_QUOTA_BYTES = 1 << 62


class BlockClass(Enum):
    """PREFIX: objects that prompts share. TRANSFER: what one attempt sends or receives. SCRATCH: neither."""

    PREFIX = "prefix"
    TRANSFER = "transfer"
    SCRATCH = "scratch"


class BlockState(Enum):
    """FILLING: somebody writes. SEALED: whole and immutable. PUBLISHED: in the index. HANDED: the receiver has it.
    EVICTING: out of the index, and still being read. QUARANTINE: a writer may not have stopped (R16)."""

    FREE = "free"
    RESERVED = "reserved"
    FILLING = "filling"
    SEALED = "sealed"
    PUBLISHED = "published"
    HANDED = "handed"
    EVICTING = "evicting"
    QUARANTINE = "quarantine"


NEXT = {
    BlockState.RESERVED: {BlockState.FILLING, BlockState.FREE},
    BlockState.FILLING: {BlockState.SEALED, BlockState.QUARANTINE},
    BlockState.SEALED: {BlockState.PUBLISHED, BlockState.HANDED, BlockState.QUARANTINE, BlockState.FREE},
    BlockState.PUBLISHED: {BlockState.EVICTING, BlockState.QUARANTINE, BlockState.FREE},
    BlockState.HANDED: {BlockState.QUARANTINE, BlockState.FREE},
    BlockState.EVICTING: {BlockState.QUARANTINE, BlockState.FREE},
    BlockState.QUARANTINE: {BlockState.FREE},
}


class Fit(Enum):
    """Where in the pool. BEST: the shortest run that fits, so that long ones stay whole for the long sequences that
    need them. LOW and HIGH: as near as possible to that end, so that small spans and large ones stay apart."""

    BEST = "best"
    LOW = "low"
    HIGH = "high"


class Shortage(Enum):
    """Why nothing was reserved. FLOOR: what is free belongs to other classes. ROOM: no run is free that is as long."""

    QUOTA = "quota"
    FLOOR = "floor"
    ROOM = "room"


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of the pool that one owner holds. A span of no bytes exists too: its owner has asked for nothing and got
    it."""

    offset: int
    nbytes: int
    generation: int


@dataclass(frozen=True, slots=True)
class Wanted:
    owner: str
    nbytes: int
    fit: Fit = Fit.BEST


@dataclass(frozen=True, slots=True, order=True)
class _Run:
    """Blocks `start:stop`."""

    start: int
    stop: int

    @property
    def blocks(self) -> int:
        return self.stop - self.start


@dataclass(slots=True)
class _Held:
    span: Span
    blocks: int
    kind: BlockClass
    tenant: str
    state: BlockState = BlockState.RESERVED


class BlockPool:
    """Gives out spans and takes them back. An owner has at most one. `quota_bytes` is for each tenant that `quotas`
    does not name; None is no quota."""

    def __init__(
        self,
        total_bytes: int,
        block_bytes: int = BLOCK_BYTES,
        floors: Mapping[BlockClass, int] = MappingProxyType({}),
        quota_bytes: int | None = None,
        quotas: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._block_bytes = block_bytes
        self._blocks = total_bytes // block_bytes
        self._floors = {kind: nbytes // block_bytes for kind, nbytes in floors.items()}
        assert sum(self._floors.values()) <= self._blocks, "floors that no pool of this size can promise"
        self._quota_bytes, self._quotas = quota_bytes, quotas
        self._free = [_Run(0, self._blocks)] if self._blocks else []
        self._free_blocks = self._blocks
        self._held: dict[str, _Held] = {}
        self._generation = 1
        self._used: Counter[tuple[BlockClass, BlockState]] = Counter()
        self._charged: Counter[str] = Counter()
        self._asked_bytes: Counter[BlockClass] = Counter()

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    @property
    def total_bytes(self) -> int:
        return self._blocks * self._block_bytes

    @property
    def free_bytes(self) -> int:
        return self._free_blocks * self._block_bytes

    @property
    def spans(self) -> int:
        return len(self._held)

    def used_bytes(self, kind: BlockClass, state: BlockState | None = None) -> int:
        """In whole blocks; without `state`, in all of them."""
        states = tuple(NEXT) if state is None else (state,)
        return sum(self._used[kind, each] for each in states) * self._block_bytes

    def padding_bytes(self, kind: BlockClass) -> int:
        """What whole blocks cost more than was asked for (R3)."""
        return self.used_bytes(kind) - self._asked_bytes[kind]

    def charged_bytes(self, tenant: str) -> int:
        return self._charged[tenant] * self._block_bytes

    def whole_bytes(self, nbytes: int) -> int:
        """What a span of `nbytes` takes."""
        return -(-nbytes // self._block_bytes) * self._block_bytes

    def over_quota_bytes(self, tenant: str, nbytes: int) -> int:
        """How much the tenant would have to give back before it can have `nbytes` more, in whole blocks."""
        return max(0, self.charged_bytes(tenant) + nbytes - self.quota_bytes(tenant))

    def quota_bytes(self, tenant: str) -> int:
        quota_bytes = self._quotas.get(tenant, self._quota_bytes)
        return _NO_QUOTA_BYTES if quota_bytes is None else quota_bytes

    def span(self, owner: str) -> Span | None:
        held = self._held.get(owner)
        return held.span if held is not None else None

    def state(self, owner: str) -> BlockState:
        held = self._held.get(owner)
        return held.state if held is not None else BlockState.FREE

    def reserve(self, owner: str, nbytes: int, kind: BlockClass = BlockClass.TRANSFER, tenant: str = "") -> Span | None:
        """The whole of `nbytes`, or None."""
        spans = self.reserve_all((Wanted(owner, nbytes),), kind, tenant)
        return None if isinstance(spans, Shortage) else spans[0]

    def reserve_all(self, wanted: Sequence[Wanted], kind: BlockClass, tenant: str = "") -> tuple[Span, ...] | Shortage:
        """All of it or nothing: nobody ever waits holding half of what it needs (R19)."""
        blocks = sum(-(-each.nbytes // self._block_bytes) for each in wanted)
        if self.over_quota_bytes(tenant, blocks * self._block_bytes):
            return Shortage.QUOTA
        if blocks > self._free_blocks:
            return Shortage.ROOM
        if blocks and blocks > self._free_blocks - self._promised(kind):
            return Shortage.FLOOR
        for number, each in enumerate(wanted):
            if not self._give(each, kind, tenant):
                for given in wanted[:number]:
                    self._take_back(given.owner)
                return Shortage.ROOM
        return tuple(self._held[each.owner].span for each in wanted)

    def move(self, owner: str, state: BlockState) -> None:
        """To any state but FREE."""
        held = self._held[owner]
        assert state is not BlockState.FREE and state in NEXT[held.state], f"{owner}: {held.state} -> {state}"
        self._used[held.kind, held.state] -= held.blocks
        self._used[held.kind, state] += held.blocks
        held.state = state

    def free(self, owner: str) -> None:
        """Idempotent. From here on the generation of the freed span is stale."""
        held = self._held.get(owner)
        if held is None:
            return
        assert BlockState.FREE in NEXT[held.state], f"{owner}: {held.state} -> free"
        self._take_back(owner)
        self._generation = self._generation % GENERATIONS + 1

    def check(self) -> None:
        """R23, and that what is counted is what is there."""
        runs = sorted([*self._free, *(self._run(held.span) for held in self._held.values() if held.blocks)])
        assert sum(run.blocks for run in runs) == self._blocks, "free + reserved != total"
        assert all(a.stop == b.start for a, b in itertools.pairwise(runs)), (
            f"a block is owned twice or by nobody: {runs}"
        )
        assert all(a.stop < b.start for a, b in itertools.pairwise(self._free)), f"not coalesced: {self._free}"
        used: Counter[tuple[BlockClass, BlockState]] = Counter()
        charged: Counter[str] = Counter()
        asked_bytes: Counter[BlockClass] = Counter()
        for held in self._held.values():
            used[held.kind, held.state] += held.blocks
            charged[held.tenant] += held.blocks
            asked_bytes[held.kind] += held.span.nbytes
        assert used == self._used, f"{used} blocks are held, {self._used} accounted for"
        assert charged == self._charged, f"tenants hold {charged}, {self._charged} accounted for"
        assert asked_bytes == self._asked_bytes
        assert self._free_blocks + used.total() == self._blocks, "free + all other states != total"
        unmet = sum(max(0, floor - self._used_blocks(kind)) for kind, floor in self._floors.items())
        assert self._free_blocks >= unmet, f"{self._free_blocks} blocks are free, floors need {unmet}"
        for tenant in charged:
            assert not self.over_quota_bytes(tenant, 0), f"{tenant} is over its quota"

    def _promised(self, kind: BlockClass) -> int:
        """Free blocks that other classes are to find."""
        floors = self._floors.items()
        return sum(max(0, floor - self._used_blocks(other)) for other, floor in floors if other is not kind)

    def _used_blocks(self, kind: BlockClass) -> int:
        return sum(self._used[kind, state] for state in NEXT)

    def _give(self, wanted: Wanted, kind: BlockClass, tenant: str) -> bool:
        assert wanted.owner not in self._held, f"{wanted.owner} already holds a span"
        blocks = -(-wanted.nbytes // self._block_bytes)
        start = self._take(blocks, wanted.fit) if blocks else 0
        if start is None:
            return False
        span = Span(start * self._block_bytes, wanted.nbytes, self._generation)
        self._held[wanted.owner] = _Held(span, blocks, kind, tenant)
        self._free_blocks -= blocks
        self._used[kind, BlockState.RESERVED] += blocks
        self._charged[tenant] += blocks
        self._asked_bytes[kind] += wanted.nbytes
        return True

    def _take_back(self, owner: str) -> None:
        held = self._held.pop(owner)
        self._free_blocks += held.blocks
        self._used[held.kind, held.state] -= held.blocks
        self._charged[held.tenant] -= held.blocks
        if not self._charged[held.tenant]:
            del self._charged[held.tenant]
        self._asked_bytes[held.kind] -= held.span.nbytes
        if held.blocks:
            self._give_back(self._run(held.span))

    def _take(self, blocks: int, fit: Fit) -> int | None:
        index = self._fitting(blocks, fit)
        if index is None:
            return None
        run = self._free.pop(index)
        start = run.stop - blocks if fit is Fit.HIGH else run.start
        if run.blocks > blocks:
            left = _Run(run.start, start) if fit is Fit.HIGH else _Run(run.start + blocks, run.stop)
            self._free.insert(index, left)
        return start

    def _fitting(self, blocks: int, fit: Fit) -> int | None:
        """Of a free run that is long enough; of equals, the lowest."""
        numbers = range(len(self._free))
        fitting = (n for n in (reversed(numbers) if fit is Fit.HIGH else numbers) if self._free[n].blocks >= blocks)
        if fit is Fit.BEST:
            return min(fitting, key=lambda number: self._free[number].blocks, default=None)
        return next(fitting, None)

    def _give_back(self, run: _Run) -> None:
        index = bisect.bisect(self._free, run)
        if index < len(self._free) and self._free[index].start == run.stop:
            run = _Run(run.start, self._free.pop(index).stop)
        if index and self._free[index - 1].stop == run.start:
            index -= 1
            run = _Run(self._free.pop(index).start, run.stop)
        self._free.insert(index, run)

    def _run(self, span: Span) -> _Run:
        start = span.offset // self._block_bytes
        return _Run(start, start + -(-span.nbytes // self._block_bytes))
