"""The virtual-time kernel: order, time, cancellation, deadlock, and the same run for the same seed."""

import pytest

from prfaas.sim.kernel import Deadlock, Kernel
from prfaas.sim.task import Cancelled, Event, Future


def test_time_jumps_to_the_next_timer():
    """An hour of waiting costs nothing, and timers fire in the order of their times."""
    kernel, order = Kernel(0), []

    async def sleeper(seconds: float) -> None:
        await kernel.sleep(seconds)
        order.append((seconds, kernel.now()))

    async def main() -> None:
        for seconds in (3600.0, 1.0, 60.0):
            kernel.spawn(sleeper(seconds), f"sleeper {seconds}")
        await kernel.sleep(7200)

    kernel.run(main())
    assert order == [(1.0, 1.0), (60.0, 60.0), (3600.0, 3600.0)]


def test_run_until_stops_the_world_at_a_time():
    """What is due later has not happened yet."""
    kernel, fired = Kernel(0), []
    for seconds in (1.0, 2.0, 3.0):
        kernel.call_later(seconds, lambda seconds=seconds: fired.append(seconds))
    kernel.run_until(2.0)
    assert (fired, kernel.now()) == ([1.0, 2.0], 2.0)
    kernel.run_until(2.5)
    assert (fired, kernel.now()) == ([1.0, 2.0], 2.5)


def test_a_timer_can_be_taken_back():
    """A cancelled timer neither fires nor lets time pass."""
    kernel, fired = Kernel(0), []
    kernel.call_later(5.0, lambda: fired.append("fired")).cancel()
    kernel.run(kernel.sleep(1.0))
    kernel.run_until(4.0)
    assert fired == []
    assert kernel.now() == 4.0


def test_what_happens_at_one_instant_is_a_tie():
    """Which of two timers was set first does not decide a race that both end at the same time."""
    kernel = Kernel(0)

    async def in_two_steps() -> None:
        await kernel.sleep(1)
        await kernel.sleep(1)

    assert kernel.run(kernel.race({"set later": in_two_steps(), "set before": kernel.sleep(2)})) == ("set later", None)


def test_a_deadlock_names_who_waits():
    """All wait and nothing is timed: that is a bug to be reported, not a run that hangs."""
    kernel = Kernel(0)

    async def main() -> None:
        kernel.spawn(Event("never").wait(), "left behind")
        await Event("never").wait()

    with pytest.raises(Deadlock) as caught:
        kernel.run(main())
    assert caught.value.waiting == ["main", "left behind"]


def test_cancel_is_felt_at_the_await_and_ends_after_clean_up():
    """A task may clean up for as long as it takes, and is done only then."""
    kernel, log = Kernel(0), []

    async def worker() -> None:
        try:
            await kernel.sleep(100)
        finally:
            await kernel.sleep(2)
            log.append(kernel.now())

    async def main() -> None:
        task = kernel.spawn(worker(), "worker")
        await kernel.sleep(1)
        task.cancel()
        with pytest.raises(Cancelled):
            await task

    kernel.run(main())
    assert log == [3.0]


def test_a_cancelled_waiter_leaves_the_task_alone():
    """Waiting for a task is not owning it."""
    kernel = Kernel(0)

    async def answer() -> int:
        await kernel.sleep(5)
        return 42

    async def wait_for(task: Future[int]) -> int:
        return await task

    async def main() -> int:
        task = kernel.spawn(answer(), "answer")
        waiter = kernel.spawn(wait_for(task), "waiter")
        await kernel.sleep(1)
        waiter.cancel()
        return await task

    assert kernel.run(main()) == 42


def test_a_task_that_cancels_itself_stops_at_its_next_await():
    """The cancellation is not lost because the task was running at the time."""
    kernel = Kernel(0)
    reached = []

    async def quitter() -> None:
        task.cancel()
        reached.append("before")
        await kernel.sleep(1)
        reached.append("after")

    task = kernel.spawn(quitter(), "quitter")
    kernel.run_until(0.5)
    assert task.done
    assert reached == ["before"]


def test_a_task_can_be_cancelled_at_each_of_its_waits():
    """How a test meets every await point of a story, one after the other."""
    for wait in (1, 2, 3):
        kernel, steps = Kernel(0), []

        async def story(kernel: Kernel = kernel, steps: list[int] = steps) -> None:
            for step in range(3):
                steps.append(step)
                await kernel.sleep(1)

        task = kernel.spawn(story(), "story")
        task.cancel_at_wait = wait
        kernel.run_until(10)
        assert (task.done, steps) == (True, list(range(wait)))


def test_an_error_that_nobody_waits_for_is_not_lost():
    """A task that dies unseen fails the run, however the run is driven."""
    kernel, driven = Kernel(0), Kernel(0)

    async def broken() -> None:
        raise RuntimeError("unseen")

    async def main() -> None:
        kernel.spawn(broken(), "broken")
        await kernel.sleep(1)

    with pytest.raises(RuntimeError, match="unseen"):
        kernel.run(main())
    driven.spawn(broken(), "broken")
    with pytest.raises(RuntimeError, match="unseen"):
        driven.run_until(1)


def test_one_seed_gives_one_run():
    """The trace is equal for equal seeds and differs for others."""

    def trace(seed: int) -> int:
        kernel = Kernel(seed)

        async def walker(name: str) -> None:
            for _ in range(20):
                await kernel.sleep(kernel.random.random())

        async def main() -> None:
            for task in [kernel.spawn(walker(name), name) for name in "abc"]:
                await task

        kernel.run(main())
        return kernel.trace

    assert trace(1) == trace(1) != trace(2)
