"""What one router steers by: the rule in force, its own work that no report shows yet, what arrives, and how fast the
hardware is. The serving side reads and feeds it, the control loops set it.
"""

from collections.abc import Mapping
from dataclasses import replace

from prfaas.cluster import LinkState, Node, RegionId
from prfaas.flows.ports import PrefillReport
from prfaas.flows.prefilling import away_s
from prfaas.live.decisions import Decisions
from prfaas.live.pace import Pace
from prfaas.live.situation import Situation
from prfaas.request import AttemptId, Request, Route
from prfaas.scheduling.breaker import BreakerParams
from prfaas.scheduling.breakers import Breakers
from prfaas.scheduling.demand import Demand, DemandParams
from prfaas.scheduling.hedging import Hedging
from prfaas.scheduling.overlay import Overlay
from prfaas.scheduling.rule import Pair, RoutingParams
from prfaas.scheduling.threshold import ThresholdDecision

BREAKERS = BreakerParams()


class Steering:
    """One per router process."""

    def __init__(
        self,
        pd_region: RegionId,
        routing: RoutingParams,
        now: float,
        demand: DemandParams,
        breakers: BreakerParams = BREAKERS,
        hedging: Hedging | None = None,
    ) -> None:
        self.routing = routing
        self.pace = Pace(routing.profiles)
        self.overlay = Overlay(pd_region)
        #: `hedging` None: prefills are not hedged.
        self.breakers, self.hedging = Breakers(breakers), hedging
        self._pd_region = pd_region
        self.demand = Demand(demand, now)
        self.situation = Situation(links=routing.links)
        self.decisions = Decisions()

    def routed(self, request: Request, route: Route, now: float) -> None:
        self.demand.routed(route.uncached_tokens, now)
        shut = self.breakers.shut(now)
        self.decisions.routed(request, replace(self.situation, shut=shut) if shut else self.situation)

    def reserved(self, attempt: AttemptId, request: Request, route: Route, prefill: Node, now: float) -> None:
        """Room is about to be taken. The prefill node's queue grows by what it has to compute, which is not what it has
        cached; what crosses is counted in bytes where the hardware is known."""
        profile = self.pace.profiles.get(prefill.hardware)
        kv_bytes = round(profile.kv_bytes(request.handoff_tokens)) if profile is not None and route.moves_kv else 0
        to_compute = min(route.prefill_tokens, request.handoff_tokens)
        total_tokens = request.prompt_tokens + request.sampling.max_tokens
        self.overlay.charge(attempt, route.prefill, route.decode, to_compute, total_tokens, kv_bytes, now)
        if route.moves_kv:
            ends = (route.prefill, prefill.region), (route.decode, self._pd_region)
            self.breakers.begin(attempt, *ends, away_s(route.predicted), now)

    def prefilled(
        self, attempt: AttemptId, request: Request, node: Node | None, report: PrefillReport, now: float
    ) -> None:
        self.overlay.prefilled(attempt, now)
        self.breakers.done(attempt, now)
        if node is not None:
            self.pace.prefilled(node, request, report)

    def released(self, attempt: AttemptId, now: float) -> None:
        self.overlay.discharge(attempt, now)
        self.breakers.forget(attempt, now)

    def finished(self, output_tokens: int, now: float) -> None:
        self.demand.finished(output_tokens, now)

    def apply(self, decision: ThresholdDecision, links: Mapping[Pair, LinkState], abundant: bool, now: float) -> None:
        self.breakers.heard(links, now)
        self.situation = Situation(decision, links)
        self.routing = replace(
            decision.applied(self.routing), abundant=abundant, links=links, profiles=self.pace.profiles
        )
