"""The ports of `flows.serve` over token links.

Deadlines are the flow's: every call here waits only for its worker's answer or for the end of the link, and the flow
puts `within` around it. What a flow took it gives back with `release`, which works at any point, also in a cancelled
task.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from prfaas.cluster import ClusterView, Incarnation, Node, NodeId, RegionId, own_network
from prfaas.errors import EngineFailed, PeerUnavailable, PrfaasError
from prfaas.flows.ports import Clock, PrefillReport, Reservation, TokenBatch
from prfaas.live.leg import Answer, Leg, Take
from prfaas.live.link import LinkPool
from prfaas.live.steering import Steering
from prfaas.request import NO_MATCHES, AttemptId, Matches, Request, Route
from prfaas.rpc.commands import Decode, Destination, Done, Prefill, PrefillDone, Reserve, Reserved, Tokens
from prfaas.scheduling.hedging import Hedging
from prfaas.scheduling.routing import RoutingParams

T = TypeVar("T")
E = TypeVar("E", Reserved, PrefillDone)

#: What is cached of a request's prompt.
Find = Callable[[Request], Awaitable[Matches]]
#: Events of an attempt that are not tokens: Reserved, PrefillDone, Done.
OTHER_EVENTS = 3


class LiveServePorts:
    """One for all requests of a router process.

    `attempt_deadline_s` is how long a worker keeps what nobody releases: the safety net for a router that is alive and
    has forgotten, so longer than any request may take. `caches`: whether workers may use their region's cache; `find`
    is how it is known what they hold.
    """

    def __init__(
        self,
        clock: Clock,
        view: Callable[[], ClusterView],
        links: LinkPool,
        new_id: Callable[[], AttemptId],
        steering: Steering,
        *,
        attempt_deadline_s: float = 3600.0,
        caches: bool = True,
        find: Find | None = None,
    ) -> None:
        self._clock, self._view, self._links, self._new_id = clock, view, links, new_id
        self._steering = steering
        self._attempt_deadline_s, self._caches, self._find = attempt_deadline_s, caches, find
        self._seen: ClusterView | None = None
        self._legs: dict[tuple[NodeId, AttemptId], Leg] = {}

    def now(self) -> float:
        return self._clock.now()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)

    async def within(self, seconds: float, stage: str, awaitable: Awaitable[T]) -> T:
        return await self._clock.within(seconds, stage, awaitable)

    async def race(self, contenders: Mapping[str, Awaitable[Any]]) -> tuple[str, Any]:
        return await self._clock.race(contenders)

    def view(self) -> ClusterView:
        """The cluster as reported, with the work of this router that is not in a report yet."""
        view = self._view()
        if view is not self._seen:
            self._seen = view
            self._links.retain(view)
            self._steering.breakers.retain(view, self.now())
        return self._steering.overlay.view(view, self.now())

    def routing(self) -> RoutingParams:
        return self._steering.routing.with_shut(self._steering.breakers.shut(self.now()))

    def routed(self, request: Request, route: Route) -> None:
        self._steering.routed(request, route, self.now())

    async def matches(self, request: Request) -> Matches:
        return NO_MATCHES if self._find is None else await self._find(request)

    def new_attempt(self) -> AttemptId:
        return self._new_id()

    async def reserve(self, attempt: AttemptId, request: Request, route: Route) -> Reservation:
        origin, decode = self._node(route.prefill), route.decode
        self._steering.reserved(attempt, request, route, origin, self.now())
        leg = await self._leg(decode, attempt, request)
        # With one token there is no KV to come.
        leg.network = own_network(origin, self._node(decode)) if request.prompt_tokens > 1 else ""
        leg.send(
            Reserve(
                request_id=request.id,
                prompt=request.prompt,
                sampling=request.sampling,
                source_node=origin.id,
                source_region=origin.region,
                source_namespace=origin.namespace,
                deadline_s=self._attempt_deadline_s,
                salt=request.salt,
                tenant=request.tenant,
                use_cache=self._caches and route.use_cache,
                traceparent=request.traceparent,
                network=leg.network,
            )
        )
        reserved = _expect(leg, Reserved, await leg.next())
        return Reservation(
            decode=decode,
            attempt=attempt,
            kv_address=reserved.kv_address,
            generation=reserved.generation,
            incarnation=reserved.incarnation,
            permit=reserved.permit,
            held_tokens=reserved.held_tokens,
            took_s=reserved.took_s,
        )

    async def prefill(
        self, route: Route, attempt: AttemptId, request: Request, reservation: Reservation
    ) -> PrefillReport:
        leg = await self._leg(route.prefill, attempt, request)
        held = self._held(reservation)
        leg.send(
            Prefill(
                request_id=request.id,
                prompt=request.prompt,
                destination=self._destination(reservation, held.network) if leg is not held else None,
                deadline_s=self._attempt_deadline_s,
                salt=request.salt,
                tenant=request.tenant,
                use_cache=self._caches and route.use_cache,
                pull_region=self._pull_region(route),
                weight=request.weight,
                traceparent=request.traceparent,
            )
        )
        # A reservation that is lost ends the prefill now, not when the sender finds out.
        done = _expect(leg, PrefillDone, await leg.next(needed=held if leg is not held else None))
        held.handover = done.handover
        report = PrefillReport(
            queue_s=done.queue_s,
            compute_s=done.compute_s,
            exposed_s=done.exposed_s,
            prefill_tokens=done.prefill_tokens,
            kv_bytes=done.kv_bytes,
            cached_tokens=done.cached_tokens,
            pulled_bytes=done.pulled_bytes,
            took_s=done.took_s,
        )
        self._steering.prefilled(attempt, request, self._view().nodes.get(route.prefill), report, self.now())
        return report

    def prefill_lost(self, attempt: AttemptId, error: PrfaasError) -> None:
        self._steering.breakers.failed(attempt, error, self.now())

    def due_at(self, attempt: AttemptId) -> float | None:
        return self._steering.breakers.due_at(attempt)

    def is_hopeless(self, attempt: AttemptId) -> bool:
        return self._steering.breakers.is_hopeless(attempt, self.now())

    def hedging(self) -> Hedging | None:
        return self._steering.hedging

    async def decode(self, reservation: Reservation, request: Request) -> AsyncIterator[TokenBatch]:
        leg = self._held(reservation)
        leg.send(Decode(request.top_logits, leg.handover))
        while True:
            match await leg.next():
                case Tokens() as new:
                    yield TokenBatch(
                        tokens=new.tokens,
                        top_logits=new.top_logits,
                        scores=new.scores,
                        first_queue_s=new.first_queue_s,
                        first_step_s=new.first_step_s,
                        first_took_s=new.first_took_s,
                    )
                case Done() as done:
                    yield TokenBatch(tokens=b"", finish=done.reason, recomputed_tokens=done.recomputed_tokens)
                    return
                case other:
                    raise _out_of_order(leg, other)

    def divert(self, node: NodeId, attempt: AttemptId, take: Take, every_s: float) -> None:
        """As `Leg.divert`, for an attempt that decodes there; nothing when it has ended."""
        if (leg := self._legs.get((node, attempt))) is not None:
            leg.divert(take, every_s)

    def release(self, node: NodeId, attempt: AttemptId) -> None:
        self._steering.released(attempt, self.now())
        if (leg := self._legs.pop((node, attempt), None)) is not None:
            leg.close()

    def _node(self, node: NodeId) -> Node:
        if (found := self._view().nodes.get(node)) is None:
            raise PeerUnavailable(node, "it has left the cluster")
        return found

    def _destination(self, reservation: Reservation, network: str) -> Destination:
        return Destination(
            node=reservation.decode,
            incarnation=Incarnation(reservation.incarnation),
            kv_address=reservation.kv_address,
            generation=reservation.generation,
            region=self._node(reservation.decode).region,
            permit=reservation.permit,
            held_tokens=reservation.held_tokens,
            network=network,
        )

    def _pull_region(self, route: Route) -> RegionId | None:
        """Where the prefill is to look for more, if its source is still there."""
        if route.pull is None or not route.pull.chosen:
            return None
        source = self._view().nodes.get(route.pull.source)
        return source.region if source is not None else None

    async def _leg(self, node: NodeId, attempt: AttemptId, request: Request) -> Leg:
        """The attempt's leg on the node, opened with its first command there."""
        if (leg := self._legs.get((node, attempt))) is not None:
            return leg
        link = self._links.link(self._node(node))
        leg = await link.open(attempt, request.sampling.max_tokens + OTHER_EVENTS)
        self._legs[node, attempt] = leg
        return leg

    def _held(self, reservation: Reservation) -> Leg:
        if (leg := self._legs.get((reservation.decode, reservation.attempt))) is None:
            raise PeerUnavailable(reservation.decode, "the reservation was released")
        return leg


def _expect(leg: Leg, kind: type[E], answer: Answer) -> E:
    if not isinstance(answer, kind):
        raise _out_of_order(leg, answer)
    return answer


def _out_of_order(leg: Leg, answer: Answer) -> EngineFailed:
    return EngineFailed(leg.node, f"answered out of order with {type(answer).__name__}")
