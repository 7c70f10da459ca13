"""The shard's orders to the tier below its memory, carried out with bounded concurrency and answered once each.

Of one key all orders are carried out in the order in which they came. Writes that find too many others waiting are
given up at once: their objects stay in memory alone. Readings wait for nothing but readings, since somebody waits for
them. A store that hangs is left alone for a while, so that not each of them waits for it.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from time import monotonic
from typing import Any

import structlog

from prfaas.blockstore.port import BlockStore, ContentConflict, StoreFailed, StoreFull
from prfaas.kvcache.hashing import KEY_BYTES
from prfaas.kvcache.layout import Extent, KvLayout, Window
from prfaas.kvcache.objects import Drop, Kind, Load, ObjectKey, Spill, Stored

#: Readings at a time, and writings.
READS, WRITES = 8, 4
#: Orders that wait to be written.
MAX_WAITING = 4096
#: A store that takes so long to fail hangs, and all orders fail for so long.
HANGS_S, REST_S = 1.0, 30.0

Order = Load | Spill | Drop
Answer = Callable[[Load | Spill, bool], None]
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]

log = structlog.get_logger()


class Tier:
    """`memory` is the pool's; `answer` is told how each Load and Spill ended, and `took` how long each reading took.
    Everything runs on one event loop."""

    def __init__(
        self,
        store: BlockStore,
        layout: KvLayout,
        memory: memoryview,
        answer: Answer,
        spawn: Spawn,
        took: Callable[[float], None],
    ) -> None:
        self._store, self._memory, self._answer, self._spawn, self._took = store, memory, answer, spawn, took
        self._layout = layout
        self._padding = {kind: _padding(layout, window) for kind, window in _UNPLACED.items()}
        self._orders: dict[ObjectKey, deque[Order]] = {}
        self._reads, self._writes = asyncio.Semaphore(READS), asyncio.Semaphore(WRITES)
        self._rests_until = 0.0
        #: Of the damaged objects that the store has found.
        self._damaged_told = 0
        #: Orders to write that are not finished, and how orders ended.
        self.waiting = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.reads: Counter[str] = Counter()
        self.writes: Counter[str] = Counter()

    @property
    def conflicts(self) -> int:
        """How often other content was to be written under a key that the store has (R14). It keeps the old one."""
        return self.writes["conflict"]

    @property
    def used_bytes(self) -> int:
        return self._store.used_bytes

    @property
    def damaged(self) -> int:
        return self._store.damaged

    def submit(self, order: Order) -> None:
        """Never waits, and answers later at the earliest."""
        if not isinstance(order, Load):
            self.waiting += 1
            self.idle.clear()
        queue = self._orders.get(order.key)
        if queue is None:
            self._orders[order.key] = deque([order])
            self._spawn(self._work_off(order.key))
        else:
            queue.append(order)

    async def recovered(self) -> list[Stored]:
        """What is still there from before, as far as the store can list it. What cannot be read as an object of ours is
        none."""
        found: list[Stored] = []
        try:
            await self._list_into(found)
        except StoreFailed as error:
            log.error("the lower tier could not be listed to its end", detail=error.detail, found=len(found))
        return found

    async def _list_into(self, found: list[Stored]) -> None:
        stored: AsyncGenerator[Any, None] = self._store.stored()
        async with aclosing(stored):
            async for each in stored:
                key = _unpack(each.key)
                if key is not None and each.header[-KEY_BYTES:] == key.unit and len(each.header) % KEY_BYTES == 0:
                    found.append(Stored(key=key, path=each.header))

    async def _work_off(self, key: ObjectKey) -> None:
        queue = self._orders[key]
        while queue:
            await self._carry_out(queue[0])
            queue.popleft()
        del self._orders[key]

    async def _carry_out(self, order: Order) -> None:
        match order:
            case Load():
                async with self._reads:
                    begun = monotonic()
                    outcome = await self._load(order)
                    self._took(monotonic() - begun)
                self.reads[outcome] += 1
                self._answer(order, outcome == "read")
            case Spill():
                outcome = "dropped"
                if self.waiting <= MAX_WAITING:
                    async with self._writes:
                        outcome = await self._spill(order)
                self._written()
                self.writes[outcome] += 1
                self._answer(order, outcome == "written")
            case Drop():
                async with self._writes:
                    await self._drop(order)
                self._written()

    def _written(self) -> None:
        self.waiting -= 1
        if not self.waiting:
            self.idle.set()

    async def _load(self, order: Load) -> str:
        damaged, begun = self._store.damaged, monotonic()
        if begun < self._rests_until:
            return "failed"
        try:
            header = await self._store.get(_pack(order.key), self._at(order.key, order.window))
        except StoreFailed as error:
            self._failed(error, begun)
            return "failed"
        if header is None:
            return "damaged" if self._found_damaged(since=damaged) else "missing"
        return "read"

    def _found_damaged(self, since: int) -> bool:
        """Whether one of the reads that are under way was of a damaged object; each is told once."""
        told = max(self._damaged_told, since)
        if self._store.damaged <= told:
            return False
        self._damaged_told = told + 1
        return True

    async def _spill(self, order: Spill) -> str:
        begun = monotonic()
        if begun < self._rests_until:
            return "failed"
        data = self._at(order.key, order.window)
        for start, stop in self._padding[order.key.kind]:
            data[start:stop] = bytes(stop - start)
        try:
            await self._store.put(_pack(order.key), order.path, data)
        except StoreFull:
            return "full"
        except ContentConflict:
            log.error(
                "another content under a key that the lower tier has",
                key=order.key.unit.hex(),
                kind=order.key.kind.value,
            )
            return "conflict"
        except StoreFailed as error:
            self._failed(error, begun)
            return "failed"
        return "written"

    async def _drop(self, order: Drop) -> None:
        """What stays because the store fails is found again by a restart, or taken up by whoever puts it again."""
        begun = monotonic()
        if begun < self._rests_until:
            return
        try:
            await self._store.delete(_pack(order.key))
        except StoreFailed as error:
            self._failed(error, begun)

    def _failed(self, error: StoreFailed, begun: float) -> None:
        hangs = monotonic() - begun > HANGS_S
        if hangs:
            self._rests_until = monotonic() + REST_S
        log.warning("the lower tier failed", stage=error.stage, detail=error.detail, rests_s=REST_S if hangs else 0)

    def _at(self, key: ObjectKey, window: Window) -> memoryview:
        nbytes = self._layout.window_bytes(window.stop - window.first, key.kind is Kind.STATE)
        return self._memory[window.offset : window.offset + nbytes]


_UNPLACED = {Kind.KV: Window(0, 64, 0), Kind.STATE: Window(0, 0, 0, state=True)}


def _padding(layout: KvLayout, window: Window) -> Sequence[tuple[int, int]]:
    """The bytes of a window between and behind its tensors. Nobody reads them, but they are stored, and the same object
    must always be the same bytes."""
    ends = (window.stop,) if window.stop > window.first else ()
    states = (window.stop,) if window.state else ()
    parts = layout.extent_parts(Extent(window.first, window.stop, states), ends, (window,))
    at, gaps = 0, []
    for start, stop in sorted((part.offset, part.offset + part.nbytes) for part in parts):
        if start > at:
            gaps.append((at, start))
        at = stop
    nbytes = layout.window_bytes(window.stop - window.first, window.state)
    return [*gaps, *([(at, nbytes)] if at < nbytes else [])]


def _pack(key: ObjectKey) -> bytes:
    return key.kind.value.encode() + key.unit


def _unpack(packed: bytes) -> ObjectKey | None:
    kind = {each.value.encode(): each for each in Kind}.get(packed[:1])
    return ObjectKey(kind, packed[1:]) if kind is not None and len(packed) == 1 + KEY_BYTES else None
