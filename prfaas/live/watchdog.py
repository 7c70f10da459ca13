"""Ends requests that get nowhere: `flows.progress` on asyncio.

A stalled request is cancelled where it waits, so that its flow gives back what it holds, and whoever waited for it gets
an error that says what it was waiting for.
"""

import asyncio
import time
from collections import Counter
from types import TracebackType
from typing import Self

import structlog

from prfaas.errors import NoProgress
from prfaas.flows.progress import Open, Progress, Stage, Stalled
from prfaas.flows.story import Story
from prfaas.request import RequestId

#: Looks within the time that is granted.
LOOKS = 4
MAX_LOOK_S = 5.0

log = structlog.get_logger()


class Watchdog:
    """`run` in a task of its own. `stalled` counts the requests that were ended, by stage."""

    def __init__(self, no_progress_s: float) -> None:
        self.progress = Progress(no_progress_s)
        self.stalled: Counter[Stage] = Counter()
        self._look_s = min(no_progress_s / LOOKS, MAX_LOOK_S)
        self._watches: dict[Open, Watch] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            for stalled in self.progress.look(time.monotonic()):
                self.end(stalled)

    def watch(self, request: RequestId, story: Story, attempt_s: float) -> "Watch":
        """`with` around all that is done for the request. Raises NoProgress out of it when it stalls."""
        one = self.progress.opened(request, story, attempt_s, time.monotonic())
        watch = self._watches[one] = Watch(self, one)
        return watch

    def oldest_s(self) -> float:
        return self.progress.oldest_s(time.monotonic())

    def forget(self, one: Open) -> None:
        self.progress.closed(one)
        self._watches.pop(one, None)

    def end(self, stalled: Stalled) -> None:
        attempts = stalled.open.story.attempts
        route = attempts[-1].route if attempts else None
        log.error(
            "a request makes no progress" if stalled.times == 1 else "a request does not end",
            request=stalled.open.request,
            stage=stalled.stage.value,
            seconds=round(stalled.seconds, 1),
            prefill=route.prefill if route is not None else None,
            decode=route.decode if route is not None else None,
        )
        if stalled.times == 1:
            self.stalled[stalled.stage] += 1
            self._watches[stalled.open].end(stalled)


class Watch:
    """One request's. Between `handed_over` and `resumed` it is its client's turn."""

    def __init__(self, watchdog: Watchdog, one: Open) -> None:
        self._watchdog, self._open = watchdog, one
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._stalled: Stalled | None = None

    def handed_over(self) -> None:
        self._open.waiting = False

    def resumed(self) -> None:
        """By the task that waits for it from now on."""
        self._task = task = asyncio.current_task()
        self._cancelling = task.cancelling() if task is not None else 0
        self._open.waiting = True

    def end(self, stalled: Stalled) -> None:
        if self._task is not None:
            self._stalled = stalled
            self._task.cancel()

    def __enter__(self) -> Self:
        self.resumed()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watchdog.forget(self._open)
        stalled, task = self._stalled, self._task
        if stalled is None or task is None:
            return
        # Cancelled for this alone: else it is somebody else's, who has to see it.
        ours = task.uncancel() <= self._cancelling
        if ours and error is not None and not isinstance(error, GeneratorExit):
            raise NoProgress(stalled.stage.value, stalled.seconds) from error
