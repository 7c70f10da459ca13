"""Prefills of one simulated instance: first come, first served, one at a time, at whatever share of the instance's
time they get.

The oldest is under way; its KV becomes ready for sending as it is computed. Work is counted in seconds of the whole
instance: at rate 1 a second of work takes a second.
"""

from collections.abc import Callable
from dataclasses import dataclass

from prfaas.request import AttemptId
from prfaas.sim.kernel import Kernel, Timer


@dataclass(slots=True)
class PrefillJob:
    """One prompt to compute up to `tokens`, all but its last: that one is counted with the others nevertheless, because
    routers count whole prompts.

    `begin` is called when its turn comes and tells the tokens that are cached and the seconds of work that remain, or
    None when it cannot begin and is given up; `feed` whenever the tokens computed per second change; `done` at the end,
    with seconds of queueing and of computing.
    """

    attempt: AttemptId
    tokens: int
    arrived_s: float
    begin: Callable[[], tuple[int, float] | None]
    feed: Callable[[float], None]
    done: Callable[[float, float], None]
    #: How many are left to compute; until it has begun, how many are expected to be.
    uncached_tokens: int
    cached_tokens: int = 0
    started_s: float | None = None
    work_s: float = 0.0
    left_s: float = 0.0


class PrefillQueue:
    """`changed` is called when the queue becomes empty or is no longer. Progress is reported by whole chunks."""

    def __init__(self, kernel: Kernel, chunk_tokens: int, changed: Callable[[], None]) -> None:
        self._kernel, self._chunk_tokens, self._changed = kernel, chunk_tokens, changed
        self._queue: dict[AttemptId, PrefillJob] = {}
        self._rate = 1.0
        self._settled_s = kernel.now()
        self._timer: Timer | None = None
        self._busy_s = 0.0
        self._waiting_tokens = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, attempt: AttemptId) -> bool:
        return attempt in self._queue

    @property
    def busy_s(self) -> float:
        """Seconds in which there was something to compute, so far."""
        self._settle()
        return self._busy_s

    @property
    def tokens(self) -> int:
        """Still to be computed."""
        head = self._head()
        if head is None:
            return 0
        self._settle()
        left = head.left_s / head.work_s if head.work_s > 0 else 0.0
        computed = int((1.0 - left) * head.uncached_tokens) // self._chunk_tokens * self._chunk_tokens
        return self._waiting_tokens + head.uncached_tokens - computed

    def add(self, job: PrefillJob) -> None:
        assert job.attempt not in self._queue, f"attempt {job.attempt} prefills twice"
        self._settle()
        self._queue[job.attempt] = job
        self._waiting_tokens += job.uncached_tokens
        if len(self._queue) == 1:
            self._changed()
            self._next()

    def forget(self, attempt: AttemptId) -> None:
        job = self._queue.get(attempt)
        if job is None:
            return
        if job.started_s is None:
            del self._queue[attempt]
            self._waiting_tokens -= job.uncached_tokens
        else:
            self._settle()
            self._remove(job)

    def set_rate(self, rate: float) -> None:
        """Seconds of work done per second."""
        if rate != self._rate:
            self._settle()
            self._rate = rate
            self._run()

    def check(self) -> None:
        waiting = sum(job.uncached_tokens for job in self._queue.values() if job.started_s is None)
        assert waiting == self._waiting_tokens, "tokens waiting for prefill do not add up"
        for place, job in enumerate(self._queue.values()):
            assert (job.started_s is not None) == (place == 0), "only the oldest prefill is under way"

    def _head(self) -> PrefillJob | None:
        return next(iter(self._queue.values()), None)

    def _settle(self) -> None:
        now = self._kernel.now()
        seconds, self._settled_s = now - self._settled_s, now
        if seconds > 0 and (head := self._head()) is not None:
            self._busy_s += seconds
            head.left_s = max(0.0, head.left_s - seconds * self._rate)

    def _next(self) -> None:
        """Begin the oldest."""
        while (head := self._head()) is not None:
            self._waiting_tokens -= head.uncached_tokens
            head.started_s = self._kernel.now()
            begun = head.begin()
            if begun is not None:
                cached_tokens, head.work_s = begun
                head.cached_tokens = cached_tokens
                head.uncached_tokens = head.tokens + 1 - cached_tokens
                head.left_s = head.work_s
                self._run()
                return
            del self._queue[head.attempt]
        self._changed()

    def _run(self) -> None:
        """Go on with the oldest at the present rate."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        head = self._head()
        if head is None or head.started_s is None:
            return
        tokens = head.tokens - head.cached_tokens
        head.feed(tokens / head.work_s * self._rate if head.work_s > 0 else 0.0)
        self._timer = self._kernel.call_later(head.left_s / self._rate, self._finished)

    def _finished(self) -> None:
        self._settle()
        self._timer = None
        head = self._head()
        assert head is not None and head.started_s is not None
        self._remove(head)
        head.done(head.started_s - head.arrived_s, self._kernel.now() - head.started_s)

    def _remove(self, head: PrefillJob) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        del self._queue[head.attempt]
        self._next()
