"""One request from its route to its last token.

Whatever happens, both nodes of every attempt are told to let go of it, in a `finally` that waits for nothing: after the
last token, after a failure, when the client leaves at any await, and when the generator is closed between two batches.
Until the first token a failed attempt is followed by another, under a new id and with a reservation of its own;
afterwards a failure is the client's to see. What a cache holds may have been what failed: unless the attempt was merely
refused, the next ones do without. Only where the decode node prefills at last, because nobody else could, it
goes on under the attempt that failed: what has arrived of its KV need not be computed again.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise

from prfaas.cluster import ClusterView, NodeId
from prfaas.errors import (
    CACHE_LOST,
    KV_ROOM,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    NamespaceMismatch,
    Overloaded,
    PeerUnavailable,
    PrfaasError,
    TransferFailed,
)
from prfaas.flows.ports import PrefillReport, Reservation, ServePorts, TokenBatch
from prfaas.flows.story import Attempt, Ending, Story
from prfaas.request import NO_MATCH, NO_MATCHES, TOKEN_BYTES, Matches, Request, Route
from prfaas.scheduling.routing import RoutingParams, choose, fallback

#: How a route is decided. Another one than `choose` is for comparison.
Choose = Callable[[Request, Matches, ClusterView, RoutingParams, frozenset[NodeId]], Route]

#: What another node may do better. Anything else, InvalidRequest above all, is the client's at once.
RETRYABLE = (Overloaded, PeerUnavailable, TransferFailed, EngineFailed, DeadlineExceeded, NamespaceMismatch)


class OnPrefillFailure(Enum):
    """RETRY on another prefill node and at last on the decode node itself; LOCAL: there at once; FAIL: not at all."""

    RETRY = "retry"
    LOCAL = "local"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeParams:
    """Limits of one request. A prefill gets `prefill_timeout_s` and for each token of the prompt
    `prefill_timeout_s_per_token` more. `max_attempts` counts the first one too."""

    reserve_timeout_s: float
    prefill_timeout_s: float
    prefill_timeout_s_per_token: float
    first_token_timeout_s: float
    token_gap_timeout_s: float
    max_attempts: int = 3
    on_prefill_failure: OnPrefillFailure = OnPrefillFailure.RETRY
    choose: Choose = choose


async def serve(
    request: Request, matches: Matches, params: ServeParams, ports: ServePorts, story: Story
) -> AsyncGenerator[TokenBatch, None]:
    """Yield the request's tokens in batches, the last one with `finish`; write what happens into `story`.

    Raises the first of the failures when the attempts are used up or no node is left.
    """
    kept: Reservation | None = None
    failures, arrived_s = _Failures(), ports.now() if story.arrived_s is None else story.arrived_s
    while True:
        laps = [ports.now() if failures.causes else arrived_s]
        route, kept = _route(request, matches, params, ports, failures, kept)
        if not failures.causes:
            ports.routed(request, route)
            story.match = matches.get(route.prefill) or NO_MATCH
        laps.append(ports.now())
        attempt = Attempt(kept.attempt if kept is not None else ports.new_attempt(), route)
        story.attempts.append(attempt)
        stage, streaming, reservation, kept = Ending.DECODE_LOST, False, kept, None
        try:
            taken: Reservation | None = None
            if reservation is None:
                reserving = ports.reserve(attempt.id, request, route)
                reservation = taken = await ports.within(params.reserve_timeout_s, "reserve", reserving)
            laps.append(ports.now())

            stage = Ending.PREFILL_LOST
            prefilling = ports.prefill(route, attempt.id, request, reservation)
            story.prefill = await ports.within(_prefill_timeout_s(request, params), "prefill", prefilling)
            laps.append(ports.now())

            stage = Ending.DECODE_LOST
            stream = ports.decode(reservation, request)
            batch = await ports.within(params.first_token_timeout_s, "first token", _next(stream, route))
            laps.append(ports.now())

            _account(story, arrived_s, laps, taken, story.prefill, batch)
            streaming = True
            _count(story, attempt, batch)
            yield batch
            while batch.finish is None:
                batch = await ports.within(params.token_gap_timeout_s, "next token", _next(stream, route))
                _count(story, attempt, batch)
                yield batch
            return
        except PrfaasError as error:
            stage = _stage(error, stage, route)
            attempt.ending, attempt.detail = _ending(error, stage), str(error)
            if streaming or not isinstance(error, RETRYABLE):
                raise
            failures.add(error, stage, route)
            if failures.exhaust(params):
                raise failures.causes[0] from None
            if stage is Ending.PREFILL_LOST and route.moves_kv and failures.stay(params):
                kept = reservation
        finally:
            if attempt.ending is Ending.RUNNING:
                attempt.ending = Ending.CANCELLED
            ports.release(route.prefill, attempt.id)
            if route.moves_kv and kept is None:
                ports.release(route.decode, attempt.id)


@dataclass(slots=True)
class _Failures:
    """What went wrong so far, in order, and whom to avoid for it."""

    causes: list[PrfaasError] = field(default_factory=list)
    avoid: frozenset[NodeId] = frozenset()
    of_prefill: bool = False
    #: The decode node has no room for KV on its way; a prefill on the node itself needs none.
    of_room: bool = False
    use_cache: bool = True

    def add(self, error: PrfaasError, stage: Ending, route: Route) -> None:
        # A pair of nodes whose namespaces differ is found out by the decode node, but it is the prefill node that is
        # exchanged: others have to fit the decode node as well.
        prefill = stage is Ending.PREFILL_LOST or isinstance(error, NamespaceMismatch)
        self.causes.append(error)
        self.use_cache &= isinstance(error, (Overloaded, NamespaceMismatch))
        if isinstance(error, Overloaded) and error.resource == KV_ROOM and route.moves_kv:
            self.of_room = True
            return
        if isinstance(error, TransferFailed) and error.cause == CACHE_LOST:
            return  # neither node's fault: the same two can serve it without the cache
        self.avoid |= {route.prefill if prefill else route.decode}
        self.of_prefill |= prefill

    def exhaust(self, params: ServeParams) -> bool:
        unwanted = self.of_prefill and params.on_prefill_failure is OnPrefillFailure.FAIL
        return unwanted or len(self.causes) >= params.max_attempts

    def stay(self, params: ServeParams) -> bool:
        """Once a prefill has failed, the last attempt depends on nothing but the decode node."""
        last = len(self.causes) + 1 == params.max_attempts
        return self.of_room or (self.of_prefill and (last or params.on_prefill_failure is OnPrefillFailure.LOCAL))


def _route(
    request: Request,
    matches: Matches,
    params: ServeParams,
    ports: ServePorts,
    failures: _Failures,
    kept: Reservation | None,
) -> tuple[Route, Reservation | None]:
    """The next route, and the reservation to go on with if it was kept and its node can be had; else it is released."""
    view, rule = ports.view(), ports.routing()
    if not failures.use_cache:
        matches = NO_MATCHES
    try:
        if kept is not None and (route := _in_place(request, matches, view, rule, failures, kept)) is not None:
            return (route if failures.use_cache else replace(route, use_cache=False)), kept
        if kept is not None:
            ports.release(kept.decode, kept.attempt)
        decide = fallback if failures.stay(params) else params.choose
        route = decide(request, matches, view, rule, failures.avoid)
        return (route if failures.use_cache else replace(route, use_cache=False)), None
    except (InvalidRequest, PeerUnavailable):
        if failures.causes:
            raise failures.causes[0] from None
        raise


def _in_place(
    request: Request,
    matches: Matches,
    view: ClusterView,
    rule: RoutingParams,
    failures: _Failures,
    kept: Reservation,
) -> Route | None:
    """On the node that has what has arrived; None when that has left or takes nothing new."""
    try:
        return fallback(request, matches, view, rule, failures.avoid | (frozenset(view.decode) - {kept.decode}))
    except (InvalidRequest, PeerUnavailable):
        return None


def _prefill_timeout_s(request: Request, params: ServeParams) -> float:
    return params.prefill_timeout_s + params.prefill_timeout_s_per_token * request.prompt_tokens


async def _next(stream: AsyncIterator[TokenBatch], route: Route) -> TokenBatch:
    async for batch in stream:
        return batch
    raise PeerUnavailable(route.decode, "the stream ended before its last token")


def _stage(error: PrfaasError, stage: Ending, route: Route) -> Ending:
    """Whose loss it was: while prefill runs, the decode node may be the one that dies."""
    lost_decode = isinstance(error, PeerUnavailable) and error.peer == route.decode
    return Ending.DECODE_LOST if lost_decode else stage


def _ending(error: PrfaasError, stage: Ending) -> Ending:
    return Ending.REFUSED if isinstance(error, (InvalidRequest, Overloaded, NamespaceMismatch)) else stage


def _count(story: Story, attempt: Attempt, batch: TokenBatch) -> None:
    """Before the batch is handed over: a client may leave with the last token and never come back for the end."""
    story.output_tokens += len(batch.tokens) // TOKEN_BYTES
    if batch.finish is not None:
        story.finish, story.recomputed_tokens = batch.finish, batch.recomputed_tokens
        attempt.ending = Ending.DONE


def _account(
    story: Story,
    arrived_s: float,
    laps: list[float],
    taken: Reservation | None,
    report: PrefillReport,
    batch: TokenBatch,
) -> None:
    """The terms of the TTFT account that end with the first token, of the attempt that began with the first lap.
    `taken` is the reservation if it was made by this attempt.

    `network` is what the calls took beyond the time that the workers had them, by the workers' own clocks. Failed
    attempts were a wait for this one to begin, so their time is added to `queue`, to which the caller may have added.
    """
    route_s, reserve_s, prefill_s, first_s = (end - start for start, end in pairwise(laps))
    waited_s, step_s = batch.first_queue_s or 0.0, batch.first_step_s or 0.0
    reserved_s = (taken.took_s or 0.0) if taken is not None else 0.0
    # Workers of an older version do not say how long they had a command.
    prefilled_s = report.queue_s + report.compute_s + report.exposed_s if report.took_s is None else report.took_s
    decoded_s = waited_s + step_s if batch.first_took_s is None else batch.first_took_s
    story.terms |= {
        "queue": story.terms.get("queue", 0.0) + laps[0] - arrived_s,
        "route": route_s,
        "network": max(0.0, reserve_s - reserved_s) + max(0.0, prefill_s - prefilled_s) + max(0.0, first_s - decoded_s),
        "prefill_queue": report.queue_s,
        "prefill": report.compute_s,
        "transfer_exposed": report.exposed_s,
        "decode_queue": reserved_s + waited_s,
        "first_decode_step": step_s,
    }
    story.first_s = laps[-1]
