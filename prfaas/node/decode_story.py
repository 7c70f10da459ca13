"""A decode from its reservation to its last token.

KV that comes from elsewhere comes on top of what the own region's cache has: that is on its way here while the rest is
computed, and the rest is all that is sent.
"""

from collections.abc import Callable
from dataclasses import dataclass

from prfaas.cluster import address_for
from prfaas.engine import messages as engine_messages
from prfaas.errors import CACHE_LOST, InvalidRequest, NamespaceMismatch, TransferFailed
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS
from prfaas.kvcache.layout import Window
from prfaas.kvcache.states import Checkpoint
from prfaas.node.cache_fetch import PrefixSource
from prfaas.node.cache_plan import handoff, holdable
from prfaas.node.cache_publish import Harvest
from prfaas.node.tenure import Borrowed, Tenure
from prfaas.node.workplace import Workplace, both
from prfaas.request import NO_PERMIT, TOKEN_BYTES, AttemptId, FinishReason, Permit
from prfaas.rpc.commands import Decode, Done, Reserve, Reserved, Tokens
from prfaas.transfer.pump import messages as pump_messages


@dataclass(frozen=True, slots=True)
class _Arrived:
    """What a decode is restored from; nothing when its sequence is in the engine already."""

    windows: tuple[Window, ...] = ()
    spans: tuple[AttemptId, ...] = ()


class DecodeStory:
    """`prefixes` is None on a node without a cache."""

    def __init__(self, workplace: Workplace, prefixes: PrefixSource | None) -> None:
        self._workplace, self._prefixes = workplace, prefixes

    async def reserve(self, tenure: Tenure, command: Reserve) -> Reserved:
        """A place in admission, and room for KV that comes from elsewhere, unless the engine fetches it itself."""
        info, place, attempt = self._workplace.info, self._workplace.place, tenure.attempt
        if command.source_namespace != info.namespace:
            raise NamespaceMismatch(info.namespace, command.source_namespace)
        tokens = tenure.prompt_tokens + command.sampling.max_tokens
        if tokens > info.max_context_tokens:
            raise InvalidRequest(
                f"{tokens} tokens exceed the context of {info.max_context_tokens}", code="context_length_exceeded"
            )
        self._workplace.check_network(command.network)
        self._workplace.admission.take_sequence(attempt, tokens)
        if command.source_node != place.node and not command.network:
            tenure.borrowed = await self._borrow(tenure)
            tenure.span = await self._workplace.take_span(
                tenure,
                attempt,
                handoff(_held_tokens(tenure.borrowed), tenure.handoff_tokens),
                command.deadline_s,
                receive=True,
                source=command.source_node,
                source_region=command.source_region,
            )
        return Reserved(
            kv_address=address_for(place.kv_addresses, command.source_region),
            generation=tenure.span.generation if tenure.span else 0,
            incarnation=place.incarnation,
            permit=_permit(tenure.span) if tenure.span else NO_PERMIT,
            held_tokens=_held_tokens(tenure.borrowed),
            took_s=tenure.so_far_s(),
        )

    async def decode(self, tenure: Tenure, command: Decode, emit: Callable[[Tokens | Done], None]) -> Harvest | None:
        """All tokens and the end. What the sequence leaves for the cache, if anything: then the engine still has it."""
        sampling, caching = tenure.sampling, tenure.tenant is not None
        assert sampling is not None
        arrived = await self._arrived(tenure, command.handover)
        if tenure.deadline:
            tenure.deadline.cancel()  # from here the number of tokens bounds it
        tenure.in_engine = True
        answer = bytearray()
        events = self._workplace.engine.decode(
            tenure.attempt,
            tenure.prompt,
            tenure.handoff_tokens,
            sampling,
            arrived.windows,
            command.top_logits,
            snapshot_tokens=HASH_UNIT_TOKENS if caching else 0,
            linger=caching,
            salt=tenure.salt,
            handover=command.handover,
        )
        async for event in events:
            match event:
                case engine_messages.PoolRead():
                    self._workplace.let_go(tenure, *arrived.spans)
                case engine_messages.Tokens():
                    answer += event.tokens
                    emit(_tokens(tenure, event))
                case engine_messages.Finished():
                    tenure.in_engine, tenure.output_tokens = caching, event.output_tokens
                    emit(_done(event))
                    return _harvest(tenure, bytes(answer), event)
        raise AssertionError("a decode ends with Finished")

    async def _borrow(self, tenure: Tenure) -> Borrowed | None:
        limit_tokens = holdable(tenure.handoff_tokens)
        if self._prefixes is None or tenure.tenant is None or not limit_tokens:
            return None
        hit = await self._prefixes.for_decode(tenure, tenure.tenant, limit_tokens)
        return await self._prefixes.borrow(tenure, hit, resume=False)

    async def _arrived(self, tenure: Tenure, handover: bytes) -> _Arrived:
        """Raises TransferFailed when any of what comes from elsewhere has been lost."""
        span, borrowed, stop = tenure.span, tenure.borrowed, tenure.handoff_tokens
        if span is None:
            if not tenure.in_engine and not handover:
                raise InvalidRequest("nothing was prefilled for this attempt", param="attempt")
            return _Arrived()
        await both(self._workplace.pump.moved(tenure.attempt), _all_of(tenure.attempt, borrowed))
        if not stop:
            self._workplace.let_go(tenure, tenure.attempt)
            return _Arrived()
        rest = Window(_held_tokens(borrowed), stop, span.span, state=True)
        if borrowed is None:
            return _Arrived((rest,), (tenure.attempt,))
        return _Arrived((*borrowed.windows, rest), (*borrowed.spans, tenure.attempt))


async def _all_of(attempt: AttemptId, borrowed: Borrowed | None) -> None:
    if borrowed is not None and not await borrowed.arrived():
        raise TransferFailed(attempt, CACHE_LOST, "a cached prefix was lost on its way")


def _held_tokens(borrowed: Borrowed | None) -> int:
    return borrowed.tokens if borrowed is not None else 0


def _permit(span: pump_messages.Reserved) -> Permit:
    return Permit(ticket=span.ticket, key_out=span.key_out, key_back=span.key_back)


def _harvest(tenure: Tenure, answer: bytes, end: engine_messages.Finished) -> Harvest | None:
    """Rows of every token that was fed: the last one drawn was not. States of the prompt are its prefill's harvest."""
    if tenure.tenant is None:
        return None
    held = (tenure.prompt + answer)[: end.kept_tokens * TOKEN_BYTES]
    states = tuple(Checkpoint(tokens, proven=True) for tokens in end.snapshots if tokens > tenure.handoff_tokens)
    return Harvest(tenure.tenant, held, end.kept_tokens, states)


def _tokens(tenure: Tenure, event: engine_messages.Tokens) -> Tokens:
    """With the first, how long it waited for its step since the command came, and the step until it was here."""
    if event.started_s is None:
        return Tokens(tokens=event.tokens, top_logits=event.top_logits, scores=event.scores)
    queue_s, took_s = event.started_s - tenure.heard_s, tenure.so_far_s()
    return Tokens(
        tokens=event.tokens,
        top_logits=event.top_logits,
        scores=event.scores,
        first_queue_s=queue_s,
        first_step_s=took_s - queue_s,
        first_took_s=took_s,
    )


def _done(event: engine_messages.Finished) -> Done:
    return Done(
        reason=FinishReason(event.reason),
        recomputed_tokens=event.recomputed_tokens,
        output_tokens=event.output_tokens,
    )
