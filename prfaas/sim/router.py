"""One simulated router: what it knows by reports, what it steers by, and its ports.

The fold, the overlay and demand are the product's own; so are the flows that use the ports. A router knows of the
cluster only what the store has told it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from prfaas.cluster import ClusterView, LinkState, Node, NodeId, RegionId
from prfaas.errors import PrfaasError
from prfaas.flows.ports import PrefillReport, Reservation
from prfaas.flows.prefilling import away_s
from prfaas.membership.records import Kind, key_of
from prfaas.membership.store import Batch, Put
from prfaas.membership.view import MembershipView
from prfaas.request import AttemptId, Match, Request, Route
from prfaas.scheduling.breakers import Breakers
from prfaas.scheduling.demand import Demand, DemandParams
from prfaas.scheduling.hedging import Hedging
from prfaas.scheduling.overlay import Overlay
from prfaas.scheduling.rule import Pair, RoutingParams
from prfaas.scheduling.threshold import ThresholdDecision
from prfaas.sim.cluster import SimCluster
from prfaas.sim.serve_ports import SimServePorts


class SimRouter:
    def __init__(
        self,
        name: str,
        store_name: str,
        cluster: SimCluster,
        pd_region: RegionId,
        routing: RoutingParams,
        breakers: Breakers | None = None,
        hedging: Hedging | None = None,
    ) -> None:
        self.name, self.cluster = name, cluster
        self.fold = MembershipView(store_name, pd_region)
        self.overlay = Overlay(pd_region)
        self.breakers, self.hedging = breakers, hedging
        self.routing = routing
        self.decision: ThresholdDecision | None = None
        self.demand = Demand(DemandParams(), cluster.kernel.now())
        self._telemetry = key_of(store_name, Kind.TELEMETRY, "")
        self._reports: dict[NodeId, float] = {}

    def told(self, events: Batch) -> None:
        """The store says what has changed."""
        now = self.cluster.kernel.now()
        self.fold.apply(events, now)
        for event in events:
            if isinstance(event, Put) and event.entry.key.startswith(self._telemetry):
                node = NodeId(event.entry.key.removeprefix(self._telemetry))
                self._reports[node] = now
                self.overlay.reported(node, now)

    def view(self) -> ClusterView:
        """What the reports say, and own work that is in none yet."""
        now = self.cluster.kernel.now()
        view = self.fold.view(now)
        if self.breakers is not None:
            self.breakers.retain(view, now)
        return self.overlay.view(view, now)

    def reports(self) -> Iterable[tuple[Node, float]]:
        """Nodes that have reported since this was last asked."""
        reports, self._reports = self._reports, {}
        nodes = self.fold.view(self.cluster.kernel.now()).nodes
        return [(nodes[name], at) for name, at in reports.items() if name in nodes]

    def apply(self, decision: ThresholdDecision, links: Mapping[Pair, LinkState], abundant: bool) -> None:
        """The control loops' word."""
        if self.breakers is not None:
            self.breakers.heard(links, self.cluster.kernel.now())
        self.decision = decision
        self.routing = replace(decision.applied(self.routing), abundant=abundant, links=links)


class RouterPorts(SimServePorts):
    """`flows.ports.ServePorts` of a router."""

    def __init__(self, router: SimRouter) -> None:
        super().__init__(router.cluster, router.routing)
        self._router = router

    def view(self) -> ClusterView:
        return self._router.view()

    def routing(self) -> RoutingParams:
        routing, breakers = self._router.routing, self._router.breakers
        return routing if breakers is None else routing.with_shut(breakers.shut(self.now()))

    def due_at(self, attempt: AttemptId) -> float | None:
        return None if self._router.breakers is None else self._router.breakers.due_at(attempt)

    def is_hopeless(self, attempt: AttemptId) -> bool:
        return self._router.breakers is not None and self._router.breakers.is_hopeless(attempt, self.now())

    def hedging(self) -> Hedging | None:
        return self._router.hedging

    def prefill_lost(self, attempt: AttemptId, error: PrfaasError) -> None:
        if self._router.breakers is not None:
            self._router.breakers.failed(attempt, error, self.now())

    def routed(self, request: Request, route: Route) -> None:
        super().routed(request, route)
        self._router.demand.routed(route.uncached_tokens, self.now())

    async def reserve(self, attempt: AttemptId, request: Request, route: Route) -> Reservation:
        source, decode = route.prefill, route.decode
        cached = self._cluster.caches.held(source, request) if source != decode else Match()
        profile = self._cluster.workers[source].instance.profile
        self._router.overlay.charge(
            attempt,
            source,
            decode,
            request.prompt_tokens - cached.joint,
            request.prompt_tokens + request.sampling.max_tokens,
            round(profile.kv_bytes(request.handoff_tokens)) if source != decode else 0,
            self.now(),
        )
        if self._router.breakers is not None and route.moves_kv:
            regions = [self._cluster.workers[name].node.region for name in (source, decode)]
            ends = (source, regions[0]), (decode, regions[1])
            self._router.breakers.begin(attempt, *ends, away_s(route.predicted), self.now())
        return await super().reserve(attempt, request, route)

    async def prefill(
        self, route: Route, attempt: AttemptId, request: Request, reservation: Reservation
    ) -> PrefillReport:
        report = await super().prefill(route, attempt, request, reservation)
        self._router.overlay.prefilled(attempt, self.now())
        if self._router.breakers is not None:
            self._router.breakers.done(attempt, self.now())
        return report

    def release(self, node: NodeId, attempt: AttemptId) -> None:
        self._router.overlay.discharge(attempt, self.now())
        if self._router.breakers is not None:
            self._router.breakers.forget(attempt, self.now())
        super().release(node, attempt)
