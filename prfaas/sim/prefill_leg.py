"""One prefill at the worker that computes it: from the queue over the line to the reservation it was made for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prfaas.errors import Overloaded, PrfaasError, TransferFailed
from prfaas.flows.ports import PrefillReport
from prfaas.request import AttemptId, Match, Request
from prfaas.sim.kernel import Kernel, Timer
from prfaas.sim.link import Line
from prfaas.sim.prefill_queue import PrefillJob
from prfaas.sim.push import Push

if TYPE_CHECKING:
    from prfaas.sim.worker import SimWorker


@dataclass(frozen=True, slots=True)
class Way:
    """How KV gets to a reservation on another node: the line that is shared, or the fabric's speed."""

    target: "SimWorker"
    generation: int
    route: Line | float
    hop_s: float
    breaks: Callable[[], bool]


class PrefillLeg:
    """`way` is None when the reservation is on the same worker."""

    def __init__(
        self,
        kernel: Kernel,
        worker: "SimWorker",
        attempt: AttemptId,
        request: Request,
        way: Way | None,
        reply: Callable[[Any], None],
    ) -> None:
        self._kernel, self._worker, self._attempt, self._request = kernel, worker, attempt, request
        self._way, self._reply = way, reply
        self._push = Push(kernel, worker.node.id, way.route, way.hop_s, self._arrived, self._lost) if way else None
        self._resumed = Match()
        self.held_bytes = 0
        self._times = (0.0, 0.0)
        self._receipt: Timer | None = None

    def job(self) -> PrefillJob:
        request, worker = self._request, self._worker
        expected = worker.caches.held(worker.node.id, request).joint
        return PrefillJob(
            attempt=self._attempt,
            tokens=request.handoff_tokens,
            arrived_s=self._kernel.now(),
            begin=self._begin,
            feed=self._feed,
            done=self._computed,
            uncached_tokens=request.prompt_tokens - expected,
        )

    def fail(self, error: PrfaasError) -> None:
        """The reservation or the line is gone: all of it ends, and whoever asked is told."""
        self._worker.end_prefill(self._attempt)
        self._reply(error)

    def end(self) -> None:
        """Let go of everything. Idempotent."""
        if self._push is not None:
            self._push.end()
        if self._receipt is not None:
            self._receipt.cancel()
        if self._way is not None:
            self._way.target.expect(self._attempt, self._way.generation, None)
        self._worker.kv_free_bytes += self.held_bytes
        self.held_bytes = 0

    def _begin(self) -> tuple[int, float] | None:
        request, worker = self._request, self._worker
        profile, tokens = worker.instance.profile, request.handoff_tokens
        resumed = self._resumed = worker.caches.resume(worker.node.id, request)
        if self._push is not None and self._way is not None:
            nbytes = int(profile.kv_bytes(tokens))
            if nbytes > worker.kv_free_bytes:
                worker.give_up_prefill(self._attempt)
                self._reply(Overloaded(f"kv bytes of {worker.node.id}"))
                return None
            self.held_bytes = nbytes
            worker.kv_free_bytes -= nbytes
            there = worker.caches.held(self._way.target.node.id, request).kv
            computed_from = max(resumed.joint, there)
            ready = profile.kv(computed_from) - profile.kv(there)
            streamed = profile.kv(tokens) - profile.kv(computed_from)
            per_token = streamed / (tokens - resumed.joint) if tokens > resumed.joint else 0.0
            self._push.open(ready, per_token, profile.kv_bytes(tokens, there))
        return resumed.joint, worker.slowness * profile.prefill_s(tokens, resumed.joint)

    def _feed(self, tokens_per_s: float) -> None:
        if self._push is not None:
            self._push.feed(tokens_per_s)

    def _computed(self, queue_s: float, compute_s: float) -> None:
        worker, request = self._worker, self._request
        self._times = (queue_s, compute_s)
        worker.caches.computed(worker.node.id, request, self._resumed)
        if self._push is not None:
            self._push.close()
            return
        worker.complete(self._attempt, worker.instance.content.kv_of(request))
        self._report(0.0, 0)

    def _arrived(self) -> None:
        way = self._way
        assert way is not None
        if way.breaks():
            self.fail(TransferFailed(self._attempt, "line"))
            return
        target, request = way.target, self._request
        target.caches.received(target.node.id, request)
        target.complete(self._attempt, self._worker.instance.content.kv_of(request))
        self._receipt = self._kernel.call_later(way.hop_s, self._acknowledged)

    def _acknowledged(self) -> None:
        assert self._push is not None and self._push.computed_s is not None
        self._report(self._kernel.now() - self._push.computed_s, round(self._push.total_bytes))

    def _lost(self) -> None:
        self.fail(TransferFailed(self._attempt, "no progress"))

    def _report(self, exposed_s: float, kv_bytes: int) -> None:
        queue_s, compute_s = self._times
        self._worker.end_prefill(self._attempt)
        self._reply(
            PrefillReport(
                queue_s=queue_s,
                compute_s=compute_s,
                exposed_s=exposed_s,
                prefill_tokens=self._request.handoff_tokens - self._resumed.joint,
                kv_bytes=kv_bytes,
            )
        )
