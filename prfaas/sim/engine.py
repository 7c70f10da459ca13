"""How one simulated instance divides its time between prefill and decode: two rules behind one interface.

`SlicedEngine` has fixed time slices, as the planner assumes: while both kinds of work are there, prefill gets its share
s and decode steps take step / (1 - s); while one is idle the other has all the time.
"""

from typing import Protocol

from prfaas.node.engine_share import LEAST_SHARE
from prfaas.profile import DecodeProfile
from prfaas.request import AttemptId
from prfaas.sim.decode_batch import DecodeBatch, Sequence
from prfaas.sim.kernel import Kernel
from prfaas.sim.prefill_queue import PrefillJob, PrefillQueue
from prfaas.sim.step_times import StepTimes


class Engine(Protocol):
    """`turn_engine.TurnEngine` is the other one."""

    def prefill(self, job: PrefillJob) -> None: ...

    def decode(self, sequence: Sequence) -> None: ...

    def forget(self, attempt: AttemptId) -> None: ...

    def set_share(self, share: float, max_batch: int) -> None:
        """The node's role has changed: the share of its time for prefill, and how many sequences it may decode."""
        ...

    @property
    def prefills(self) -> int: ...

    @property
    def prefill_tokens(self) -> int:
        """Still to be computed."""
        ...

    @property
    def active(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    @property
    def prefill_busy_s(self) -> float:
        """Seconds in which there was something to prefill, so far."""
        ...

    def check(self) -> None: ...


class SlicedEngine:
    def __init__(
        self,
        kernel: Kernel,
        decode: DecodeProfile,
        *,
        chunk_tokens: int,
        token_batch: int,
        step_times: StepTimes,
    ) -> None:
        self._share = 0.0
        self._prefills = PrefillQueue(kernel, chunk_tokens, self._divide)
        self._decodes = DecodeBatch(kernel, decode, token_batch, self._divide, step_times)

    def prefill(self, job: PrefillJob) -> None:
        self._prefills.add(job)

    def decode(self, sequence: Sequence) -> None:
        self._decodes.add(sequence)

    def forget(self, attempt: AttemptId) -> None:
        self._prefills.forget(attempt)
        self._decodes.forget(attempt)

    def set_share(self, share: float, max_batch: int) -> None:
        self._share = share
        self._decodes.max_batch = max_batch
        self._divide()

    @property
    def prefills(self) -> int:
        return len(self._prefills)

    @property
    def prefill_tokens(self) -> int:
        return self._prefills.tokens

    @property
    def active(self) -> int:
        return self._decodes.active

    @property
    def waiting(self) -> int:
        return self._decodes.waiting

    @property
    def prefill_busy_s(self) -> float:
        return self._prefills.busy_s

    def check(self) -> None:
        self._prefills.check()
        self._decodes.check()

    def _divide(self) -> None:
        # What is left of another role, or falls back to the node, still comes to its end.
        share = min(1 - LEAST_SHARE, max(LEAST_SHARE, self._share))
        both = len(self._prefills) > 0 and len(self._decodes) > 0
        self._prefills.set_rate(share if both else 1.0)
        self._decodes.set_share(1.0 - share if both else 1.0)
