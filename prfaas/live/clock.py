"""Time and concurrency of the flows on asyncio. Passes the same contract as `prfaas.sim.kernel`."""

import asyncio
import time
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, TypeVar

from prfaas.errors import DeadlineExceeded
from prfaas.live.limits import TICK_S, Limits

T = TypeVar("T")
#: From here on a limit may be felt a tick late.
LONG_S = 20 * TICK_S


class AsyncioClock:
    """A `flows.ports.Clock` for the running event loop. Every token of every stream has a limit: from `long_s` on they
    share a timer."""

    def __init__(self, long_s: float = LONG_S, tick_s: float = TICK_S) -> None:
        self._long_s, self._limits = long_s, Limits(tick_s)

    def now(self) -> float:
        # Not the loop's time: uvloop counts in milliseconds, too coarse for an account of durations.
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def within(self, seconds: float, stage: str, awaitable: Awaitable[T]) -> T:
        if seconds < self._long_s:
            return await self._within(seconds, stage, awaitable)
        limit = self._limits.set(seconds)
        try:
            result = await awaitable
        except asyncio.CancelledError:
            if not limit.expired or limit.task.cancelling() > limit.cancelling + 1:
                raise  # somebody else's
        except Exception:
            if not limit.expired:
                raise
        finally:
            self._limits.lift(limit)
            if limit.expired:
                limit.task.uncancel()
        if limit.expired:
            raise DeadlineExceeded(stage, seconds)
        return result

    async def _within(self, seconds: float, stage: str, awaitable: Awaitable[T]) -> T:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                result = await awaitable
        except Exception:
            # Past the deadline the awaitable was only cleaning up, and how that went is not the caller's answer.
            if not limit.expired():
                raise
        if limit.expired():
            raise DeadlineExceeded(stage, seconds)
        return result

    async def race(self, contenders: Mapping[str, Awaitable[Any]]) -> tuple[str, Any]:
        tasks = {name: asyncio.ensure_future(contender) for name, contender in contenders.items()}
        try:
            await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
            winner = next(name for name, task in tasks.items() if task.done())
        finally:
            for task in tasks.values():
                task.cancel()
            await _ended(tasks.values())
        return winner, tasks[winner].result()


async def _ended(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Wait for cancelled tasks to clean up, even when the waiter is cancelled again meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    while unfinished := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(unfinished)
        except asyncio.CancelledError as again:
            cancelled = again
    for task in tasks:
        if not task.cancelled():
            task.exception()  # seen here, so that asyncio does not report it as lost
    if cancelled is not None:
        raise cancelled
