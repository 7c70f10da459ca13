"""Virtual time: runs coroutines one step at a time, and jumps to the next timer when all of them wait.

Nothing here reads a clock, and whoever became ready first runs first, so one seed gives one run on every machine;
`trace` is a checksum of all steps by which two runs can be compared. A run in which everybody waits and no timer is
left is a deadlock and says who waits.
"""

import heapq
import inspect
import math
import random
import struct
import sys
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from prfaas.errors import DeadlineExceeded
from prfaas.sim.task import Cancelled, Event, Expired, Future, Queues, Task

T = TypeVar("T")
#: Fewer timers than this are not worth sweeping.
LEAST_SWEPT = 1024


class Deadlock(Exception):
    """Nothing can run and nothing is timed. `waiting` names the tasks that will never end."""

    def __init__(self, waiting: list[str]) -> None:
        super().__init__(f"all wait: {', '.join(waiting)}")
        self.waiting = waiting


class Timer:
    """A call in the future that can be taken back."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class Kernel:
    """Tasks, timers and the time. It is a `flows.ports.Clock`; `random` is the only source of chance in a run."""

    def __init__(self, seed: int | str) -> None:
        self.random = random.Random(seed)
        self.trace = 0
        self._queues = Queues()
        self._now = 0.0
        self._timers: list[tuple[float, int, Timer]] = []
        self._timers_set = 0
        self._sweep_at = LEAST_SWEPT
        self._tasks: dict[Task[Any], None] = {}
        self._running: Task[Any] | None = None

    def now(self) -> float:
        return self._now

    def spawn(self, coroutine: Coroutine[Any, Any, T], name: str) -> Task[T]:
        task = Task(coroutine, name, self._queues)
        self._tasks[task] = None
        task.when_done(lambda: self._tasks.pop(task))
        self._queues.ready.append(task)
        return task

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        timer = Timer(call)
        self._timers_set += 1
        heapq.heappush(self._timers, (self._now + seconds if seconds > 0 else self._now, self._timers_set, timer))
        if len(self._timers) >= self._sweep_at:
            self._sweep()
        return timer

    def run(self, coroutine: Coroutine[Any, Any, T], name: str = "main") -> T:
        """Run until this coroutine ends, and return its result. Raises Deadlock, or an error that nobody has seen."""
        task = self.spawn(coroutine, name)
        with self._finalizing_generators():
            while not task.done:
                self._step_all()
                if not task.done and not self._fire(math.inf):
                    raise Deadlock([waiting.name for waiting in self._tasks])
        result = task.result()
        self._raise_unseen()
        return result

    def run_until(self, when: float) -> None:
        """Run all that happens up to a time. Raises an error that nobody has seen."""
        with self._finalizing_generators():
            self._step_all()
            while self._fire(when):
                self._step_all()
        self._now = max(self._now, when)
        self._raise_unseen()

    async def sleep(self, seconds: float) -> None:
        awake = Future[None]("sleep")
        timer = self.call_later(seconds, lambda: awake.set_result(None))
        try:
            await awake
        finally:
            timer.cancel()

    async def within(self, seconds: float, stage: str, awaitable: Awaitable[T]) -> T:
        task, limit = self._running, Expired()
        assert task is not None, "only a task can wait"
        timer = self.call_later(seconds, lambda: task.expire(limit))
        try:
            result = await awaitable
        except Expired as error:
            if error is not limit:
                raise
        except Exception:
            # Past the deadline the awaitable was only cleaning up, and how that went is not the caller's answer.
            if not limit.felt:
                raise
        finally:
            timer.cancel()
            task.unlimit(limit)
        if limit.felt:
            raise DeadlineExceeded(stage, seconds)
        return result

    async def race(self, contenders: Mapping[str, Awaitable[Any]]) -> tuple[str, Any]:
        tasks = {name: self.spawn(_coroutine(contender), name) for name, contender in contenders.items()}
        first = Event("race")
        for task in tasks.values():
            task.when_done(first.set)
        try:
            await first.wait()
            winner = next(name for name, task in tasks.items() if task.done)
        finally:
            for task in tasks.values():
                task.cancel()
            await self._ended(tasks.values())
        return winner, tasks[winner].result()

    async def _ended(self, tasks: Iterable[Task[Any]]) -> None:
        """Wait for tasks to clean up, even when the waiter is cancelled again meanwhile. How that went is not told."""
        cancelled: Cancelled | None = None
        for task in tasks:
            while not task.done:
                ended = Event(f"end of {task.name}")
                task.when_done(ended.set)
                try:
                    await ended.wait()
                except Cancelled as again:
                    cancelled = again
            self._queues.unseen.pop(task, None)
        if cancelled is not None:
            raise cancelled

    def _raise_unseen(self) -> None:
        for error in self._queues.unseen.values():
            raise error

    def _step_all(self) -> None:
        """Make the steps that can be made now, also those that they make possible."""
        ready = self._queues.ready
        if not ready:
            return
        now_tag = struct.pack("<d", self._now)
        while ready:
            task = self._running = ready.popleft()
            self.trace = zlib.crc32(task.tag, zlib.crc32(now_tag, self.trace))
            task.step()
        self._running = None

    def _fire(self, latest: float) -> bool:
        """Fire the next timers if they are due by `latest`. All of one instant fire before anybody runs: what they
        start is a tie."""
        timers, fired = self._timers, False
        while timers and timers[0][0] <= latest:
            when, _, timer = heapq.heappop(timers)
            if (call := timer.call) is not None:
                self._now = latest = when
                fired = True
                call()
        return fired

    def _sweep(self) -> None:
        """Forget timers that were taken back: limits are long, and nearly all of them are."""
        self._timers[:] = [entry for entry in self._timers if entry[2].call is not None]
        heapq.heapify(self._timers)
        self._sweep_at = max(LEAST_SWEPT, 2 * len(self._timers))

    @contextmanager
    def _finalizing_generators(self) -> Iterator[None]:
        """An async generator that is dropped half-way is closed by a task, as an event loop does."""
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(None, self._close_generator)
        try:
            yield
        finally:
            sys.set_asyncgen_hooks(*hooks)

    def _close_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        self.spawn(generator.aclose(), "close generator")


async def _finish(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _coroutine(awaitable: Awaitable[T]) -> Coroutine[Any, Any, T]:
    return awaitable if inspect.iscoroutine(awaitable) else _finish(awaitable)
