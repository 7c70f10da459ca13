"""Time limits that are many and hardly ever reached: one timer for all of them, instead of one for each.

A limit is felt at most a tick late. Those of the same length run out in the order in which they were set, so a look
at the oldest of each length is enough, however many wait.
"""

import asyncio
import time

TICK_S = 0.1


class Limit:
    """On the task that set it: once it has run out, the task is cancelled."""

    __slots__ = ("cancelling", "due", "expired", "seconds", "task")

    def __init__(self, task: "asyncio.Task[object]", seconds: float, due: float) -> None:
        self.task, self.seconds, self.due = task, seconds, due
        self.cancelling, self.expired = task.cancelling(), False


class Limits:
    def __init__(self, tick_s: float = TICK_S) -> None:
        self._tick_s = tick_s
        self._by_length: dict[float, dict[Limit, None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> Limit:
        task = asyncio.current_task()
        assert task is not None, "only a task can be limited"
        limit = Limit(task, seconds, time.monotonic() + seconds)
        same = self._by_length.get(seconds)
        if same is None:
            same = self._by_length[seconds] = {}
        same[limit] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
        return limit

    def lift(self, limit: Limit) -> None:
        """It does not count any more, whether or not it has run out."""
        if (same := self._by_length.get(limit.seconds)) is not None:
            same.pop(limit, None)

    def _tick(self) -> None:
        now = time.monotonic()
        for seconds, same in tuple(self._by_length.items()):
            while same and (limit := next(iter(same))).due <= now:
                del same[limit]
                limit.expired = True
                limit.task.cancel()
            if not same:
                del self._by_length[seconds]
        running = asyncio.get_running_loop()
        self._timer = running.call_later(self._tick_s, self._tick) if self._by_length else None
