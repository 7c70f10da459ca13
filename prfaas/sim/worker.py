"""A simulated worker: what the other end of the flows' port calls does and holds.

Work belongs to the worker, not to whoever asked for it: it goes on until it is done or the attempt is ended, so that a
caller who walks away without a release is found by `check_idle`. KV is a digest of the prompt it was computed from and
tokens are drawn from that digest, so that KV which is missing or another request's shows in the output.
"""

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from prfaas.cluster import Node, NodeLoad
from prfaas.errors import EngineFailed, Overloaded, PrfaasError, TransferFailed
from prfaas.flows.ports import PrefillReport, Reservation, TokenBatch
from prfaas.request import TOKEN_BYTES, AttemptId, FinishReason, Request
from prfaas.sim.kernel import Kernel
from prfaas.sim.task import Event, Slots, Task

Reply = Callable[[Any], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """How long work takes, how large KV is, and how much of both a worker has room for."""

    prefill_s_per_token: float = 0.0005
    step_s: float = 0.02
    state_bytes: int = 20_000
    kv_bytes_per_token: int = 100
    kv_room_bytes: int = 10_000_000
    decode_slots: int = 4

    def kv_bytes(self, tokens: int) -> int:
        return self.state_bytes + self.kv_bytes_per_token * tokens


@dataclass(slots=True)
class Hold:
    """KV of one attempt. `content` is set when it is complete."""

    tokens: int
    nbytes: int
    generation: int
    content: bytes | None = None


def expected_output(request: Request) -> bytes:
    """The tokens that any correct run of the request yields."""
    content = _kv_of(request)
    return b"".join(_token(content, request, position) for position in range(request.sampling.max_tokens))


class SimWorker:
    """One incarnation of a node."""

    def __init__(self, kernel: Kernel, node: Node, costs: Costs) -> None:
        self.node = node
        self.died = Event(f"death of {node.id}")
        self.kv_free_bytes = costs.kv_room_bytes
        self._kernel = kernel
        self._costs = costs
        self._engine, self._decoding = Slots(1), Slots(costs.decode_slots)
        self._holds: dict[AttemptId, Hold] = {}
        self._jobs: dict[AttemptId, list[Task[None]]] = {}
        self._queued_prefill_tokens = 0
        self._generations = 0

    def registration(self) -> Node:
        """The node with its present load."""
        load = NodeLoad(
            queued_prefill_tokens=self._queued_prefill_tokens,
            active_sequences=self._decoding.taken,
            committed_tokens=sum(hold.tokens for hold in self._holds.values()),
            kv_free_bytes=self.kv_free_bytes,
            kv_total_bytes=self._costs.kv_room_bytes,
        )
        return replace(self.node, load=load)

    def start(self, attempt: AttemptId, name: str, job: Callable[["SimWorker"], Awaitable[Any]], reply: Reply) -> None:
        """Run a job of an attempt until it is done, or the attempt is ended, or this worker dies."""

        async def run() -> None:
            try:
                answer = await job(self)
            except PrfaasError as error:
                answer = error
            reply(answer)

        task = self._kernel.spawn(run(), f"{self.node.id} {name}")
        self._jobs.setdefault(attempt, []).append(task)
        task.when_done(lambda: self._job_ended(attempt, task))

    async def reserve(self, attempt: AttemptId, request: Request) -> Reservation:
        hold = self._take(attempt, request.prompt_tokens + request.sampling.max_tokens)
        return Reservation(
            decode=self.node.id,
            attempt=attempt,
            kv_address=self.node.kv_address_for(self.node.region),
            generation=hold.generation,
            incarnation=self.node.incarnation,
        )

    async def prefill(
        self,
        attempt: AttemptId,
        request: Request,
        reservation: Reservation,
        push: Callable[[bytes, int], Awaitable[None]],
    ) -> PrefillReport:
        """Compute; then `push` the KV to the reservation, unless that is here."""
        if reservation.decode == self.node.id:
            queue_s, compute_s = await self._compute(request)
            self.receive(reservation, _kv_of(request))
            return PrefillReport(
                queue_s=queue_s,
                compute_s=compute_s,
                exposed_s=0.0,
                prefill_tokens=request.handoff_tokens,
                kv_bytes=0,
            )
        nbytes = self._take(attempt, request.handoff_tokens).nbytes
        try:
            queue_s, compute_s = await self._compute(request)
            computed = self._kernel.now()
            await push(_kv_of(request), nbytes)
        finally:
            self._free(attempt)
        return PrefillReport(
            queue_s=queue_s,
            compute_s=compute_s,
            exposed_s=self._kernel.now() - computed,
            prefill_tokens=request.handoff_tokens,
            kv_bytes=nbytes,
        )

    async def _compute(self, request: Request) -> tuple[float, float]:
        """Seconds in the queue and seconds of work."""
        arrived = self._kernel.now()
        self._queued_prefill_tokens += request.prompt_tokens
        try:
            async with self._engine.one():
                started = self._kernel.now()
                await self._kernel.sleep(self._costs.prefill_s_per_token * request.handoff_tokens)
        finally:
            self._queued_prefill_tokens -= request.prompt_tokens
        return started - arrived, self._kernel.now() - started

    def receive(self, reservation: Reservation, content: bytes) -> None:
        """KV arrives, for a reservation that may be gone."""
        hold = self._holds.get(reservation.attempt)
        if hold is None:
            raise TransferFailed(reservation.attempt, "released")
        hold.content = content

    async def decode(self, attempt: AttemptId, request: Request, reply: Reply) -> TokenBatch:
        """Reply with a batch for each token but the last, which is the answer of the job."""
        hold = self._holds.get(attempt)
        if hold is None or hold.content is None:
            raise EngineFailed(self.node.id, "nothing was handed over")
        arrived = self._kernel.now()
        async with self._decoding.one():
            queue_s = self._kernel.now() - arrived
            for position in range(request.sampling.max_tokens):
                await self._kernel.sleep(self._costs.step_s)
                batch = TokenBatch(
                    tokens=_token(hold.content, request, position),
                    first_queue_s=None if position else queue_s,
                    first_step_s=None if position else self._costs.step_s,
                )
                if position + 1 < request.sampling.max_tokens:
                    reply(batch)
        return replace(batch, finish=FinishReason.LENGTH, recomputed_tokens=1)

    def end(self, attempt: AttemptId) -> None:
        """Stop what runs for the attempt and free what it holds, if there is anything."""
        for task in self._jobs.get(attempt, ()):
            task.cancel()
        self._free(attempt)

    def die(self) -> None:
        for attempt in [*self._jobs, *self._holds]:
            self.end(attempt)
        self.died.set()

    def check(self) -> None:
        held = sum(hold.nbytes for hold in self._holds.values())
        assert self.kv_free_bytes + held == self._costs.kv_room_bytes, f"{self.node.id}: KV bytes do not add up"
        assert self.kv_free_bytes >= 0, f"{self.node.id}: more KV held than there is"

    def check_idle(self) -> None:
        self.check()
        assert not self._holds, f"{self.node.id} still holds KV of {list(self._holds)}"
        assert not self._jobs, f"{self.node.id} still works for {list(self._jobs)}"
        assert self._queued_prefill_tokens == 0, f"{self.node.id} still counts prefill tokens"
        assert self._engine.taken == self._decoding.taken == 0, f"{self.node.id} still has slots taken"

    def _take(self, attempt: AttemptId, tokens: int) -> Hold:
        nbytes = self._costs.kv_bytes(tokens)
        if nbytes > self.kv_free_bytes:
            raise Overloaded(f"kv bytes of {self.node.id}")
        assert attempt not in self._holds, f"attempt {attempt} takes room on {self.node.id} twice"
        self._generations += 1
        hold = self._holds[attempt] = Hold(tokens, nbytes, self._generations)
        self.kv_free_bytes -= nbytes
        return hold

    def _free(self, attempt: AttemptId) -> None:
        hold = self._holds.pop(attempt, None)
        if hold is not None:
            self.kv_free_bytes += hold.nbytes

    def _job_ended(self, attempt: AttemptId, task: Task[None]) -> None:
        self._jobs[attempt].remove(task)
        if not self._jobs[attempt]:
            del self._jobs[attempt]


def _kv_of(request: Request) -> bytes:
    return hashlib.sha256(request.prompt[: request.handoff_tokens * TOKEN_BYTES]).digest()


def _token(content: bytes, request: Request, position: int) -> bytes:
    last = request.prompt[request.handoff_tokens * TOKEN_BYTES :]
    return hashlib.sha256(content + last + position.to_bytes(4, "little")).digest()[:TOKEN_BYTES]
