"""When the sequences of a mock worker get their tokens.

`Steps` is what an engine does: all sequences of one pace step together, and one that comes later joins at the next
step. `Streams` gives each sequence a clock of its own, as the mock worker of the other routers does.
"""

import asyncio
import heapq
from collections.abc import Callable
from typing import Protocol


class Paced(Protocol):
    pace_us: int

    def step(self) -> bool: ...


class Pacer(Protocol):
    def add(self, sequence: Paced) -> None: ...

    def stop(self) -> None: ...

    def go_on(self) -> None: ...


class _Clock:
    """Calls `tick` at times that do not drift, until there is nothing to do."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped: list[Callable[[], None]] | None = None

    def stop(self) -> None:
        if self._stopped is None:
            self._stopped = []

    def go_on(self) -> None:
        stopped, self._stopped = self._stopped, None
        for tick in stopped or ():
            tick()

    def _at(self, due_s: float, tick: Callable[[], None]) -> None:
        if self._stopped is not None:
            self._stopped.append(tick)
        else:
            self._loop.call_at(due_s, tick)


class Steps(_Clock):
    def __init__(self) -> None:
        super().__init__()
        self._batches: dict[int, list[Paced]] = {}

    def add(self, sequence: Paced) -> None:
        batch = self._batches.get(sequence.pace_us)
        if batch is not None:
            batch.append(sequence)
            return
        self._batches[sequence.pace_us] = [sequence]
        self._again(sequence.pace_us, self._loop.time())

    def _again(self, pace_us: int, last_s: float) -> None:
        due_s = last_s + pace_us / 1e6
        self._at(due_s, lambda: self._step(pace_us, max(due_s, self._loop.time() - pace_us / 1e6)))

    def _step(self, pace_us: int, due_s: float) -> None:
        if self._stopped is not None:
            self._stopped.append(lambda: self._step(pace_us, self._loop.time()))
            return
        left = [sequence for sequence in self._batches[pace_us] if sequence.step()]
        if left:
            self._batches[pace_us] = left
            self._again(pace_us, due_s)
        else:
            del self._batches[pace_us]


class Streams(_Clock):
    def __init__(self) -> None:
        super().__init__()
        self._due: list[tuple[float, int, Paced]] = []
        self._count, self._ticking = 0, False

    def add(self, sequence: Paced) -> None:
        self._push(self._loop.time() + sequence.pace_us / 1e6, sequence)
        if not self._ticking:
            self._ticking = True
            self._at(self._due[0][0], self._tick)

    def _push(self, due_s: float, sequence: Paced) -> None:
        self._count += 1
        heapq.heappush(self._due, (due_s, self._count, sequence))

    def _tick(self) -> None:
        if self._stopped is not None:
            self._stopped.append(self._tick)
            return
        now = self._loop.time()
        while self._due and self._due[0][0] <= now:
            due_s, _, sequence = heapq.heappop(self._due)
            if sequence.step():
                self._push(max(due_s, now - sequence.pace_us / 1e6) + sequence.pace_us / 1e6, sequence)
        self._ticking = bool(self._due)
        if self._ticking:
            self._at(self._due[0][0], self._tick)
