"""The watchdog on an event loop: what a stalled request's caller sees, and what is cleaned up."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import pytest
import pytest_asyncio

from prfaas.errors import NoProgress
from prfaas.flows.progress import Stage
from prfaas.flows.story import Story
from prfaas.live.watchdog import Watchdog
from prfaas.request import RequestId

GRACE_S, LIVENESS_S = 0.2, 10.0


@pytest_asyncio.fixture
async def watchdog():
    watchdog = Watchdog(GRACE_S)
    running = asyncio.create_task(watchdog.run())
    yield watchdog
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


class Request:
    """One whose flow hangs after so many tokens, and what became of it."""

    def __init__(self, watchdog: Watchdog, tokens: int) -> None:
        self._watchdog, self._tokens = watchdog, tokens
        self.story, self.released, self.resumes = Story(), False, 0

    async def serve(self) -> AsyncGenerator[int, None]:
        with self._watchdog.watch(RequestId("r"), self.story, 0.0) as watch:
            try:
                for number in range(self._tokens):
                    self.story.output_tokens += 1
                    watch.handed_over()
                    yield number
                    watch.resumed()
                await asyncio.Event().wait()
            finally:
                self.released = True


async def test_field_C10_a_request_that_hangs_is_ended_with_its_stage(watchdog: Watchdog):
    """Whoever waits for it gets an error of ours; what the flow holds is given back, and it is counted."""
    request = Request(watchdog, 0)
    async with asyncio.timeout(LIVENESS_S):
        with pytest.raises(NoProgress, match="in the stage look_up"):
            await anext(request.serve())
    assert request.released
    assert watchdog.stalled == {Stage.LOOK_UP: 1}
    assert len(watchdog.progress) == 0
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    await asyncio.sleep(0)  # the cancellation is used up


async def test_a_reader_that_takes_its_time_is_left_alone(watchdog: Watchdog):
    """It has what came last; only when it asks again does the time count."""
    request = Request(watchdog, 2)
    async with aclosing(request.serve()) as batches:
        for number in range(2):
            assert await anext(batches) == number
            await asyncio.sleep(3 * GRACE_S)  # not a condition: nothing may happen meanwhile
        assert watchdog.stalled == {}
        async with asyncio.timeout(LIVENESS_S):
            with pytest.raises(NoProgress, match="no progress"):
                await anext(batches)


async def test_a_client_that_leaves_is_a_cancellation_and_nothing_else(watchdog: Watchdog):
    """Also when both come at once, it is the client's that is seen."""
    request = Request(watchdog, 0)
    reading = asyncio.create_task(anext(request.serve()))
    await asyncio.sleep(0)
    reading.cancel()
    with suppress(asyncio.CancelledError):
        await reading
    assert reading.cancelled() and request.released
    assert watchdog.stalled == {} and len(watchdog.progress) == 0


async def test_a_cancellation_beside_the_watchdogs_is_not_swallowed():
    """A task that both cancel in the same turn stays cancelled."""
    watchdog = Watchdog(GRACE_S)
    request = Request(watchdog, 0)
    reading = asyncio.create_task(anext(request.serve()))
    await asyncio.sleep(0)
    [stalled] = watchdog.progress.look(time.monotonic() + 2 * GRACE_S)
    watchdog.end(stalled)
    reading.cancel()
    with suppress(asyncio.CancelledError):
        await reading
    assert reading.cancelled() and request.released
