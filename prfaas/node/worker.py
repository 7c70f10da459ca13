"""What the token link's commands mean on a worker: sessions of routers, and a tenure per attempt.

Reserve opens a tenure (or Prefill does, on a node that prefills for another); Done, Failed, Cancel, the end of its
session or its deadline close it. Closing gives back everything it holds, in the order engine, pump, admission: the
engine must have let go of a span before the pump may reuse it. A tenure that leaves something for the cache is over for
its router and for admission as any other; engine and pump keep what it holds until that is in the cache or given up.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, assert_never

import structlog

from prfaas.cluster import NodeLoad, Role
from prfaas.config import CacheConfig
from prfaas.engine.port import EngineInfo
from prfaas.errors import DeadlineExceeded, InvalidRequest, Overloaded, PeerUnavailable, PrfaasError
from prfaas.node.admission import Admission
from prfaas.node.cache_books import CacheBooks
from prfaas.node.cache_fetch import PrefixSource
from prfaas.node.cache_publish import Harvest, Publisher
from prfaas.node.decode_story import DecodeStory
from prfaas.node.engine_client import EngineClient
from prfaas.node.pool_client import PoolClient
from prfaas.node.prefill_story import PrefillStory
from prfaas.node.pump_client import PumpClient
from prfaas.node.tenure import Place, Tenant, Tenure, WorkerSession
from prfaas.node.workplace import Spawn, Workplace
from prfaas.observe.tracing import NO_TRACING, Facts, Tracing, trace_id_of, valid_traceparent
from prfaas.request import TOKEN_BYTES, AttemptId
from prfaas.rpc.commands import (
    Cancel,
    Command,
    Decode,
    Event,
    Failed,
    Prefill,
    PrefillDone,
    Reserve,
    WorkerDescription,
)
from prfaas.transfer.frames import WIRE

#: How long giving back may take when a drain cuts attempts off.
CLOSE_S = 10.0


class Worker:
    """Everything here runs on one event loop; `spawn` is the owning task group's create_task. Without a `pool` nothing
    is cached."""

    def __init__(
        self,
        place: Place,
        info: EngineInfo,
        engine: EngineClient,
        pump: PumpClient,
        admission: Admission,
        spawn: Spawn,
        pool: PoolClient | None = None,
        cache: CacheConfig = CacheConfig(),  # noqa: B008 - frozen
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self.place, self.info, self.admission = place, info, admission
        self._engine, self._pump = engine, pump
        self._workplace = Workplace(place, info, engine, pump, admission, spawn, tracing)
        self._tracing = tracing
        self.pool, self.cache_books = pool, CacheBooks()
        prefixes = PrefixSource(self._workplace, pool, cache, self.cache_books) if pool is not None else None
        self.publisher = Publisher(self._workplace, pool, cache, self.cache_books) if pool is not None else None
        self._prefilling = PrefillStory(self._workplace, prefixes, cache)
        self._decoding = DecodeStory(self._workplace, prefixes)
        self._tenures: dict[AttemptId, Tenure] = {}
        self._lingering: dict[AttemptId, asyncio.Task[None]] = {}
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

    @property
    def lingering(self) -> int:
        """Attempts that are over and whose sequences are on their way into the cache."""
        return len(self._lingering)

    def load(self) -> NodeLoad:
        engine = self._engine.load
        return NodeLoad(
            queued_prefill_tokens=self.admission.prefill_tokens,
            active_sequences=self.admission.sequences,
            committed_tokens=self.admission.committed_tokens,
            kv_free_bytes=self._pump.load.free_bytes,
            kv_total_bytes=self._pump.load.total_bytes,
            draining=self.draining or self.held,
            decoding=engine.active_sequences + engine.others_running,
            waiting_decodes=engine.queued_sequences + engine.others_waiting,
            max_batch=self._engine.max_batch,
            engine_kv_ratio=engine.server.kv_usage_ratio if engine.server is not None else None,
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
        """Take nothing new and wait until what is here has finished; cut it off when `timeout_s` is over. What is only
        here for the cache is cut off at once."""
        self.draining = True
        for publication in [*self._lingering.values()]:
            publication.cancel()
        if not await self._emptied(timeout_s):
            self._log.warning("drain ended early", attempts=self.attempts)
            for tenure in [*self._tenures.values()]:
                self.close(tenure)
            await self._emptied(CLOSE_S)

    async def _emptied(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while self.attempts or self._lingering:
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
                    opened = self._open(session, attempt, command)
                    opened.sampling = command.sampling
                    self._start(opened, self._reserve(opened, command))
                case Prefill(destination=None):
                    here = _known(tenure)
                    self._start(here, self._prefill_here(here, command))
                    here.prefilling = True
                case Prefill():
                    self._check_role(Role.PREFILL)
                    opened = self._open(session, attempt, command)
                    opened.prefilling = True
                    self._start(opened, self._prefill_toward(opened, command))
                case Decode():
                    self._start(_known(tenure), self._decode(_known(tenure), command))
                case Cancel():
                    if tenure:
                        self.close(tenure)
                case _:
                    assert_never(command)
        except PrfaasError as error:
            session.emit(attempt, Failed(error))

    def _check_role(self, needed: Role) -> None:
        """A router whose view is older than a change of role finds another node."""
        if self.accepts not in (needed, Role.MIXED):
            raise Overloaded(f"role: this node takes no new {needed.value}")

    def _open(self, session: WorkerSession, attempt: AttemptId, command: Reserve | Prefill) -> Tenure:
        prompt = command.prompt
        if self.draining or self.held:
            raise Overloaded("draining")
        if attempt in self._tenures or attempt in self._closing or attempt in self._lingering:
            raise InvalidRequest(f"attempt {attempt} is in use", param="attempt")
        if not prompt or len(prompt) % TOKEN_BYTES:
            raise InvalidRequest("the prompt must hold at least one whole token id", param="prompt")
        caching = command.use_cache and self.pool is not None and self.pool.shards()
        tenant = Tenant(command.tenant, command.salt) if caching else None
        traceparent = command.traceparent if valid_traceparent(command.traceparent) else ""
        salt = command.salt if command.use_cache else b""
        tenure = Tenure(attempt, session, prompt, tenant=tenant, salt=salt, traceparent=traceparent)
        self._tenures[attempt] = tenure
        error = DeadlineExceeded("attempt", command.deadline_s)
        tenure.deadline = asyncio.get_running_loop().call_later(command.deadline_s, self._fail, tenure, error)
        return tenure

    def _start(self, tenure: Tenure, story: Coroutine[Any, Any, None]) -> None:
        """Run the next chapter of a tenure. One at a time: a router that hurries ahead is told so."""
        if tenure.task and not tenure.task.done():
            story.close()
            raise InvalidRequest("the attempt is busy", param="attempt")
        tenure.heard_s = time.monotonic()
        try:
            tenure.task = self._workplace.spawn(self._guard(tenure, story))
        except PeerUnavailable:
            story.close()
            raise
        # A task that is cancelled before its first step never awaits the story.
        tenure.task.add_done_callback(lambda _: story.close())

    async def _guard(self, tenure: Tenure, story: Coroutine[Any, Any, None]) -> None:
        try:
            await story
        except PrfaasError as error:
            self._fail(tenure, error)

    def _fail(self, tenure: Tenure, error: PrfaasError) -> None:
        if self._tenures.get(tenure.attempt) is tenure:
            traced = {"trace_id": trace_id_of(tenure.traceparent)} if tenure.traceparent else {}
            self._log.info("attempt failed", attempt=tenure.attempt, error=str(error), **traced)
            tenure.session.emit(tenure.attempt, Failed(error))
            self.close(tenure)

    # -- stories

    async def _reserve(self, tenure: Tenure, command: Reserve) -> None:
        tenure.session.emit(tenure.attempt, await self._decoding.reserve(tenure, command))

    async def _prefill_here(self, tenure: Tenure, command: Prefill) -> None:
        with self._tracing.span("prefill", command.traceparent, self._facts(tenure)) as span:
            report, harvest = await self._prefilling.here(tenure, command.pull_region)
            span.note(_reported(report))
        self.admission.end_prefill(tenure.attempt)
        tenure.prefilling = False
        self._gave_back.set()
        tenure.session.emit(tenure.attempt, report)
        if publication := self._publication(tenure, harvest):
            tenure.aside.add(publication)

    async def _prefill_toward(self, tenure: Tenure, command: Prefill) -> None:
        with self._tracing.span("prefill", command.traceparent, self._facts(tenure)) as span:
            tenure.traceparent = span.traceparent  # of the transfer, which is part of it
            report, harvest = await self._prefilling.toward(tenure, command)
            span.note(_reported(report))
        tenure.session.emit(tenure.attempt, report)
        self.close(tenure, harvest)

    async def _decode(self, tenure: Tenure, command: Decode) -> None:
        def emit(event: Event) -> None:
            tenure.session.emit(tenure.attempt, event)

        with self._tracing.span("decode", tenure.traceparent, self._facts(tenure)) as span:
            harvest = await self._decoding.decode(tenure, command, emit)
            span.note({"gen_ai.usage.output_tokens": tenure.output_tokens})
        self.close(tenure, harvest)

    def _facts(self, tenure: Tenure) -> Facts:
        return {
            "gen_ai.request.model": self.info.model,
            "gen_ai.usage.input_tokens": tenure.prompt_tokens,
            "prfaas.node": self.place.node,
            "prfaas.region": self.place.region,
            "prfaas.attempt": tenure.attempt,
        }

    # -- the end

    def close(self, tenure: Tenure, harvest: Harvest | None = None) -> None:
        """Give back all that the tenure holds, once its harvest is in where there is one. Idempotent; the giving back
        itself runs in a task of its own."""
        if self._tenures.get(tenure.attempt) is not tenure:
            return
        del self._tenures[tenure.attempt]
        if tenure.deadline:
            tenure.deadline.cancel()
        try:
            if publication := self._publication(tenure, harvest):
                self._lingering[tenure.attempt] = publication
                publication.add_done_callback(lambda _: self._harvested(tenure))
                self.admission.release(tenure.attempt)
                self._gave_back.set()
            else:
                self._begin_to_give_back(tenure)
        except PeerUnavailable:
            self._went_down(tenure)

    def _publication(self, tenure: Tenure, harvest: Harvest | None) -> asyncio.Task[None] | None:
        if harvest is None or self.publisher is None or self.draining:
            return None
        return self.publisher.start(tenure, harvest)

    def _harvested(self, tenure: Tenure) -> None:
        del self._lingering[tenure.attempt]
        try:
            self._begin_to_give_back(tenure)
        except PeerUnavailable:
            self._went_down(tenure)

    def _begin_to_give_back(self, tenure: Tenure) -> None:
        self._closing[tenure.attempt] = self._workplace.spawn(self._give_back(tenure))

    def _went_down(self, tenure: Tenure) -> None:
        """Engine and pump end with the node, and with them all that the tenure holds."""
        self.admission.release(tenure.attempt)
        self._gave_back.set()

    async def _give_back(self, tenure: Tenure) -> None:
        busy = {task for task in (tenure.task, *tenure.aside) if task and not task.done()}
        for task in busy:
            task.cancel()
        if busy:
            await asyncio.wait(busy)
        if tenure.in_engine:
            await self._engine.cancel(tenure.attempt)
        await self._workplace.give_back(tenure, *tenure.in_pump)
        self.admission.release(tenure.attempt)
        del self._closing[tenure.attempt]
        self._gave_back.set()

    def session_closed(self, session: WorkerSession) -> None:
        self.sessions -= 1
        for tenure in [t for t in self._tenures.values() if t.session is session]:
            self.close(tenure)


def _reported(report: PrefillDone) -> Facts:
    return {
        "gen_ai.usage.cache_read.input_tokens": report.cached_tokens,
        "prfaas.prefill_tokens": report.prefill_tokens,
        "prfaas.kv_bytes": report.kv_bytes,
        "prfaas.queue_seconds": report.queue_s,
        "prfaas.compute_seconds": report.compute_s,
        "prfaas.exposed_seconds": report.exposed_s,
    }


def _known(tenure: Tenure | None) -> Tenure:
    if tenure is None:
        raise InvalidRequest("unknown attempt", param="attempt")
    return tenure
