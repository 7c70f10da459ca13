"""A prefill from its command to its report, here for a decode of the same attempt, or toward another node.

Cases, in order: KV that was on its way here from elsewhere and is good is taken up; else the longest cached prefix that
can be resumed from; else everything is computed.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from prfaas.cluster import RESUMES_ANYWHERE, RegionId
from prfaas.config import CacheConfig
from prfaas.engine import messages as engine_messages
from prfaas.errors import InvalidRequest
from prfaas.kvcache.layout import Extent, Window
from prfaas.node.cache_fetch import NOTHING, Found, PrefixSource, keys_of
from prfaas.node.cache_plan import Schedule, handoff, holdable, schedule, sent_ends
from prfaas.node.cache_publish import Harvest
from prfaas.node.tenure import Borrowed, Tenure
from prfaas.node.workplace import Workplace, both
from prfaas.observe.tracing import Facts
from prfaas.request import AttemptId, Match
from prfaas.rpc.commands import Destination, Prefill, PrefillDone
from prfaas.transfer.outgoing import Urgency
from prfaas.transfer.pump import messages as pump_messages

log = structlog.get_logger()

NO_MATCH = Match()
#: What the line carries in so long, about a round trip between regions, goes before what takes longer.
SMALL_S = 0.03
#: What a line is taken for that is not limited: 1 Gbit/s.
LINE_BYTES_PER_S = 125e6


@dataclass(frozen=True, slots=True)
class Start:
    """What a prefill goes on from: `tokens` in the windows `held`, which lie in `spans`. Of these `cached` came from
    the cache. `match` is what the own region's pool has."""

    tokens: int = 0
    held: tuple[Window, ...] = ()
    spans: tuple[AttemptId, ...] = ()
    match: Match = NO_MATCH
    cached: int = 0
    pulled_bytes: int = 0


def _unannounced(_layer: int, _stop: int) -> None:
    """Nobody waits for rows that stay where they are computed."""


