"""The shard's index as routers follow it: numbered messages of changes, and snapshots for who has nothing or too
little.

Each message of changes has the next number of this incarnation. The latest ones are kept, so that a router whose
connection broke for a moment goes on from where it was. A router that does not read is cut off before what waits for it
takes more than its share of memory; it begins again with a snapshot.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from prfaas.cluster import Incarnation, Namespace
from prfaas.errors import Overloaded
from prfaas.kvcache.feed import Changes, Heartbeat, SnapshotBegin, SnapshotChunk, SnapshotEnd, Update
from prfaas.kvcache.prefix import Change
from prfaas.rpc.cache import Watch

HEARTBEAT_S = 1.0
#: Keys in one message; with what is around them it stays below a quarter of a mebibyte on the wire.
MESSAGE_BYTES = 96 << 10
#: What is kept for routers that come back, and what may wait for one that is slow.
KEPT_BYTES = 8 << 20
WAITING_BYTES = 16 << 20
MAX_WATCHERS = 256

#: The index as changes from empty, in pieces of so many bytes.
Snapshot = Callable[[int], Iterator[tuple[Change, ...]]]


class SlowReader(Overloaded):
    """The router does not read what it asked for."""

    def __init__(self) -> None:
        super().__init__("the router does not read its updates")


class Feed:
    """One per shard process. `snapshot` reads the index as it is while it is asked."""

    def __init__(self, incarnation: Incarnation, namespace: Namespace, snapshot: Snapshot) -> None:
        self._incarnation, self._namespace, self._snapshot = incarnation, namespace, snapshot
        self.seq = 0
        self._kept: deque[tuple[Update, int]] = deque()
        self._kept_bytes = 0
        self._watchers: set[_Watcher] = set()
        self._closed = False
        self.snapshots = self.cut_off = 0

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def publish(self, changes: Sequence[Change]) -> None:
        for batch, nbytes in _messages(changes):
            self.seq += 1
            update = Update(self._incarnation, self.seq, Changes(batch))
            self._kept.append((update, nbytes))
            self._kept_bytes += nbytes
            while self._kept_bytes > KEPT_BYTES:
                self._kept_bytes -= self._kept.popleft()[1]
            for watcher in self._watchers:
                watcher.put(update, nbytes)

    def close(self) -> None:
        """Every watch ends, and no new one begins."""
        self._closed = True
        for watcher in self._watchers:
            watcher.wake.set()

    async def watch(self, request: Watch) -> AsyncGenerator[Update, None]:
        """Updates without end, at least one every HEARTBEAT_S. Raises SlowReader, and Overloaded when too many
        watch."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise Overloaded("watchers")
        watcher = _Watcher()
        missed = self._since(request)
        self._watchers.add(watcher)
        try:
            if missed is None:
                for update in self._described():
                    yield update
                    if watcher.overflowed:
                        break
            else:
                for update in (*missed, *([] if watcher.waiting else [self._heartbeat()])):
                    yield update
            while not self._closed:
                next_update = await watcher.next()
                if watcher.overflowed:
                    self.cut_off += 1
                    raise SlowReader
                # With nothing waiting, the latest number is the last one that it was told.
                yield next_update or self._heartbeat()
        finally:
            self._watchers.discard(watcher)

    def _since(self, request: Watch) -> list[Update] | None:
        """What came after what the router knows; None when that is not known any more."""
        behind = self.seq - request.known_seq
        if request.known_incarnation != self._incarnation or not 0 <= behind <= len(self._kept):
            return None
        return [update for update, _ in self._kept if update.seq > request.known_seq]

    def _described(self) -> Iterator[Update]:
        """Between the pieces others run, and the index changes: those changes follow behind the snapshot, and what a
        piece already has of them is said twice, which does no harm."""
        self.snapshots += 1
        number, seq, chunks = self.snapshots, self.seq, 0
        yield Update(self._incarnation, seq, SnapshotBegin(self._namespace), number)
        for piece in self._snapshot(MESSAGE_BYTES):
            yield Update(self._incarnation, seq, SnapshotChunk(chunks, piece), number)
            chunks += 1
        yield Update(self._incarnation, seq, SnapshotEnd(chunks), number)

    def _heartbeat(self) -> Update:
        return Update(self._incarnation, self.seq, Heartbeat())


class _Watcher:
    """What waits for one router."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self.overflowed = False
        self._waiting: deque[tuple[Update, int]] = deque()
        self._bytes = 0

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def put(self, update: Update, nbytes: int) -> None:
        self._bytes += nbytes
        if self._bytes > WAITING_BYTES:
            self.overflowed = True
            self._waiting.clear()
        if not self.overflowed:
            self._waiting.append((update, nbytes))
        self.wake.set()

    async def next(self) -> Update | None:
        """None when nothing has come for a heartbeat's time."""
        if not self._waiting:
            self.wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self.wake.wait()
        if not self._waiting:
            return None
        update, nbytes = self._waiting.popleft()
        self._bytes -= nbytes
        return update


def _messages(changes: Iterable[Change]) -> Iterator[tuple[tuple[Change, ...], int]]:
    """Changes as they fit into messages, and the bytes of each."""
    batch: list[Change] = []
    nbytes = 0
    for change in changes:
        if batch and nbytes + len(change.keys) > MESSAGE_BYTES:
            yield tuple(batch), nbytes
            batch, nbytes = [], 0
        batch.append(change)
        nbytes += len(change.keys) + 64
    if batch:
        yield tuple(batch), nbytes
