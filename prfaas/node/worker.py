"""What the token link's commands mean on a worker: admission, engine and pump brought together, a tenure per attempt.

Reserve opens a tenure (or Prefill does, on a node that prefills for another); Done, Failed, Cancel, the end of its
session or its deadline close it. Closing gives back everything it holds, in the order engine, pump, admission: the
engine must have let go of a span before the pump may reuse it.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, assert_never

import structlog

from prfaas.cluster import NodeLoad, Role, address_for
from prfaas.engine import messages as engine_messages
from prfaas.engine.port import EngineInfo
from prfaas.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NamespaceMismatch,
    Overloaded,
    PeerUnavailable,
    PrfaasError,
)
from prfaas.kvcache.layout import chunk_ends
from prfaas.node.admission import Admission
from prfaas.node.engine_client import CANCEL_DEADLINE_S, EngineClient
from prfaas.node.pump_client import PumpClient
from prfaas.node.tenure import Place, Tenure, WorkerSession
from prfaas.request import NO_PERMIT, TOKEN_BYTES, AttemptId, FinishReason, Permit
from prfaas.rpc.commands import (
    Cancel,
    Command,
    Decode,
    Destination,
    Done,
    Event,
    Failed,
    Prefill,
    PrefillDone,
    Reserve,
    Reserved,
    Tokens,
    WorkerDescription,
)
from prfaas.transfer.frames import WIRE
from prfaas.transfer.outgoing import Urgency
from prfaas.transfer.pump import messages as pump_messages

A = TypeVar("A")
B = TypeVar("B")

#: The pump takes an abandoned span back by itself this long after the node should have released it. An engine that is
#: stuck may write to the span until the node has given it up, and that is when it does not confirm a cancellation.
PUMP_TTL_SLACK_S = CANCEL_DEADLINE_S + 30.0
#: What the line carries in so long, about a round trip between regions, goes before what takes longer.
SMALL_S = 0.03
#: What a line is taken for that is not limited: 1 Gbit/s.
LINE_BYTES_PER_S = 125e6
#: How long giving back may take when a drain cuts attempts off.
CLOSE_S = 10.0


class Worker:
    """Everything here runs on one event loop; `spawn` is the owning task group's create_task."""

    def __init__(
        self,
        place: Place,
        info: EngineInfo,
        engine: EngineClient,
        pump: PumpClient,
        admission: Admission,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self.place, self.info, self.admission = place, info, admission
        self._engine, self._pump, self._create_task = engine, pump, spawn
        self._tenures: dict[AttemptId, Tenure] = {}
        self._closing: dict[AttemptId, asyncio.Task[None]] = {}
        self._gave_back = asyncio.Event()
        self._log = structlog.get_logger().bind(node=place.node)
        self.sessions = 0
        #: `draining`: it is about to stop. `held`: an operator wants it to take nothing new. `accepts`: of which role
        #: it takes new work; None for none.
        self.draining = self.held = False
        self.accepts: Role | None = Role.MIXED

    # -- what the servicer calls

    def open_session(self, emit: Callable[[AttemptId, Event], None]) -> WorkerSession:
        self.sessions += 1
        return WorkerSession(self, emit)

    def describe(self) -> WorkerDescription:
        return WorkerDescription(
            node=self.place.node, incarnation=self.place.incarnation, namespace=self.info.namespace, wire=WIRE
        )

    @property
    def attempts(self) -> int:
        """Attempts that hold anything here, those being closed included."""
        return len(self._tenures) + len(self._closing)

    def load(self) -> NodeLoad:
        return NodeLoad(
            queued_prefill_tokens=self.admission.prefill_tokens,
            active_sequences=self.admission.sequences,
            committed_tokens=self.admission.committed_tokens,
            kv_free_bytes=self._pump.load.free_bytes,
            kv_total_bytes=self._pump.load.total_bytes,
            draining=self.draining or self.held,
            decoding=self._engine.load.active_sequences,
            waiting_decodes=self._engine.load.queued_sequences,
            max_batch=self._engine.max_batch,
        )

    def hold(self, held: bool) -> None:
        """Take nothing new, or take work again."""
        if held is not self.held:
            self._log.info("held" if held else "no longer held")
        self.held = held

    def holding(self, *, prefill: bool, decode: bool) -> frozenset[AttemptId]:
        """Attempts that are being prefilled here, or that have a place to decode here."""
        return frozenset(
            attempt
            for attempt, tenure in self._tenures.items()
            if (decode and tenure.sampling is not None) or (prefill and tenure.prefilling)
        )

    async def ended(self, attempts: frozenset[AttemptId], *, prefill: bool, decode: bool) -> None:
        """Until none of these holds such a thing any more."""
        while attempts & (self.holding(prefill=prefill, decode=decode) | self._closing.keys()):
            self._gave_back.clear()
            await self._gave_back.wait()

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new and wait until what is here has finished; cut it off when `timeout_s` is over."""
        self.draining = True
        if not await self._emptied(timeout_s):
            self._log.warning("drain ended early", attempts=self.attempts)
            for tenure in [*self._tenures.values()]:
                self.close(tenure)
            await self._emptied(CLOSE_S)

    async def _emptied(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while self.attempts:
                    self._gave_back.clear()
                    await self._gave_back.wait()
        except TimeoutError:
            return False
        return True

    # -- commands

    def handle(self, session: WorkerSession, attempt: AttemptId, command: Command) -> None:
        tenure = self._tenures.get(attempt)
        try:
            match command:
                case Reserve():
                    self._check_role(Role.DECODE)
                    opened = self._open(session, attempt, command.prompt)
                    opened.sampling = command.sampling
                    self._expect(opened, command.deadline_s)
                    self._start(opened, self._reserve(opened, command))
                case Prefill(destination=destination):
                    self._start_prefill(session, attempt, command, destination)
                case Decode():
                    self._start(_known(tenure), self._decode(_known(tenure), command))
                case Cancel():
                    if tenure:
                        self.close(tenure)
                case _:
                    assert_never(command)
        except PrfaasError as error:
            session.emit(attempt, Failed(error))

    def _start_prefill(
        self, session: WorkerSession, attempt: AttemptId, command: Prefill, destination: Destination | None
    ) -> None:
        if destination is None:
            here = _known(self._tenures.get(attempt))
            self._start(here, self._prefill_here(here))
            here.prefilling = True
        else:
            self._check_role(Role.PREFILL)
            opened = self._open(session, attempt, command.prompt)
            opened.prefilling = True
            self._expect(opened, command.deadline_s)
            self._start(opened, self._prefill_toward(opened, destination))

    def _check_role(self, needed: Role) -> None:
        """A router whose view is older than a change of role finds another node."""
        if self.accepts not in (needed, Role.MIXED):
            raise Overloaded(f"role: this node takes no new {needed.value}")

    def _open(self, session: WorkerSession, attempt: AttemptId, prompt: bytes) -> Tenure:
        if self.draining or self.held:
            raise Overloaded("draining")
        if attempt in self._tenures or attempt in self._closing:
            raise InvalidRequest(f"attempt {attempt} is in use", param="attempt")
        if not prompt or len(prompt) % TOKEN_BYTES:
            raise InvalidRequest("the prompt must hold at least one whole token id", param="prompt")
        tenure = self._tenures[attempt] = Tenure(attempt, session, prompt)
        return tenure

    def _expect(self, tenure: Tenure, deadline_s: float) -> None:
        error = DeadlineExceeded("attempt", deadline_s)
        tenure.deadline = asyncio.get_running_loop().call_later(deadline_s, self._fail, tenure, error)

    def _start(self, tenure: Tenure, story: Coroutine[Any, Any, None]) -> None:
        """Run the next chapter of a tenure. One at a time: a router that hurries ahead is told so."""
        if tenure.task and not tenure.task.done():
            story.close()
            raise InvalidRequest("the attempt is busy", param="attempt")
        try:
            tenure.task = self._spawn(self._guard(tenure, story))
        except PeerUnavailable:
            story.close()
            raise
        # A task that is cancelled before its first step never awaits the story.
        tenure.task.add_done_callback(lambda _: story.close())

    def _spawn(self, story: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task in the node's group. Raises PeerUnavailable once engine or pump has died: the group takes no more."""
        try:
            return self._create_task(story)
        except RuntimeError as error:
            story.close()
            raise PeerUnavailable(self.place.node, "it is going down") from error

    async def _guard(self, tenure: Tenure, story: Coroutine[Any, Any, None]) -> None:
        try:
            await story
        except PrfaasError as error:
            self._fail(tenure, error)

    def _fail(self, tenure: Tenure, error: PrfaasError) -> None:
        if self._tenures.get(tenure.attempt) is tenure:
            self._log.info("attempt failed", attempt=tenure.attempt, error=str(error))
            tenure.session.emit(tenure.attempt, Failed(error))
            self.close(tenure)

    # -- stories

    async def _reserve(self, tenure: Tenure, command: Reserve) -> None:
        if command.source_namespace != self.info.namespace:
            raise NamespaceMismatch(self.info.namespace, command.source_namespace)
        tokens = tenure.prompt_tokens + command.sampling.max_tokens
        if tokens > self.info.max_context_tokens:
            raise InvalidRequest(
                f"{tokens} tokens exceed the context of {self.info.max_context_tokens}", code="context_length_exceeded"
            )
        self.admission.take_sequence(tenure.attempt, tokens)
        if command.source_node != self.place.node:
            tenure.in_pump = True
            tenure.span = await self._pump.reserve(
                tenure.attempt,
                tenure.prompt_tokens - 1,
                command.deadline_s + PUMP_TTL_SLACK_S,
                receive=True,
                source=command.source_node,
                source_region=command.source_region,
            )
        address = address_for(self.place.kv_addresses, command.source_region)
        reserved = Reserved(
            kv_address=address,
            generation=tenure.span.generation if tenure.span else 0,
            incarnation=self.place.incarnation,
            permit=_permit(tenure.span) if tenure.span else NO_PERMIT,
        )
        tenure.session.emit(tenure.attempt, reserved)

    async def _prefill_here(self, tenure: Tenure) -> None:
        attempt, stop = tenure.attempt, tenure.prompt_tokens - 1
        self.admission.take_prefill(attempt, tenure.prompt_tokens)
        # From here the sequence is the engine's, whatever of it had come over the line.
        span, tenure.span = tenure.span, None
        held = await self._pump.stopped(attempt) if span else 0
        tenure.in_engine = True
        if span and held:
            self._log.info(
                "transfer is taken up", attempt=attempt, held_tokens=held, prompt_tokens=tenure.prompt_tokens
            )
            done = await self._engine.take_up(
                attempt, tenure.prompt, stop, held, span.span, lambda: self._let_span_go(tenure)
            )
        else:
            if span:
                self._let_span_go(tenure)
            done = await self._engine.prefill(attempt, tenure.prompt, stop, None, _ignore_parts)
        self.admission.end_prefill(attempt)
        tenure.prefilling = False
        self._gave_back.set()
        tenure.session.emit(tenure.attempt, _report(done, exposed_s=0.0, kv_bytes=0))

    async def _prefill_toward(self, tenure: Tenure, destination: Destination) -> None:
        stop, attempt = tenure.prompt_tokens - 1, tenure.attempt
        self.admission.take_prefill(attempt, tenure.prompt_tokens)
        tenure.in_pump = True
        assert tenure.deadline is not None
        ttl_s = tenure.deadline.when() - asyncio.get_running_loop().time() + PUMP_TTL_SLACK_S
        span = await self._pump.reserve(attempt, stop, ttl_s, receive=False)
        self._pump.send(
            pump_messages.Send(
                attempt=attempt,
                address=destination.kv_address,
                peer_incarnation=destination.incarnation,
                generation=destination.generation,
                chunk_ends=chunk_ends(stop, self.info.chunk_tokens),
                region=destination.region,
                ticket=destination.permit.ticket,
                key_out=destination.permit.key_out,
                key_back=destination.permit.key_back,
                urgency=self._urgency(span.nbytes, destination.region),
            )
        )
        tenure.in_engine = True
        computing = self._engine.prefill(
            attempt, tenure.prompt, stop, span.span, lambda parts: self._pump.parts_ready(attempt, parts)
        )
        done, moved = await _both(computing, self._pump.moved(attempt))
        tenure.in_engine = False
        assert isinstance(moved, pump_messages.Sent)
        tenure.session.emit(attempt, _report(done, exposed_s=moved.exposed_s, kv_bytes=moved.payload_bytes))
        self.close(tenure)

    def _urgency(self, nbytes: int, region: str) -> Urgency:
        """A short transfer costs the long ones next to nothing, and would wait long behind them."""
        allowed = self._pump.allowed.get(region, math.inf)
        line_bytes_per_s = allowed if math.isfinite(allowed) else LINE_BYTES_PER_S
        return Urgency.FINISHING if nbytes <= SMALL_S * line_bytes_per_s else Urgency.NORMAL

    async def _decode(self, tenure: Tenure, command: Decode) -> None:
        assert tenure.sampling is not None
        if tenure.span:
            await self._pump.moved(tenure.attempt)
        elif not tenure.in_engine:
            raise InvalidRequest("nothing was prefilled for this attempt", param="attempt")
        if tenure.deadline:
            tenure.deadline.cancel()  # from here the number of tokens bounds it
        tenure.in_engine = True
        events = self._engine.decode(
            tenure.attempt,
            tenure.prompt,
            tenure.prompt_tokens - 1,
            tenure.sampling,
            tenure.span.span if tenure.span else None,
            command.top_logits,
        )
        async for event in events:
            match event:
                case engine_messages.PoolRead():
                    self._let_span_go(tenure)
                case engine_messages.Tokens():
                    tenure.session.emit(tenure.attempt, _tokens(event))
                case engine_messages.Finished():
                    tenure.in_engine = False
                    tenure.session.emit(tenure.attempt, _done(event))
                case _:
                    assert_never(event)
        self.close(tenure)

    def _let_span_go(self, tenure: Tenure) -> None:
        """Nothing of ours reads it any more."""
        self._spawn(self._give_span_back(tenure))

    async def _give_span_back(self, tenure: Tenure) -> None:
        await self._pump.release(tenure.attempt)
        tenure.in_pump = False

    # -- the end

    def close(self, tenure: Tenure) -> None:
        """Give back all that the tenure holds. Idempotent; the giving back itself runs in a task of its own."""
        if self._tenures.get(tenure.attempt) is not tenure:
            return
        del self._tenures[tenure.attempt]
        if tenure.deadline:
            tenure.deadline.cancel()
        try:
            self._closing[tenure.attempt] = self._spawn(self._give_back(tenure))
        except PeerUnavailable:
            # Engine and pump end with the node, and with them all that the tenure holds.
            self.admission.release(tenure.attempt)
            self._gave_back.set()

    async def _give_back(self, tenure: Tenure) -> None:
        if tenure.task and not tenure.task.done():
            tenure.task.cancel()
            await asyncio.wait([tenure.task])
        if tenure.in_engine:
            await self._engine.cancel(tenure.attempt)
        if tenure.in_pump:
            await self._pump.release(tenure.attempt)
        self.admission.release(tenure.attempt)
        del self._closing[tenure.attempt]
        self._gave_back.set()

    def session_closed(self, session: WorkerSession) -> None:
        self.sessions -= 1
        for tenure in [t for t in self._tenures.values() if t.session is session]:
            self.close(tenure)


def _known(tenure: Tenure | None) -> Tenure:
    if tenure is None:
        raise InvalidRequest("unknown attempt", param="attempt")
    return tenure


async def _both(first: Coroutine[Any, Any, A], second: Coroutine[Any, Any, B]) -> tuple[A, B]:
    """Both results. The first failure ends the other: a peer that is gone must not cost the rest of a prefill."""
    tasks = asyncio.ensure_future(first), asyncio.ensure_future(second)
    try:
        await asyncio.gather(*tasks)
        return tasks[0].result(), tasks[1].result()
    finally:
        for task in tasks:
            task.cancel()


def _ignore_parts(_parts: tuple[int, ...]) -> None:
    """A prefill whose cache stays in the engine announces nothing."""


def _permit(span: pump_messages.Reserved) -> Permit:
    return Permit(ticket=span.ticket, key_out=span.key_out, key_back=span.key_back)


def _report(done: engine_messages.Prefilled, *, exposed_s: float, kv_bytes: int) -> PrefillDone:
    return PrefillDone(
        queue_s=done.queue_s,
        compute_s=done.compute_s,
        exposed_s=exposed_s,
        prefill_tokens=done.tokens,
        kv_bytes=kv_bytes,
    )


def _tokens(event: engine_messages.Tokens) -> Tokens:
    return Tokens(
        tokens=event.tokens,
        top_logits=event.top_logits,
        first_queue_s=event.first_queue_s,
        first_step_s=event.first_step_s,
    )


def _done(event: engine_messages.Finished) -> Done:
    return Done(
        reason=FinishReason(event.reason),
        recomputed_tokens=event.recomputed_tokens,
        output_tokens=event.output_tokens,
    )