class PrefillStory:
    """`prefixes` is None on a node without a cache."""

    def __init__(self, workplace: Workplace, prefixes: PrefixSource | None, settings: CacheConfig) -> None:
        self._workplace, self._prefixes, self._settings = workplace, prefixes, settings

    async def here(self, tenure: Tenure, pull_region: RegionId | None) -> tuple[PrefillDone, Harvest | None]:
        """The sequence stays in the engine."""
        start = await self._taken_up(tenure)
        if start is None:
            found = await self._found(tenure, pull_region)
            start = await self._brought(tenure, found)
        plan = self._schedule(tenure, start)
        done = await self._compute(tenure, start, plan)
        return _report(tenure, done, start), _harvest(tenure, start, plan, done)

    async def toward(self, tenure: Tenure, command: Prefill) -> tuple[PrefillDone, Harvest | None]:
        """Push it as it comes to exist. With a harvest the engine still has the sequence."""
        workplace, attempt, destination = self._workplace, tenure.attempt, command.destination
        assert destination is not None
        if destination.network:
            return await self._handed_over(tenure, command, destination.network), None
        if not 0 <= destination.held_tokens <= holdable(tenure.handoff_tokens):
            raise InvalidRequest(f"{destination.held_tokens} tokens cannot be held there", param="held_tokens")
        found = await self._found(tenure, command.pull_region)
        extent = handoff(destination.held_tokens, tenure.handoff_tokens)
        # Before the prefix comes: what the cache has must not take the room without which there is no prefill at all.
        try:
            span = await workplace.take_span(tenure, attempt, extent, tenure.remaining_s(), receive=False)
        except BaseException:
            self._release(found)
            raise
        start = await self._brought(tenure, found)
        plan = self._schedule(tenure, start)
        out = Window(extent.first, extent.stop, span.span, state=bool(extent.states))
        on_rows = self._send(attempt, command, extent, sent_ends(extent.first, start.tokens, plan.ends), out)
        computing = self._compute(tenure, start, plan, out, on_rows)
        done, moved = await both(computing, self._moved(tenure, destination, extent))
        workplace.let_go(tenure, attempt)
        tenure.in_engine = tenure.tenant is not None
        return _report(tenure, done, start, moved), _harvest(tenure, start, plan, done)

    async def _handed_over(self, tenure: Tenure, command: Prefill, network: str) -> PrefillDone:
        """The engine keeps it on its own account, for the engine that decodes."""
        self._workplace.check_network(network)
        start = await self._brought(tenure, await self._found(tenure, command.pull_region))
        plan = self._schedule(tenure, start)
        done = await self._compute(tenure, start, plan, hand_over=True)
        tenure.in_engine = False
        return replace(_report(tenure, done, start), handover=done.handover)

    async def _moved(self, tenure: Tenure, to: Destination, extent: Extent) -> pump_messages.Sent:
        """Until the receiver has it all, checked."""
        workplace = self._workplace
        facts: Facts = {
            "prfaas.node": workplace.place.node,
            "prfaas.peer": to.node,
            "prfaas.peer_region": to.region,
            "prfaas.kv_bytes": workplace.info.layout.extent_bytes(extent),
        }
        with workplace.tracing.span("transfer", tenure.traceparent, facts):
            moved = await workplace.pump.moved(tenure.attempt)
        assert isinstance(moved, pump_messages.Sent)
        return moved

    async def _compute(
        self,
        tenure: Tenure,
        start: Start,
        plan: Schedule,
        out: Window | None = None,
        on_rows: Callable[[int, int], None] = _unannounced,
        *,
        hand_over: bool = False,
    ) -> engine_messages.Prefilled:
        """In the engine, where the sequence stays: for its decode, or when it goes `out` for its harvest."""
        tenure.in_engine = True
        return await self._workplace.engine.prefill(
            tenure.attempt,
            tenure.prompt,
            tenure.handoff_tokens,
            plan.ends,
            held=start.held,
            held_tokens=start.tokens if start.held else None,
            out=out,
            checkpoints=plan.checkpoints,
            linger=out is not None and tenure.tenant is not None,
            salt=tenure.salt,
            hand_over=hand_over,
            on_rows=on_rows,
            on_read=lambda: self._workplace.let_go(tenure, *start.spans),
        )

    def _send(
        self, attempt: AttemptId, command: Prefill, extent: Extent, ends: tuple[int, ...], out: Window
    ) -> Callable[[int, int], None]:
        """Begin to push; what is to be called as rows come to exist."""
        to = command.destination
        assert to is not None
        pump, layout, parts = self._workplace.pump, self._workplace.info.layout, dict[tuple[int, int], list[int]]()
        for part in layout.extent_parts(extent, ends, (out,)):
            parts.setdefault((part.layer, part.stop), []).append(part.index)
        pump.send(
            pump_messages.Send(
                attempt=attempt,
                address=to.kv_address,
                peer_incarnation=to.incarnation,
                generation=to.generation,
                chunk_ends=ends,
                region=to.region,
                ticket=to.permit.ticket,
                key_out=to.permit.key_out,
                key_back=to.permit.key_back,
                urgency=self._urgency(layout.extent_bytes(extent), to.region),
                tenant=command.tenant,
                weight=command.weight,
            )
        )
        return lambda layer, stop: pump.parts_ready(attempt, parts.get((layer, stop), ()))

    def _urgency(self, nbytes: int, region: str) -> Urgency:
        """A short transfer costs the long ones next to nothing, and would wait long behind them."""
        allowed = self._workplace.pump.allowed.get(region, math.inf)
        line_bytes_per_s = allowed if math.isfinite(allowed) else LINE_BYTES_PER_S
        return Urgency.FINISHING if nbytes <= SMALL_S * line_bytes_per_s else Urgency.NORMAL

    async def _taken_up(self, tenure: Tenure) -> Start | None:
        """What has come of a transfer, on top of the KV that was here already. States come with the last of it, so a
        model that has any can go on from all or nothing. From here the sequence is the engine's."""
        span, borrowed = tenure.span, tenure.borrowed
        tenure.span = tenure.borrowed = None
        if span is None:
            return None
        stop = tenure.handoff_tokens
        reached = await self._workplace.pump.stopped(tenure.attempt)
        held_tokens, windows, spans = _of(borrowed)
        if reached < stop and self._workplace.info.layout.state_bytes:
            reached = held_tokens = 0
        reached = max(reached, held_tokens)
        if not reached or (borrowed and not await borrowed.arrived()):
            self._workplace.let_go(tenure, tenure.attempt, *spans)
            return None
        log.info(
            "transfer is taken up", attempt=tenure.attempt, held_tokens=reached, prompt_tokens=tenure.prompt_tokens
        )
        if reached > held_tokens:
            windows = (*windows, Window(held_tokens, stop, span.span, state=True))
        self._workplace.admission.take_prefill(tenure.attempt, tenure.prompt_tokens - reached)
        match = Match(joint=reached, kv=held_tokens)
        return Start(reached, windows, (tenure.attempt, *spans), match, cached=held_tokens)

    async def _found(self, tenure: Tenure, pull_region: RegionId | None) -> Found:
        """What the cache has; by that the prefill is taken on. Raises Overloaded."""
        found, own_tokens = NOTHING, await self._own(tenure)
        if self._prefixes is not None and tenure.tenant is not None:
            found = await self._prefixes.for_prefill(tenure, tenure.tenant, pull_region)
        try:
            cached_tokens = max(found.hit.kv_tokens, own_tokens)
            self._workplace.admission.take_prefill(tenure.attempt, tenure.prompt_tokens - cached_tokens)
        except BaseException:
            self._release(found)
            raise
        return found

    async def _own(self, tenure: Tenure) -> int:
        """How much of the prompt the engine has in a cache of its own, where it keeps one."""
        info, prefixes = self._workplace.info, self._workplace.engine.prefixes
        if not tenure.salt or not prefixes.units:
            return 0
        keys = await keys_of(tenure.prompt, info.namespace, tenure.salt)
        return prefixes.resumed(keys, tenure.handoff_tokens, anywhere=RESUMES_ANYWHERE in info.capabilities)

    async def _brought(self, tenure: Tenure, found: Found) -> Start:
        """The cached prefix, here; or nothing, and all is computed."""
        if self._prefixes is None or not found.hit.kv_tokens:
            return Start(match=found.match)
        borrowed = await self._prefixes.borrow(tenure, found.hit, resume=True)
        if borrowed is not None:
            if await borrowed.arrived():
                tokens, windows, spans = _of(borrowed)
                return Start(tokens, windows, spans, found.match, tokens, borrowed.pulled_bytes)
            self._workplace.let_go(tenure, *borrowed.spans)
        self._workplace.admission.recount_prefill(tenure.attempt, tenure.prompt_tokens)
        return Start(match=found.match)

    def _release(self, found: Found) -> None:
        if self._prefixes is not None:
            self._prefixes.release(found.hit)

    def _schedule(self, tenure: Tenure, start: Start) -> Schedule:
        info = self._workplace.info
        return schedule(
            tenure.handoff_tokens,
            Match(joint=start.tokens, kv=start.match.kv),
            info.chunk_tokens,
            keeps_states=tenure.tenant is not None and info.layout.state_bytes > 0,
            new_to_us=start.pulled_bytes > 0,
            every_tokens=self._settings.checkpoint_tokens,
        )


