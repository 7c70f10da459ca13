"""One prefill of an attempt, waited for no longer than is good for its request.

Where the time to the first token has an objective, a prefill elsewhere gets the time that leaves the decode node itself
still able to keep it, if that is what the prefill should take at least: otherwise the objective is no reason to give it
up. One that is overdue and hopeless is given up as well. One that takes much longer than usual may be hedged: the same
is begun on a decode node, under an attempt and with a reservation of its own, and the first to finish goes on. Whoever
is second is released, whatever happens.
"""

from dataclasses import dataclass, replace

from prfaas.cluster import NodeId
from prfaas.errors import DeadlineExceeded, Overloaded, PrefillOverdue, PrfaasError
from prfaas.flows.ports import PrefillReport, Reservation, ServePorts
from prfaas.flows.story import Attempt, Ending, Story
from prfaas.request import Matches, Predicted, Reason, Request, Route
from prfaas.scheduling.hedging import Hedging
from prfaas.scheduling.routing import Choose, fallback


@dataclass(frozen=True, slots=True)
class Instead:
    """The hedge was first: its attempt goes on, and the other one is released. `laps`: when it began, was routed, had
    its reservation."""

    attempt: Attempt
    reservation: Reservation
    laps: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Prefilled:
    report: PrefillReport
    instead: Instead | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`waited_s`: of the objective's time so much has passed; None: it does not matter any more. A hedge goes by
    `fallback`, and does not use nodes to `avoid`."""

    prefill_s: float
    reserve_s: float
    waited_s: float | None = None
    avoid: frozenset[NodeId] = frozenset()
    fallback: Choose = fallback


async def prefilled(
    request: Request,
    matches: Matches,
    attempt: Attempt,
    reservation: Reservation,
    limits: Limits,
    ports: ServePorts,
    story: Story,
) -> Prefilled:
    """Raises PrefillOverdue when there is just enough time left to do without."""
    route, began_s = attempt.route, ports.now()
    if not route.moves_kv:
        prefilling = ports.prefill(route, attempt.id, request, reservation)
        return Prefilled(await ports.within(limits.prefill_s, "prefill", prefilling))
    spare_s = None if limits.waited_s is None else spare(route, ports.routing().ttft_slo_s, limits.waited_s)
    limit_s = limits.prefill_s if spare_s is None else min(limits.prefill_s, spare_s)
    should_take_s, hedging = away_s(route.predicted), ports.hedging()
    due_at = ports.due_at(attempt.id)
    hedge_s = None if hedging is None or should_take_s is None else hedging.after_s(should_take_s)
    try:
        if (hedge_s is None or hedge_s >= limit_s) and (due_at is None or due_at - began_s >= limit_s):
            prefilling = ports.prefill(route, attempt.id, request, reservation)
            done = Prefilled(await ports.within(limit_s, "prefill", prefilling))
        else:
            race = _Race(request, matches, attempt, reservation, limits, ports, story, hedging)
            done = await race.first(limit_s, hedge_s, due_at)
    except PrfaasError as error:
        ports.prefill_lost(attempt.id, error)
        if isinstance(error, DeadlineExceeded) and spare_s == limit_s == error.seconds:
            raise PrefillOverdue("prefill", error.seconds) from None
        raise
    if done.instead is None and hedging is not None and should_take_s is not None:
        hedging.took(should_take_s, ports.now() - began_s)
    return done


def spare(route: Route, objective_s: float | None, waited_s: float) -> float | None:
    """How long the prefill may take so that the decode node can still keep the objective by itself. None: it is not
    known, or less than the prefill should take."""
    should_take_s = away_s(route.predicted)
    if objective_s is None or should_take_s is None:
        return None
    for way in route.alternatives:
        if way.prefill == way.decode == route.decode and way.predicted_ttft_s is not None:
            left_s = objective_s - waited_s - way.predicted_ttft_s
            return left_s if left_s >= should_take_s else None
    return None


def away_s(predicted: Predicted | None) -> float | None:
    """What passes between the command to prefill and the KV being there."""
    if predicted is None:
        return None
    return predicted.prefill_queue_s + predicted.prefill_s + predicted.transfer_exposed_s


def refusal(error: PrfaasError, route: Route | None, ports: ServePorts) -> PrfaasError:
    """The error for the client. Where it was refused what breakers had kept from going elsewhere, it is told when the
    first of them lets something through."""
    if not isinstance(error, Overloaded) or route is None or route.reason is not Reason.BREAKER_OPEN:
        return error
    opens_s = ports.routing().shut.half_opens_at - ports.now()
    if not error.retry_after_s < opens_s < float("inf"):
        return error
    return Overloaded(error.resource, retry_after_s=opens_s)


#: How often an overdue prefill is looked at again.
AGAIN_S = 1.0


class _Race:
    """A prefill far away; after a while, perhaps, another one here; and somebody who ends what is hopeless."""

    def __init__(
        self,
        request: Request,
        matches: Matches,
        attempt: Attempt,
        reservation: Reservation,
        limits: Limits,
        ports: ServePorts,
        story: Story,
        hedging: Hedging | None,
    ) -> None:
        self._request, self._matches, self._ports, self._story = request, matches, ports, story
        self._far, self._reservation, self._limits = attempt, reservation, limits
        self._hedging, self._began_s = hedging, ports.now()
        self._near: Attempt | None = None
        #: The one here is under way.
        self._running = False
        self._lost: PrfaasError | None = None

    async def first(self, limit_s: float, hedge_s: float | None, due_at: float | None) -> Prefilled:
        """The one far away gets `limit_s`."""
        won = False
        try:
            contenders = {"far": self._far_away(limit_s)}
            if self._hedging is not None and hedge_s is not None:
                contenders["near"] = self._here(self._hedging, hedge_s)
            if due_at is not None:
                contenders["watch"] = self._give_up(due_at)
            _, done = await self._ports.race(contenders)
            assert isinstance(done, Prefilled)
            won = done.instead is not None
        finally:
            if self._near is not None and not won:
                _end(self._near, Ending.CANCELLED, "the other prefill was first")
                self._ports.release(self._near.route.decode, self._near.id)
        if won and self._near is not None and self._hedging is not None:
            self._hedging.won += 1
            self._replace(self._near)
        return done

    def _replace(self, near: Attempt) -> None:
        far, attempts = self._far, self._story.attempts
        if self._lost is None:
            # Before it is released: afterwards nothing would be known of how it ended.
            self._ports.prefill_lost(far.id, DeadlineExceeded("prefill", self._ports.now() - self._began_s))
            _end(far, Ending.CANCELLED, "its hedge was first")
        else:
            _end(far, Ending.PREFILL_LOST, str(self._lost))
        attempts.remove(near)
        attempts.append(near)
        self._ports.release(far.route.prefill, far.id)
        self._ports.release(far.route.decode, far.id)

    async def _far_away(self, limit_s: float) -> Prefilled:
        ports, far = self._ports, self._far
        try:
            prefilling = ports.prefill(far.route, far.id, self._request, self._reservation)
            return Prefilled(await ports.within(limit_s, "prefill", prefilling))
        except PrfaasError as error:
            if not self._running:
                raise
            self._lost = error
            ports.prefill_lost(far.id, error)
        await self._other()
        raise self._lost

    async def _give_up(self, due_at: float) -> Prefilled:
        ports, began_s = self._ports, self._ports.now()
        await ports.sleep(max(0.0, due_at - began_s))
        while self._running or not ports.is_hopeless(self._far.id):
            await ports.sleep(AGAIN_S)
        raise DeadlineExceeded("prefill", ports.now() - began_s)

    async def _here(self, hedging: Hedging, after_s: float) -> Prefilled:
        await self._ports.sleep(after_s)
        if hedging.take():
            try:
                return await self._near_by()
            except PrfaasError as error:
                self._running = False
                if self._near is not None:
                    _end(self._near, Ending.PREFILL_LOST, str(error))
                    self._ports.release(self._near.route.decode, self._near.id)
                if self._lost is not None:
                    raise self._lost from None
        await self._other()
        raise DeadlineExceeded("prefill", self._limits.prefill_s)

    async def _near_by(self) -> Prefilled:
        ports, request, story, limits = self._ports, self._request, self._story, self._limits
        began_s = ports.now()
        route = limits.fallback(request, self._matches, ports.view(), ports.routing(), limits.avoid)
        route = replace(route, reason=Reason.HEDGE, use_cache=self._far.route.use_cache)
        near = self._near = Attempt(ports.new_attempt(), route, replayed_tokens=self._far.replayed_tokens)
        # The latest attempt stays the latest until this one is first.
        story.attempts.insert(story.attempts.index(self._far), near)
        self._running, routed_s = True, ports.now()
        reservation = await ports.within(limits.reserve_s, "reserve", ports.reserve(near.id, request, route))
        reserved_s = ports.now()
        prefilling = ports.prefill(route, near.id, request, reservation)
        report = await ports.within(limits.prefill_s, "prefill", prefilling)
        return Prefilled(report, Instead(near, reservation, (began_s, routed_s, reserved_s)))

    async def _other(self) -> None:
        """Wait for the other one to end the race, which it does within its own limits."""
        await self._ports.sleep(2 * self._limits.prefill_s + self._limits.reserve_s)


def _end(attempt: Attempt, ending: Ending, detail: str) -> None:
    if attempt.ending is Ending.RUNNING:
        attempt.ending, attempt.detail = ending, detail
