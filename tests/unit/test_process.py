"""How a process is told to stop, and what it may open."""

import asyncio
import os
import resource
import signal
from collections.abc import Callable

import pytest

from prfaas.process import STOP_NOW, StopSignals, raise_open_files

LIVENESS_S = 20.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def stopped_by(*signals: signal.Signals, supervised: bool, ready: bool = True) -> tuple[bool, bool]:
    """Whether a service that drains without end was asked to drain, and whether it was cancelled."""
    seen: list[StopSignals] = []

    async def service() -> None:
        seen.append(StopSignals(supervised=supervised))
        if ready:
            seen[0].ready()
        await asyncio.Event().wait()

    task = asyncio.create_task(service())
    await until(lambda: bool(seen))
    for each in signals:
        os.kill(os.getpid(), each)
        await asyncio.sleep(0.02)  # the next one must not come in the same turn
    await until(lambda: task.done() or not seen[0].cancelled)
    asked = seen[0]._asked.is_set()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for signum in (signal.SIGTERM, signal.SIGINT, STOP_NOW):
        asyncio.get_running_loop().remove_signal_handler(signum)
    return asked, seen[0].cancelled


@pytest.mark.parametrize(
    ("signals", "supervised", "asked", "cancelled"),
    [
        ([signal.SIGTERM], False, True, False),
        ([signal.SIGTERM, signal.SIGTERM], False, True, True),
        ([signal.SIGINT, signal.SIGTERM], False, True, True),
        ([signal.SIGTERM], True, True, False),
        ([signal.SIGTERM, signal.SIGTERM, signal.SIGINT], True, True, False),
        ([signal.SIGTERM, STOP_NOW], True, True, True),
        ([STOP_NOW], True, False, True),
    ],
)
async def test_a_second_signal_stops_unless_it_may_be_the_first_again(
    signals: list[signal.Signals], supervised: bool, asked: bool, cancelled: bool
):
    """A supervised process hears what was meant for its group and what its supervisor passes on."""
    assert await stopped_by(*signals, supervised=supervised) == (asked, cancelled)


@pytest.mark.parametrize("supervised", [False, True])
async def test_a_signal_before_there_is_anything_to_drain_stops(supervised: bool):
    """Whoever is still starting has nothing to finish."""
    assert await stopped_by(signal.SIGTERM, supervised=supervised, ready=False) == (False, True)


def test_as_many_files_may_be_open_as_the_system_allows():
    """Not as many as it gives to those who do not ask."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
        assert raise_open_files() == before[1]
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
