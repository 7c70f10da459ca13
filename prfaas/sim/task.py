"""What coroutines wait for in virtual time: futures, events, slots, and other tasks.

A task runs until it awaits a future that has no outcome yet. It becomes ready again when that comes or when the task is
cancelled; `prfaas.sim.kernel` decides who runs next.
"""

from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Cancelled(BaseException):
    """Thrown into a task at its await when the task is cancelled."""


class Future(Generic[T]):
    """A result that comes later; the first outcome stays. Waiting for it may be cancelled without harm to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.done = False
        self._outcome: Callable[[], T]
        self._when_done: list[Callable[[], None]] = []

    def set_result(self, result: T) -> None:
        self._settle(lambda: result)

    def set_error(self, error: BaseException) -> None:
        def outcome() -> T:
            raise error

        self._settle(outcome)

    def result(self) -> T:
        return self._outcome()

    def when_done(self, call: Callable[[], None]) -> None:
        """Call it with the outcome, or now when that is there."""
        if self.done:
            call()
        else:
            self._when_done.append(call)

    def forget(self, call: Callable[[], None]) -> None:
        self._when_done.remove(call)

    def __await__(self) -> Generator["Future[Any]", None, T]:
        if not self.done:
            yield self
        return self.result()

    def _settle(self, outcome: Callable[[], T]) -> None:
        if not self.done:
            self.done, self._outcome = True, outcome
            calls, self._when_done = self._when_done, []
            for call in calls:
                call()


@dataclass(slots=True)
class Queues:
    """What tasks tell the kernel: who can run, in order, and errors that nobody has looked at yet."""

    ready: "deque[Task[Any]]" = field(default_factory=deque)
    unseen: "dict[Task[Any], Exception]" = field(default_factory=dict)


class Task(Future[T]):
    """A coroutine being run. Awaiting a task does not own it: a cancelled waiter leaves it running."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], name: str, queues: Queues) -> None:
        super().__init__(name)
        self._coroutine = coroutine
        self._queues = queues
        self._waits_for: Future[Any] | None = None
        self._cancel = False
        #: How often the task has waited, and at which of these waits it is to be cancelled.
        self.waits = 0
        self.cancel_at_wait: int | None = None

    def cancel(self) -> None:
        """Throw Cancelled into the task where it waits. It ends when its clean-up has."""
        if not self.done:
            self._cancel = True
            if self._waits_for is not None:
                self._waits_for.forget(self._wake)
                self._wake()

    def result(self) -> T:
        self._queues.unseen.pop(self, None)
        return super().result()

    def _wake(self) -> None:
        self._waits_for = None
        self._queues.ready.append(self)

    def step(self) -> None:
        """Run to the next await that has to wait."""
        cancel, self._cancel = self._cancel, False
        try:
            future = self._coroutine.throw(Cancelled()) if cancel else self._coroutine.send(None)
        except StopIteration as stop:
            self.set_result(stop.value)
        except (Cancelled, Exception) as error:
            if isinstance(error, Exception):
                self._queues.unseen[self] = error
            self.set_error(error)
        else:
            self.waits += 1
            self._waits_for = future
            future.when_done(self._wake)
            if (
                self._cancel or self.waits == self.cancel_at_wait
            ):  # the former if it cancelled itself and waits only now
                self.cancel()


class Event:
    """Something that happens once."""

    def __init__(self, name: str) -> None:
        self._happened = Future[None](name)

    @property
    def is_set(self) -> bool:
        return self._happened.done

    def set(self) -> None:
        self._happened.set_result(None)

    async def wait(self) -> None:
        await self._happened


class Slots:
    """A number of places, given in the order in which they were asked for."""

    def __init__(self, count: int) -> None:
        self.taken = 0
        self._count = count
        self._waiting: deque[Event] = deque()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        if self.taken < self._count:
            self.taken += 1
        else:
            await self._turn()
        try:
            yield
        finally:
            self._pass_on()

    async def _turn(self) -> None:
        turn = Event("slot")
        self._waiting.append(turn)
        try:
            await turn.wait()
        except Cancelled:
            if turn.is_set:  # the place came in the moment of the cancellation
                self._pass_on()
            else:
                self._waiting.remove(turn)
            raise

    def _pass_on(self) -> None:
        if self._waiting:
            self._waiting.popleft().set()
        else:
            self.taken -= 1
