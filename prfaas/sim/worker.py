"""A simulated worker: what the other end of the flows' port calls does and holds.

Work belongs to the worker, not to whoever asked for it: it goes on until it is done or the attempt is ended, so that a
caller who walks away without a release is found by `check_idle`. A reservation holds KV bytes; the batch slot is taken
at hand-off.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from prfaas.cluster import Egress, Node, NodeLoad, Role
from prfaas.errors import EngineFailed, Overloaded, PeerUnavailable, TransferFailed
from prfaas.flows.ports import Reservation, TokenBatch
from prfaas.request import AttemptId, FinishReason, Request
from prfaas.sim.answers import Answers
from prfaas.sim.caches import Caches
from prfaas.sim.decode_batch import Drawn, Sequence
from prfaas.sim.instance import Instance
from prfaas.sim.kernel import Kernel
from prfaas.sim.prefill_leg import PrefillLeg, Way
from prfaas.sim.step_times import StepTimes
from prfaas.sim.task import Event, Future

Reply = Callable[[Any], None]


@dataclass(slots=True)
class Hold:
    """A reservation. `content` is set when its KV is complete; `source` is who computes it."""

    tokens: int
    nbytes: int
    generation: int
    content: bytes | None = None
    source: PrefillLeg | None = None


class SimWorker:
    """One incarnation of a node."""

    def __init__(self, kernel: Kernel, node: Node, instance: Instance, caches: Caches, step_times: StepTimes) -> None:
        self.instance, self.caches = instance, caches
        self.died = Event(f"death of {node.id}")
        self.kv_free_bytes = instance.kv_room_bytes
        self.committed_tokens = 0
        self.engine = instance.engine(kernel, step_times)
        self.become(node)
        self._kernel = kernel
        self._holds: dict[AttemptId, Hold] = {}
        self._prefills: dict[AttemptId, PrefillLeg] = {}
        self._decodes: dict[AttemptId, Request] = {}
        self._answers: dict[AttemptId, list[Answers]] = {}
        self._generations = 0
        self._less = Future[None]("less work")
        #: Prefills that begin take so many times as long as they should.
        self.slowness = 1.0
        #: New work of which role it takes.
        self.accepts: Role | None = Role.MIXED

    def load(self, egress: tuple[Egress, ...] = (), prefill_busy_ratio: float | None = None) -> NodeLoad:
        """What it holds and does; what it has done lately only a reporter knows."""
        engine, max_batch = self.engine, self._max_batch
        decoding = engine.active
        return NodeLoad(
            queued_prefill_tokens=engine.prefill_tokens,
            active_sequences=len(self._holds),
            committed_tokens=self.committed_tokens,
            kv_free_bytes=self.kv_free_bytes,
            kv_total_bytes=self.instance.kv_room_bytes,
            decoding=decoding,
            waiting_decodes=engine.waiting,
            max_batch=max_batch,
            egress=egress,
            prefill_busy_ratio=prefill_busy_ratio,
            decode_busy_ratio=decoding / max_batch if max_batch else None,
        )

    def registration(self) -> Node:
        """The node with its present load."""
        return replace(self.node, load=self.load())

    def when_dead(self, call: Callable[[], None]) -> None:
        self.died.when_set(call)

    def listen(self, attempt: AttemptId, answers: Answers) -> None:
        """These answers end when the worker dies."""
        if self.died.is_set:
            answers.lose()
        else:
            self._answers.setdefault(attempt, []).append(answers)

    def reserve(self, attempt: AttemptId, request: Request) -> Reservation:
        self._check_role(Role.DECODE)
        tokens = request.prompt_tokens + request.sampling.max_tokens
        nbytes = int(self.instance.profile.kv_bytes(tokens))
        if nbytes > self.kv_free_bytes:
            raise Overloaded(f"kv bytes of {self.node.id}")
        assert attempt not in self._holds, f"attempt {attempt} takes room on {self.node.id} twice"
        self._generations += 1
        self._holds[attempt] = Hold(tokens, nbytes, self._generations)
        self.kv_free_bytes -= nbytes
        self.committed_tokens += tokens
        return Reservation(
            decode=self.node.id,
            attempt=attempt,
            kv_address=self.node.kv_address_for(self.node.region),
            generation=self._generations,
            incarnation=self.node.incarnation,
        )

    def prefill(self, attempt: AttemptId, request: Request, way: Way | None, reply: Reply) -> None:
        """Compute, and send the KV along the way; None: the reservation is here."""
        if way is not None:
            self._check_role(Role.PREFILL)
        elif attempt not in self._holds:
            raise PeerUnavailable(self.node.id, "it is another life of the node, and has no such reservation")
        queued = self.engine.prefill_tokens
        if queued and queued + request.prompt_tokens > self.instance.max_prefill_tokens:
            raise Overloaded(f"prefill tokens of {self.node.id}")
        leg = self._prefills[attempt] = PrefillLeg(self._kernel, self, attempt, request, way, reply)
        if way is not None and not way.target.expect(attempt, way.generation, leg):
            leg.fail(TransferFailed(attempt, "released"))
        else:
            self.engine.prefill(leg.job())

    def decode(self, attempt: AttemptId, request: Request, reply: Reply) -> None:
        """Reply with batches of tokens, the last one with `finish`."""
        hold = self._holds.get(attempt)
        if hold is None or hold.content is None:
            raise EngineFailed(self.node.id, "nothing was handed over")
        kv, content = hold.content, self.instance.content

        def deliver(drawn: Drawn) -> None:
            if drawn.finished:
                del self._decodes[attempt]
            reply(
                TokenBatch(
                    tokens=content.tokens(kv, request, drawn.total - drawn.count, drawn.total),
                    first_queue_s=drawn.queue_s,
                    first_step_s=drawn.step_s,
                    finish=FinishReason.LENGTH if drawn.finished else None,
                    recomputed_tokens=1 if drawn.finished else 0,
                )
            )

        self._decodes[attempt] = request
        self.engine.decode(Sequence(attempt, request.sampling.max_tokens, self._kernel.now(), deliver))

    def expect(self, attempt: AttemptId, generation: int, source: PrefillLeg | None) -> bool:
        """Who computes the KV of a reservation, if that is still there."""
        hold = self._holds.get(attempt)
        if hold is None or hold.generation != generation:
            return False
        hold.source = source
        return True

    def complete(self, attempt: AttemptId, content: bytes) -> None:
        """All KV of the reservation is here."""
        self._holds[attempt].content = content

    def end_prefill(self, attempt: AttemptId) -> None:
        if attempt in self._prefills:
            self.engine.forget(attempt)
            self.give_up_prefill(attempt)

    def give_up_prefill(self, attempt: AttemptId) -> None:
        """Let go of a prefill that the engine does not have any more, or could not begin."""
        leg = self._prefills.pop(attempt)
        leg.end()
        self._tell()

    def end(self, attempt: AttemptId) -> None:
        """Stop what is done for the attempt and free what it holds, if there is anything."""
        self._answers.pop(attempt, None)
        self.end_prefill(attempt)
        if self._decodes.pop(attempt, None) is not None:
            self.engine.forget(attempt)
        if (hold := self._holds.pop(attempt, None)) is not None:
            self.kv_free_bytes += hold.nbytes
            self.committed_tokens -= hold.tokens
            if hold.source is not None:
                hold.source.fail(TransferFailed(attempt, "released"))
            self._tell()

    def die(self) -> None:
        self.died.set()
        for answers in [answers for each in self._answers.values() for answers in each]:
            answers.lose()
        for attempt in list({**self._prefills, **self._holds, **self._answers}):
            self.end(attempt)
        self.caches.lose(self.node.id)

    def become(self, node: Node) -> None:
        """Another role, or another share of time for prefill."""
        max_batch = self.instance.max_batch(node.share)
        self.node, self._max_batch = node, max_batch if node.role.decodes else 0
        self.engine.set_share(node.share, max_batch)

    async def drained(self, keeps: Role | None) -> None:
        """Until what is here now of the roles that it does not keep has ended."""
        lost: list[AttemptId] = []
        if not (keeps and keeps.prefills):
            lost += self._prefills
        if not (keeps and keeps.decodes):
            lost += self._holds
        while any(attempt in self._prefills or attempt in self._holds for attempt in lost):
            await self._less

    def check(self) -> None:
        held = sum(hold.nbytes for hold in self._holds.values()) + sum(
            leg.held_bytes for leg in self._prefills.values()
        )
        assert self.kv_free_bytes + held == self.instance.kv_room_bytes, f"{self.node.id}: KV bytes do not add up"
        assert self.kv_free_bytes >= 0, f"{self.node.id}: more KV held than there is"
        assert self.committed_tokens == sum(hold.tokens for hold in self._holds.values())
        self.engine.check()

    def check_idle(self) -> None:
        self.check()
        assert not self._holds, f"{self.node.id} still holds KV of {list(self._holds)}"
        assert not self._prefills and not self._decodes, f"{self.node.id} still works"
        assert not self._answers, f"{self.node.id} still answers {list(self._answers)}"
        assert self.engine.prefill_tokens == 0, f"{self.node.id} still counts prefill tokens"
        assert self.engine.active == self.engine.waiting == 0, f"{self.node.id} still has slots taken"

    def _check_role(self, needed: Role) -> None:
        """A router whose view is older than a change of role finds another node."""
        if self.accepts not in (needed, Role.MIXED):
            raise Overloaded(f"role: this node takes no new {needed.value}")

    def _tell(self) -> None:
        less, self._less = self._less, Future("less work")
        less.set_result(None)
