"""What one router steers by: the rule in force, its own work that no report shows yet, what arrives, and how fast the
hardware is. The serving side reads and feeds it, the control loops set it.
"""

from collections.abc import Mapping
from dataclasses import replace

from prfaas.cluster import LinkState, Node, RegionId
from prfaas.flows.ports import PrefillReport
from prfaas.live.decisions import Decisions
from prfaas.live.pace import Pace
from prfaas.live.situation import Situation
from prfaas.request import AttemptId, Request, Route
from prfaas.scheduling.demand import Demand, DemandParams
from prfaas.scheduling.overlay import Overlay
from prfaas.scheduling.rule import Pair, RoutingParams
from prfaas.scheduling.threshold import ThresholdDecision


class Steering:
    """One per router process."""

    def __init__(self, pd_region: RegionId, routing: RoutingParams, now: float, demand: DemandParams) -> None:
        self.routing = routing
        self.pace = Pace(routing.profiles)
        self.overlay = Overlay(pd_region)
        self.demand = Demand(demand, now)
        self.situation = Situation(links=routing.links)
        self.decisions = Decisions()

    def routed(self, request: Request, route: Route, now: float) -> None:
        self.demand.routed(route.uncached_tokens, now)
        self.decisions.routed(request, self.situation)

    def reserved(self, attempt: AttemptId, request: Request, route: Route, prefill: Node, now: float) -> None:
        """Room is about to be taken. The prefill node's queue grows by what it has to compute, which is not what it has
        cached; what crosses is counted in bytes where the hardware is known."""
        profile = self.pace.profiles.get(prefill.hardware)
        kv_bytes = round(profile.kv_bytes(request.handoff_tokens)) if profile is not None and route.moves_kv else 0
        to_compute = min(route.prefill_tokens, request.handoff_tokens)
        total_tokens = request.prompt_tokens + request.sampling.max_tokens
        self.overlay.charge(attempt, route.prefill, route.decode, to_compute, total_tokens, kv_bytes, now)

    def prefilled(
        self, attempt: AttemptId, request: Request, node: Node | None, report: PrefillReport, now: float
    ) -> None:
        self.overlay.prefilled(attempt, now)
        if node is not None:
            self.pace.prefilled(node, request, report)

    def released(self, attempt: AttemptId, now: float) -> None:
        self.overlay.discharge(attempt, now)

    def finished(self, output_tokens: int, now: float) -> None:
        self.demand.finished(output_tokens, now)

    def apply(self, decision: ThresholdDecision, links: Mapping[Pair, LinkState], abundant: bool) -> None:
        self.situation = Situation(decision, links)
        self.routing = replace(
            decision.applied(self.routing), abundant=abundant, links=links, profiles=self.pace.profiles
        )
