"""What every clock of the flows must do: the simulator's passes the same cases as asyncio's."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import pytest
import uvloop

from prfaas.errors import DeadlineExceeded, PeerUnavailable
from prfaas.flows.ports import Clock
from prfaas.live.clock import AsyncioClock
from prfaas.sim.kernel import Kernel

#: Seconds that pass during a case, and seconds that no case may wait for.
SOON, NEVER = 0.02, 3600.0

Case = Callable[[Clock], Coroutine[Any, Any, Any]]
Run = Callable[[Case], Any]


def on_kernel(case: Case) -> Any:
    kernel = Kernel(seed=0)
    result = kernel.run(case(kernel))
    assert kernel.now() < 60
    return result


def on_asyncio(case: Case) -> Any:
    with asyncio.Runner(debug=True) as runner:
        return runner.run(limited(case))


def on_uvloop(case: Case) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(limited(case))


def on_one_timer(case: Case) -> Any:
    """Every limit as if it were a long one."""
    with asyncio.Runner(debug=True) as runner:
        return runner.run(limited(case, AsyncioClock(long_s=0.0, tick_s=0.001)))


async def limited(case: Case, clock: AsyncioClock | None = None) -> Any:
    async with asyncio.timeout(60):
        return await case(clock or AsyncioClock())


@pytest.fixture(params=[on_kernel, on_asyncio, on_uvloop, on_one_timer], ids=["kernel", "asyncio", "uvloop", "timer"])
def run(request: pytest.FixtureRequest) -> Run:
    return request.param


class Sleeper:
    """Sleeps, and remembers that it began and how it ended. Its clean-up takes time."""

    def __init__(self, clock: Clock, seconds: float = NEVER) -> None:
        self.clock, self.seconds, self.log = clock, seconds, []

    async def __call__(self) -> str:
        self.log.append("began")
        try:
            await self.clock.sleep(self.seconds)
            return "slept"
        finally:
            await self.clock.sleep(SOON)
            self.log.append("cleaned up")


async def at_once(value: Any) -> Any:
    return value


async def broken() -> None:
    raise PeerUnavailable("d0", "gone")


def test_time_passes_while_one_sleeps(run):
    """`now` is monotonic and counts seconds."""

    async def case(clock: Clock) -> float:
        before = clock.now()
        await clock.sleep(SOON)
        return clock.now() - before

    assert run(case) >= SOON * 0.99


def test_within_passes_on_the_result(run):
    """In time: as if there were no limit."""
    assert run(lambda clock: clock.within(NEVER, "work", at_once(7))) == 7


def test_within_passes_on_the_error(run):
    """In time: an error is an answer as well."""
    with pytest.raises(PeerUnavailable):
        run(lambda clock: clock.within(NEVER, "work", broken()))


def test_within_cancels_at_the_deadline_and_waits_for_clean_up(run):
    """The error names stage and limit; when it is raised, nothing of the awaitable runs any more."""

    async def case(clock: Clock) -> None:
        sleeper = Sleeper(clock)
        with pytest.raises(DeadlineExceeded) as caught:
            await clock.within(SOON, "prefill", sleeper())
        assert (caught.value.stage, caught.value.seconds) == ("prefill", SOON)
        assert sleeper.log == ["began", "cleaned up"]

    run(case)


def test_past_the_deadline_neither_result_nor_error_counts(run):
    """What the awaitable does after its deadline is clean-up, not an answer."""

    async def stubborn(clock: Clock, ending: Callable[[], Awaitable[Any]]) -> Any:
        try:
            await clock.sleep(NEVER)
        finally:
            return await ending()  # noqa: B012

    async def case(clock: Clock, ending: Callable[[], Awaitable[Any]]) -> None:
        with pytest.raises(DeadlineExceeded):
            await clock.within(SOON, "work", stubborn(clock, ending))

    run(lambda clock: case(clock, lambda: at_once("late")))
    run(lambda clock: case(clock, broken))


def test_the_inner_of_two_deadlines_is_named(run):
    """Limits nest; the one that ran out is told."""

    async def case(clock: Clock) -> str:
        with pytest.raises(DeadlineExceeded) as caught:
            await clock.within(NEVER, "outer", clock.within(SOON, "inner", clock.sleep(NEVER)))
        return caught.value.stage

    assert run(case) == "inner"


def test_the_outer_of_two_deadlines_is_named(run):
    """An inner limit does not take an outer one for its own."""

    async def case(clock: Clock) -> str:
        with pytest.raises(DeadlineExceeded) as caught:
            await clock.within(SOON, "outer", clock.within(NEVER, "inner", clock.sleep(NEVER)))
        return caught.value.stage

    assert run(case) == "outer"


def test_race_names_the_first_and_cleans_up_after_the_others(run):
    """Losers are cancelled and have finished when the race returns."""

    async def case(clock: Clock) -> None:
        slow, slower = Sleeper(clock), Sleeper(clock)
        assert await clock.race({"slow": slow(), "quick": clock.sleep(SOON), "slower": slower()}) == ("quick", None)
        assert slow.log == slower.log == ["began", "cleaned up"]

    run(case)


def test_a_tie_goes_to_the_first_in_the_mapping(run):
    """Both finish at once: the order in which they were given decides, so that runs repeat."""
    assert run(lambda clock: clock.race({"b": at_once(1), "a": at_once(2)})) == ("b", 1)


def test_an_error_wins_a_race_too(run):
    """The first to finish is the first, whatever it finished with; the others are cleaned up as well."""

    async def case(clock: Clock) -> None:
        slow = Sleeper(clock)
        with pytest.raises(PeerUnavailable):
            await clock.race({"slow": slow(), "broken": broken()})
        assert slow.log == ["began", "cleaned up"]

    run(case)


def test_an_error_of_a_loser_is_dropped(run):
    """Only the first to finish is an answer."""

    async def fails_when_cancelled(clock: Clock) -> None:
        try:
            await clock.sleep(NEVER)
        finally:
            await broken()

    assert run(lambda clock: clock.race({"a": fails_when_cancelled(clock), "b": clock.sleep(SOON)})) == ("b", None)


@pytest.mark.parametrize("inner", ["within", "race"])
def test_cancellation_from_outside_goes_through(run, inner):
    """Who is cancelled while waiting in `within` or `race` cancels what it waits for, and waits for its clean-up."""

    async def case(clock: Clock) -> None:
        sleeper = Sleeper(clock)
        waits = {
            "within": lambda: clock.within(NEVER, "work", sleeper()),
            "race": lambda: clock.race({"work": sleeper(), "other": clock.sleep(NEVER)}),
        }
        with pytest.raises(DeadlineExceeded) as caught:
            await clock.within(SOON, "outside", waits[inner]())
        assert caught.value.stage == "outside"
        assert sleeper.log == ["began", "cleaned up"]

    run(case)


def test_a_second_cancellation_does_not_cut_clean_up_short(run):
    """A race that is itself cancelled while it cleans up waits for its losers all the same, and then is cancelled."""

    async def case(clock: Clock) -> None:
        sleeper = Sleeper(clock)

        async def racing() -> None:
            await clock.race({"work": sleeper(), "at once": at_once(1)})
            sleeper.log.append("went on")

        with pytest.raises(DeadlineExceeded):
            await clock.within(SOON / 4, "outside", racing())
        assert sleeper.log == ["began", "cleaned up"]

    run(case)


def test_the_next_item_of_a_generator_can_be_limited(run):
    """Streams are read item by item, each with a deadline; a late one closes the generator."""

    async def case(clock: Clock) -> None:
        log: list[str] = []

        async def items() -> AsyncIterator[int]:
            try:
                yield 1
                await clock.sleep(NEVER)
            finally:
                log.append("closed")

        stream = items()
        assert await clock.within(NEVER, "first", anext(stream)) == 1
        with pytest.raises(DeadlineExceeded):
            await clock.within(SOON, "second", anext(stream))
        assert log == ["closed"]

    run(case)


def test_a_generator_left_half_way_is_closed(run):
    """Who stops reading and lets go of the stream leaves nothing open, even if closing takes an await."""

    async def case(clock: Clock) -> None:
        log: list[str] = []

        async def items() -> AsyncIterator[int]:
            try:
                yield 1
            finally:
                await clock.sleep(0)
                log.append("closed")

        async for _ in items():
            break
        await clock.sleep(SOON)
        assert log == ["closed"]

    run(case)
