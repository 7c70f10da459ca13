"""The embedded engine's rule (`prfaas.node.engine_loop`) in virtual time: one decode step for the whole batch, one
chunk of the oldest prefill, and again, each as often as the product's own `TimeShare` says. What arrives during a step
or a chunk waits for the next turn.

Every step is an event here, so this is for runs the size of one machine, to be compared with live ones.
"""

from dataclasses import dataclass

from prfaas.kvcache.layout import chunk_ends
from prfaas.node.engine_share import TimeShare
from prfaas.profile import DecodeProfile, Profile
from prfaas.request import AttemptId
from prfaas.sim.decode_batch import Drawn, Sequence
from prfaas.sim.kernel import Kernel
from prfaas.sim.prefill_queue import PrefillJob
from prfaas.sim.step_times import StepTimes


@dataclass(slots=True)
class _Prefilling:
    job: PrefillJob
    ends: tuple[int, ...] = ()
    computed: int = 0


@dataclass(slots=True)
class _Decoding:
    sequence: Sequence
    total: int = 0
    last_s: float = 0.0


class TurnEngine:
    def __init__(
        self,
        kernel: Kernel,
        profile: Profile,
        decode: DecodeProfile,
        *,
        chunk_tokens: int,
        token_batch: int,
        step_times: StepTimes,
    ) -> None:
        self._kernel, self._profile, self._decode = kernel, profile, decode
        self._chunk_tokens, self._token_batch, self._step_times = chunk_tokens, token_batch, step_times
        self._max_batch = decode.max_batch
        self._queue: dict[AttemptId, _Prefilling] = {}
        self._waiting: dict[AttemptId, _Decoding] = {}
        self._active: dict[AttemptId, _Decoding] = {}
        self._share = TimeShare()
        self._turning = False
        self._prefill_busy_s = 0.0

    def prefill(self, job: PrefillJob) -> None:
        self._queue[job.attempt] = _Prefilling(job)
        self._wake()

    def decode(self, sequence: Sequence) -> None:
        self._waiting[sequence.attempt] = _Decoding(sequence)
        self._wake()

    def forget(self, attempt: AttemptId) -> None:
        for place in (self._queue, self._waiting, self._active):
            place.pop(attempt, None)

    def set_share(self, share: float, max_batch: int) -> None:
        self._share.set(share)
        self._max_batch = max_batch

    @property
    def prefills(self) -> int:
        return len(self._queue)

    @property
    def prefill_tokens(self) -> int:
        return sum(each.job.uncached_tokens - each.computed for each in self._queue.values())

    @property
    def active(self) -> int:
        return len(self._active)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def prefill_busy_s(self) -> float:
        return self._prefill_busy_s

    def check(self) -> None:
        for place, each in enumerate(self._queue.values()):
            assert each.job.started_s is None or place == 0, "only the oldest prefill is under way"
        for decoding in self._active.values():
            assert decoding.total < decoding.sequence.tokens, "a finished sequence is still active"

    def _wake(self) -> None:
        if not self._turning:
            self._turning = True
            self._turn()

    def _turn(self) -> None:
        if not (self._queue or self._waiting or self._active):
            self._turning = False
            return
        while self._waiting and len(self._active) < self._max_batch:
            attempt = next(iter(self._waiting))
            decoding = self._active[attempt] = self._waiting.pop(attempt)
            decoding.sequence.joined_s = self._kernel.now()
        both = bool(self._active and self._queue)
        if not both:
            self._share.alone()
        if self._active and not (both and self._share.prefill_due):
            self._step(both)
        else:
            self._chunk(both)

    def _step(self, both: bool) -> None:
        stepping = list(self._active.values())
        seconds = self._decode.step_s(len(stepping))
        self._kernel.call_later(seconds, lambda: self._stepped(stepping, seconds, both))

    def _stepped(self, stepping: list[_Decoding], seconds: float, both: bool) -> None:
        now = self._kernel.now()
        for each in stepping:
            if self._active.get(each.sequence.attempt) is not each:
                continue
            each.total += 1
            if each.total > 1:
                self._step_times.add(now - each.last_s, 1)
            each.last_s = now
            self._deliver(each)
        if both:
            self._share.decoded(seconds)
        if both and self._share.prefill_due:
            self._chunk(both)
        else:
            self._turn()

    def _deliver(self, each: _Decoding) -> None:
        sequence = each.sequence
        first, finished = each.total == 1, each.total == sequence.tokens
        if finished:
            del self._active[sequence.attempt]
        count = each.total - sequence.delivered
        if first or finished or count == self._token_batch:
            sequence.delivered = each.total
            queue_s = sequence.joined_s - sequence.arrived_s if first else None
            step_s = self._kernel.now() - sequence.joined_s if first else None
            sequence.deliver(Drawn(count, each.total, finished, queue_s, step_s))

    def _chunk(self, both: bool) -> None:
        oldest = next(iter(self._queue.values()), None)
        if oldest is None:
            self._turn()
            return
        job = oldest.job
        if job.started_s is None:
            job.started_s = self._kernel.now()
            begun = job.begin()
            if begun is None:
                del self._queue[job.attempt]
                self._chunk(both)
                return
            cached_tokens, _ = begun
            job.cached_tokens, job.uncached_tokens = cached_tokens, job.tokens + 1 - cached_tokens
            oldest.ends = tuple(end for end in chunk_ends(job.tokens, self._chunk_tokens) if end > cached_tokens)
        if not oldest.ends:
            self._computed(oldest, 0, 0.0, both)
            return
        start, end = job.cached_tokens + oldest.computed, oldest.ends[0]
        seconds = self._profile.prefill_s(end, start)
        job.feed((end - start) / seconds if seconds > 0 else 0.0)
        self._kernel.call_later(seconds, lambda: self._computed(oldest, end - start, seconds, both))

    def _computed(self, each: _Prefilling, tokens: int, seconds: float, both: bool) -> None:
        job = each.job
        each.computed, each.ends = each.computed + tokens, each.ends[1:]
        self._prefill_busy_s += seconds
        if both:
            self._share.prefilled(seconds)
        if self._queue.get(job.attempt) is each:
            job.feed(0.0)
            if not each.ends:
                del self._queue[job.attempt]
                assert job.started_s is not None
                job.done(job.started_s - job.arrived_s, self._kernel.now() - job.started_s)
        self._turn()
