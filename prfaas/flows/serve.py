"""One request from its route to its last token.

Whatever happens, both nodes of every attempt are told to let go of it, in a `finally` that waits for nothing: after the
last token, after a failure, when the client leaves at any await, and when the generator is closed between two batches.
Until the first token a failed attempt is followed by another, under a new id and with a reservation of its own;
afterwards only by one that can go on with the very same tokens (`prfaas.flows.migration`). What a cache holds may have
been what failed: unless the attempt was merely refused, the next ones do without. Only where the decode node prefills
at last, because nobody else could, it goes on under the attempt that failed: what has arrived of its KV need not be
computed again.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace

from prfaas.cluster import ClusterView, Node
from prfaas.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    NamespaceMismatch,
    Overloaded,
    PeerUnavailable,
    PrfaasError,
    TransferFailed,
)
from prfaas.flows.failures import Failures, OnPrefillFailure
from prfaas.flows.migration import Stream
from prfaas.flows.ports import PrefillReport, Reservation, ServePorts, TokenBatch
from prfaas.flows.prefilling import Limits, prefilled, refusal
from prfaas.flows.story import Attempt, Ending, Story
from prfaas.flows.ttft_account import account
from prfaas.request import NO_MATCH, NO_MATCHES, FinishReason, Matches, Reason, Request, Route
from prfaas.scheduling.routing import Choose, RoutingParams, choose, fallback

#: What another node may do better. Anything else, InvalidRequest above all, is the client's at once.
RETRYABLE = (Overloaded, PeerUnavailable, TransferFailed, EngineFailed, DeadlineExceeded, NamespaceMismatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeParams:
    """Limits of one request. A prefill gets `prefill_timeout_s` and for each token of the prompt
    `prefill_timeout_s_per_token` more. `max_attempts` counts the first one too; it ends with the first token. After
    that a request may take `max_migrations` more attempts, and each time that its decode node is lost
    `migration_timeout_s` to get its next token."""

    reserve_timeout_s: float
    prefill_timeout_s: float
    prefill_timeout_s_per_token: float
    first_token_timeout_s: float
    token_gap_timeout_s: float
    max_attempts: int = 3
    max_migrations: int = 3
    migration_timeout_s: float = 30.0
    on_prefill_failure: OnPrefillFailure = OnPrefillFailure.RETRY
    #: A prefill elsewhere is given up where that is the last moment to keep the objective of the time to the first
    #: token without it.
    within_objective: bool = False
    #: How a route is decided, and one whose prefill is where it decodes. Others are for comparison, or know of nodes to
    #: leave out.
    choose: Choose = choose
    fallback: Choose = fallback

    @property
    def keeps_objective(self) -> bool:
        """Without another prefill to follow, giving up keeps nothing."""
        return self.within_objective and self.on_prefill_failure is not OnPrefillFailure.FAIL


async def serve(
    request: Request, matches: Matches, params: ServeParams, ports: ServePorts, story: Story
) -> AsyncGenerator[TokenBatch, None]:
    """Yield the request's tokens in batches, the last one with `finish`; write what happens into `story`.

    Raises the first of the failures when the attempts are used up or no node is left; after the first token, why its
    decode node was lost.
    """
    serving = _Serving(request, matches, params, ports, story)
    try:
        while True:
            one = await serving.next()
            try:
                batch = await serving.begin(one)
                yield batch
                while batch.finish is None:
                    batch = await serving.go_on(one)
                    yield batch
                return
            except PrfaasError as error:
                failure = error
                serving.failed(one, error)
            finally:
                serving.let_go(one)
            if one.streaming:
                # Only now: until it is released, an attempt may hand out tokens.
                serving.lose(one, failure)
                if serving.stream.is_over:
                    story.finish = FinishReason.LENGTH
                    yield TokenBatch(tokens=b"", finish=FinishReason.LENGTH)
                    return
                await serving.move(failure)
    finally:
        story.generated.clear()
        serving.over()


@dataclass(slots=True)
class _Try:
    """An attempt, as far as it has come. Where its hedge is first, that one takes its place. `laps`: when it began, was
    routed, had its reservation, its prefill and its first token. `taken` is the reservation if it was made by this
    attempt, and not kept of one that failed. `stage`: whose loss a failure is for now."""

    attempt: Attempt
    node: Node | None
    laps: list[float]
    reservation: Reservation | None
    taken: Reservation | None = None
    stage: Ending = Ending.DECODE_LOST
    batches: AsyncIterator[TokenBatch] | None = None
    streaming: bool = False

    @property
    def route(self) -> Route:
        return self.attempt.route


class _Serving:
    """The parts of `serve`. `asked` is what is still to be had of the request; `kept` the reservation of the attempt
    that failed last, where the next one goes on with it."""

    def __init__(
        self, request: Request, matches: Matches, params: ServeParams, ports: ServePorts, story: Story
    ) -> None:
        self._params, self._ports, self._story = params, ports, story
        self._asked, self._matches = request, matches
        self._kept: Reservation | None = None
        self._failures = Failures(params.max_attempts)
        self._arrived_s = ports.now() if story.arrived_s is None else story.arrived_s
        self.stream = Stream(request, story, ports, params.max_migrations, params.migration_timeout_s)

    async def next(self) -> _Try:
        """Its route is known. Raises the first of the failures when there is none."""
        ports, story, stream = self._ports, self._story, self.stream
        while True:
            began_s = ports.now() if self._failures.causes else self._arrived_s
            try:
                route, kept, node = self._route()
            except PrfaasError:
                self._kept = None
                if not await stream.another_round():
                    stream.given_up()
                    raise
                self._failures = self._failures.another_round(stream.unfit(ports.view()))
                continue
            if not self._failures.causes:
                ports.routed(self._asked, route)
                story.match = self._matches.get(route.prefill) or NO_MATCH
            routed_s = ports.now()
            attempt = Attempt(kept.attempt if kept is not None else ports.new_attempt(), route)
            attempt.replayed_tokens = story.output_tokens
            story.attempts.append(attempt)
            self._kept = None
            return _Try(attempt, node, [began_s, routed_s], kept)

    async def begin(self, one: _Try) -> TokenBatch:
        """Its first tokens."""
        params, ports, stream = self._params, self._ports, self.stream
        reservation = await self._reserved(one)
        one.laps.append(ports.now())
        one.stage = Ending.PREFILL_LOST
        report, reservation = await self._prefilled(one, reservation)
        one.laps.append(ports.now())
        one.stage = Ending.DECODE_LOST
        one.batches = ports.decode(reservation, self._asked)
        limit_s = stream.within_s(params.first_token_timeout_s)
        batch = await ports.within(limit_s, "first token", _next(one.batches, one.route))
        one.laps.append(ports.now())
        if self._story.opening is None:
            account(self._story, self._arrived_s, one.laps, one.taken, report, batch)
            self._story.opening = one.attempt
        else:
            stream.moved(one.route, report)
        stream.node = stream.node or one.node
        one.streaming = True
        _count(self._story, one.attempt, batch)
        return batch

    async def go_on(self, one: _Try) -> TokenBatch:
        assert one.batches is not None
        following = _next(one.batches, one.route)
        batch = await self._ports.within(self._params.token_gap_timeout_s, "next token", following)
        _count(self._story, one.attempt, batch)
        return batch

    def failed(self, one: _Try, error: PrfaasError) -> None:
        """Raises what ends the request, if this does."""
        params, stream, failures = self._params, self.stream, self._failures
        one.stage = _stage(error, one.stage, one.route)
        one.attempt.ending, one.attempt.detail = _ending(error, one.stage), str(error)
        if isinstance(error, NamespaceMismatch):
            self._ports.prefill_lost(one.attempt.id, error)
        if not isinstance(error, RETRYABLE):
            stream.given_up()
            raise error
        if one.streaming:
            return
        failures.add(error, one.stage, one.route, one.reservation is not None)
        if failures.exhaust(params.on_prefill_failure) or stream.late:
            stream.given_up()
            raise refusal(failures.causes[0], one.route, self._ports) from None
        if one.stage is Ending.PREFILL_LOST and one.route.moves_kv and failures.stay(params.on_prefill_failure):
            self._kept = one.reservation

    def let_go(self, one: _Try) -> None:
        """Both nodes, but for what is kept."""
        attempt, route = one.attempt, one.route
        if attempt.ending is Ending.RUNNING:
            attempt.ending = Ending.CANCELLED
        self._ports.release(route.prefill, attempt.id)
        if route.moves_kv and self._kept is None:
            self._ports.release(route.decode, attempt.id)

    def lose(self, one: _Try, failure: PrfaasError) -> None:
        """The node that decoded. Raises the failure where nobody could go on."""
        assert one.reservation is not None
        spent = self._failures.counted + 1 if self._failures.moving else 0
        self.stream.lose(failure, one.reservation, spent)

    async def move(self, failure: PrfaasError) -> None:
        """What follows is asked of another node."""
        stream = self.stream
        self._asked = stream.rest()
        self._matches = await _found(self._asked, stream.within_s(self._params.reserve_timeout_s), self._ports)
        unfit = stream.unfit(self._ports.view())
        self._failures = Failures(stream.left, [failure], moving=True, unfit=unfit)

    def over(self) -> None:
        """Errors hold the calls that raised them, which hold this: let go of them, and all goes at once."""
        self._failures.causes.clear()
        self.stream.loss = None

    async def _reserved(self, one: _Try) -> Reservation:
        if one.reservation is None:
            reserving = self._ports.reserve(one.attempt.id, self._asked, one.route)
            limit_s = self.stream.within_s(self._params.reserve_timeout_s)
            one.reservation = one.taken = await self._ports.within(limit_s, "reserve", reserving)
        return one.reservation

    async def _prefilled(self, one: _Try, reservation: Reservation) -> tuple[PrefillReport, Reservation]:
        """And the reservation to decode by, which is that of a hedge where that was first."""
        params, ports, story, stream = self._params, self._ports, self._story, self.stream
        keeps_objective = story.opening is None and params.keeps_objective
        limits = Limits(
            prefill_s=stream.within_s(_prefill_timeout_s(self._asked, params)),
            reserve_s=stream.within_s(params.reserve_timeout_s),
            waited_s=one.laps[-1] - self._arrived_s if keeps_objective else None,
            avoid=self._failures.shunned,
            fallback=params.fallback,
        )
        done = await prefilled(self._asked, self._matches, one.attempt, reservation, limits, ports, story)
        if (instead := done.instead) is not None:
            one.attempt, one.laps = instead.attempt, [*instead.laps]
            one.reservation = one.taken = reservation = instead.reservation
            one.node = ports.view().nodes.get(reservation.decode)
        if story.opening is None:
            story.prefill = done.report
        return done.report, reservation

    def _route(self) -> tuple[Route, Reservation | None, Node | None]:
        """The next route, and the reservation to go on with if it was kept and its node can be had; else it is
        released. Then the node that decodes."""
        params, ports, failures, kept = self._params, self._ports, self._failures, self._kept
        matches = self._matches if failures.use_cache else NO_MATCHES
        stay = failures.stay(params.on_prefill_failure)
        view, rule = ports.view(), ports.routing()
        try:
            if kept is not None:
                if (route := self._in_place(matches, view, rule, kept)) is not None:
                    return self._marked(route), kept, view.nodes.get(route.decode)
                ports.release(kept.decode, kept.attempt)
            if len(failures.full) >= params.max_attempts:
                raise failures.causes[0]
            decide = params.fallback if stay else params.choose
            route = self._marked(decide(self._asked, matches, view, rule, failures.shunned))
            return route, None, view.nodes.get(route.decode)
        except (InvalidRequest, PeerUnavailable):
            if failures.causes:
                raise failures.causes[0] from None
            raise

    def _marked(self, route: Route) -> Route:
        """After failures it says so, and does without the cache where that may have been what failed."""
        if self._failures.causes and route.reason is Reason.NO_REMOTE_PREFILL:
            route = replace(route, reason=Reason.FALLBACK)
        return route if self._failures.use_cache else replace(route, use_cache=False)

    def _in_place(self, matches: Matches, view: ClusterView, rule: RoutingParams, kept: Reservation) -> Route | None:
        """On the node that has what has arrived; None when that has left or takes nothing new."""
        others = frozenset(view.decode) - {kept.decode}
        try:
            return self._params.fallback(self._asked, matches, view, rule, self._failures.shunned | others)
        except (InvalidRequest, PeerUnavailable):
            return None


async def _found(asked: Request, limit_s: float, ports: ServePorts) -> Matches:
    try:
        return await ports.within(limit_s, "matches", ports.matches(asked))
    except DeadlineExceeded:
        return NO_MATCHES


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
    story.handed_out(batch.tokens)
    if batch.finish is not None:
        story.finish, story.recomputed_tokens = batch.finish, batch.recomputed_tokens
        attempt.ending = Ending.DONE