def _of(borrowed: Borrowed | None) -> tuple[int, tuple[Window, ...], tuple[AttemptId, ...]]:
    return (borrowed.tokens, borrowed.windows, borrowed.spans) if borrowed else (0, (), ())


def _harvest(tenure: Tenure, start: Start, plan: Schedule, done: engine_messages.Prefilled) -> Harvest | None:
    if tenure.tenant is None:
        return None
    states = tuple(each for each in plan.kept if each.tokens in done.snapshots)
    return Harvest(tenure.tenant, tenure.prompt, tenure.handoff_tokens, states, start.match.kv)


def _report(
    tenure: Tenure, done: engine_messages.Prefilled, start: Start, moved: pump_messages.Sent | None = None
) -> PrefillDone:
    """Three spans of time, one after the other: until the first chunk, until the last one was done, and where it was
    sent until this is known to have arrived. Where it stays, that the last one is done is news from the engine, too."""
    now_s = time.monotonic()
    computed_s = now_s if moved is None else done.ended_s
    return PrefillDone(
        queue_s=done.started_s - tenure.heard_s,
        compute_s=computed_s - done.started_s,
        exposed_s=now_s - computed_s,
        prefill_tokens=done.tokens,
        kv_bytes=0 if moved is None else moved.payload_bytes,
        cached_tokens=start.cached + done.cached,
        pulled_bytes=start.pulled_bytes,
        took_s=now_s - tenure.heard_s,
    )
