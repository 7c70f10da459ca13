"""Continuous batching of one simulated instance: all sequences in the batch advance together, one token a step.

Nothing is simulated per token. Between two joins or leaves the steps are equally long, so one counter of steps tells
how far everybody is, and the next event is the earliest step at which tokens are due to someone. Sequences join and
leave between two steps only; those for whom the batch has no slot wait, first come, first served.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from prfaas.profile import DecodeProfile
from prfaas.request import AttemptId
from prfaas.sim.kernel import Kernel, Timer
from prfaas.sim.step_times import StepTimes


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that one sequence got: `count` of them, up to `total` now; the first come with the waits before them."""

    count: int
    total: int
    finished: bool
    queue_s: float | None = None
    step_s: float | None = None


@dataclass(slots=True)
class Sequence:
    """One sequence that is to get `tokens` tokens. `deliver` takes them: the first one at once, then batches."""

    attempt: AttemptId
    tokens: int
    arrived_s: float
    deliver: Callable[[Drawn], None]
    joined_s: float = 0.0
    joined_step: int = 0
    delivered: int = 0


class DecodeBatch:
    """`changed` is called when the batch becomes empty or is no longer."""

    def __init__(
        self,
        kernel: Kernel,
        profile: DecodeProfile,
        token_batch: int,
        changed: Callable[[], None],
        step_times: StepTimes,
    ) -> None:
        self._kernel, self._profile, self._token_batch, self._changed = kernel, profile, token_batch, changed
        self._step_times = step_times
        #: May be lowered; who is in the batch already stays.
        self.max_batch = profile.max_batch
        self._active: dict[AttemptId, Sequence] = {}
        self._waiting: dict[AttemptId, Sequence] = {}
        self._due: list[tuple[int, int, Sequence]] = []
        self._pushed = 0
        #: Whole steps made, and the part of the one under way.
        self._steps, self._part = 0, 0.0
        self._share = self._rate = 1.0
        self._settled_s = kernel.now()
        self._target: int | None = None
        self._timer: Timer | None = None
        self._busy_s = self._since_step_s = 0.0
        self._fresh = 0

    def __len__(self) -> int:
        return len(self._active) + len(self._waiting)

    def __contains__(self, attempt: AttemptId) -> bool:
        return attempt in self._active or attempt in self._waiting

    @property
    def active(self) -> int:
        return len(self._active)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def busy_s(self) -> float:
        """Seconds in which there was something to decode, so far."""
        self._settle()
        return self._busy_s

    def add(self, sequence: Sequence) -> None:
        assert sequence.attempt not in self, f"attempt {sequence.attempt} decodes twice"
        self._settle()
        self._waiting[sequence.attempt] = sequence
        if not self._active:
            self._part = self._since_step_s = 0.0
            self._changed()
            self._join()
        self._run()

    def forget(self, attempt: AttemptId) -> None:
        """Its slot is free from the next step on."""
        if self._waiting.pop(attempt, None) is None and attempt in self._active:
            self._settle()
            del self._active[attempt]
            if not self._active:
                self._part = self._since_step_s = 0.0
                self._join()
            self._run()
            if not self._active:
                self._changed()

    def set_share(self, share: float) -> None:
        """The share of the instance's time that decode gets."""
        if share != self._share:
            self._settle()
            self._share = share
            self._run()

    def check(self) -> None:
        assert len(self._active) <= self._profile.max_batch
        assert not self._waiting or self._target is not None, "sequences wait for a batch that stands still"
        for sequence in self._active.values():
            assert sequence.delivered < sequence.tokens, "a finished sequence is still active"

    def _settle(self) -> None:
        """Account for the time since the rate last changed."""
        now = self._kernel.now()
        seconds, self._settled_s = now - self._settled_s, now
        if seconds <= 0 or not self._active:
            return
        self._busy_s += seconds
        self._advance(seconds)

    def _advance(self, seconds: float) -> None:
        made = self._part + seconds * self._rate
        whole = int(made)
        if self._target is not None:
            # Rounding must not carry the counter over a step at which somebody is due.
            whole = min(whole, self._target - self._steps)
        if not whole:
            self._part, self._since_step_s = min(made, 1.0), self._since_step_s + seconds
            return
        first_s = self._since_step_s + (1.0 - self._part) / self._rate
        self._step_times.add(first_s, len(self._active) - self._fresh)
        if whole > 1:
            self._step_times.add(1.0 / self._rate, (whole - 1) * len(self._active))
        self._fresh = 0
        self._steps += whole
        self._part = max(0.0, min(1.0, made - whole))
        self._since_step_s = self._part / self._rate

    def _run(self) -> None:
        """Wait for the next step at which somebody is due, at the present rate."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._target = None
        if not self._active:
            return
        self._rate = self._share / self._profile.step_s(len(self._active))
        while self._due and self._due[0][2].attempt not in self._active:
            heapq.heappop(self._due)
        target = self._due[0][0]
        if self._waiting and len(self._active) < self.max_batch:
            target = min(target, self._steps + 1)
        self._target = target
        self._timer = self._kernel.call_later((target - self._steps - self._part) / self._rate, self._step_due)

    def _step_due(self) -> None:
        self._timer = None
        self._settle()
        # Exactly there, whatever rounding says.
        assert self._target is not None
        if self._steps < self._target:
            self._step_times.add(self._since_step_s, len(self._active) - self._fresh)
            self._steps, self._fresh = self._target, 0
        self._part = self._since_step_s = 0.0
        drawn = []
        while self._due and self._due[0][0] == self._steps:
            _, _, sequence = heapq.heappop(self._due)
            if self._active.get(sequence.attempt) is sequence:
                drawn.append((sequence, self._draw(sequence)))
        self._join()
        self._run()
        if not self._active:
            self._changed()
        for sequence, tokens in drawn:
            sequence.deliver(tokens)

    def _draw(self, sequence: Sequence) -> Drawn:
        total = self._steps - sequence.joined_step
        count, first = total - sequence.delivered, sequence.delivered == 0
        sequence.delivered = total
        finished = total >= sequence.tokens
        if finished:
            del self._active[sequence.attempt]
        else:
            self._push(sequence, min(sequence.tokens, total + self._token_batch))
        return Drawn(
            count,
            total,
            finished,
            queue_s=sequence.joined_s - sequence.arrived_s if first else None,
            step_s=self._kernel.now() - sequence.joined_s if first else None,
        )

    def _join(self) -> None:
        """Give free slots to those who wait."""
        while self._waiting and len(self._active) < self.max_batch:
            attempt = next(iter(self._waiting))
            sequence = self._active[attempt] = self._waiting.pop(attempt)
            sequence.joined_s, sequence.joined_step = self._kernel.now(), self._steps
            self._fresh += 1
            self._push(sequence, 1)

    def _push(self, sequence: Sequence, total: int) -> None:
        self._pushed += 1
        heapq.heappush(self._due, (sequence.joined_step + total, self._pushed, sequence))
