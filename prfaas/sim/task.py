"""What coroutines wait for in virtual time: futures, events, and other tasks.

A task runs until it awaits a future that has no outcome yet. It becomes ready again when that comes or when the task is
cancelled; `prfaas.sim.kernel` decides who runs next.
"""

from collections import deque
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Cancelled(BaseException):
    """Thrown into a task at its await when the task is cancelled."""


class Expired(Cancelled):
    """Thrown into a task at its await when a limit that the task itself has set runs out. `felt`: it has been."""

    felt = False


class Future(Generic[T]):
    """A result that comes later; the first outcome stays. Waiting for it may be cancelled without harm to it."""

    __slots__ = ("_error", "_result", "_when_done", "done", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.done = False
        self._result: T
        self._error: BaseException | None = None
        self._when_done: list[Callable[[], None]] = []

    def set_result(self, result: T) -> None:
        if not self.done:
            self._result = result
            self._settle()

    def set_error(self, error: BaseException) -> None:
        if not self.done:
            self._error = error
            self._settle()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._result

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

    def _settle(self) -> None:
        self.done = True
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

    __slots__ = ("_at_next_wait", "_coroutine", "_now", "_queues", "_waits_for", "cancel_at_wait", "tag", "waits")

    def __init__(self, coroutine: Coroutine[Any, Any, T], name: str, queues: Queues) -> None:
        super().__init__(name)
        self.tag = name.encode()
        self._coroutine = coroutine
        self._queues = queues
        self._waits_for: Future[Any] | None = None
        #: What is thrown in when the task runs next, and what as soon as it waits again.
        self._now: Cancelled | None = None
        self._at_next_wait: Expired | None = None
        #: How often the task has waited, and at which of these waits it is to be cancelled.
        self.waits = 0
        self.cancel_at_wait: int | None = None

    def cancel(self) -> None:
        """Throw Cancelled into the task where it waits. It ends when its clean-up has."""
        if not self.done:
            self._throw(Cancelled())

    def expire(self, limit: Expired) -> None:
        """A limit ran out. A task that is about to run has got what it waited for: it may have finished in time."""
        if self._waits_for is not None:
            self._throw(limit)
        elif self._now is None:
            self._at_next_wait = limit

    def unlimit(self, limit: Expired) -> None:
        """What was limited is over."""
        if self._at_next_wait is limit:
            self._at_next_wait = None

    def result(self) -> T:
        self._queues.unseen.pop(self, None)
        return super().result()

    def step(self) -> None:
        """Run to the next await that has to wait."""
        thrown, self._now = self._now, None
        if isinstance(thrown, Expired):
            thrown.felt = True
        try:
            future = self._coroutine.send(None) if thrown is None else self._coroutine.throw(thrown)
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
            if self.waits == self.cancel_at_wait:
                self.cancel()
            elif self._now is not None or self._at_next_wait is not None:
                self._interrupt()

    def _interrupt(self) -> None:
        """The task cancelled itself, or a limit ran out in the moment in which it went on."""
        thrown = self._now or self._at_next_wait
        assert thrown is not None
        self._at_next_wait = None
        self._throw(thrown)

    def _throw(self, cancelled: Cancelled) -> None:
        self._now = cancelled
        if self._waits_for is not None:
            self._waits_for.forget(self._wake)
            self._wake()

    def _wake(self) -> None:
        self._waits_for = None
        self._queues.ready.append(self)


class Event:
    """Something that happens once."""

    __slots__ = ("_happened",)

    def __init__(self, name: str) -> None:
        self._happened = Future[None](name)

    @property
    def is_set(self) -> bool:
        return self._happened.done

    def set(self) -> None:
        self._happened.set_result(None)

    def when_set(self, call: Callable[[], None]) -> None:
        """Call it when it happens, or now when it has."""
        self._happened.when_done(call)

    async def wait(self) -> None:
        await self._happened
