"""The ports of `flows.control` and `flows.pacing` in a router process."""

from collections.abc import Iterable, Mapping, Sequence

import structlog

from prfaas.cluster import Budget, ClusterView, LinkState, Node, NodeId, Plan, Pool
from prfaas.errors import PeerUnavailable, StaleEpoch
from prfaas.flows.control import Pinned
from prfaas.live.clock import AsyncioClock
from prfaas.live.demand_report import snapshot_of
from prfaas.live.steering import Steering
from prfaas.membership.budgets import BudgetWriter
from prfaas.membership.direct import publish_plan
from prfaas.membership.election import Election
from prfaas.membership.follow import ClusterFollower
from prfaas.membership.store import Store
from prfaas.request import Mode
from prfaas.scheduling.demand import DemandSnapshot
from prfaas.scheduling.rebalance import Hold, Proposal
from prfaas.scheduling.rule import Pair, Profiles
from prfaas.scheduling.threshold import ThresholdDecision

log = structlog.get_logger()


class LiveControlPorts(AsyncioClock):
    """`report` is to be told of each node's telemetry as it arrives. `bandwidth` is `auto`, or says what the links are
    taken for, whatever their use."""

    def __init__(
        self,
        store: Store,
        cluster: str,
        router: str,
        follower: ClusterFollower,
        election: Election,
        steering: Steering,
        bandwidth: str,
    ) -> None:
        super().__init__()
        self._store, self._cluster, self._router = store, cluster, router
        self._follower, self._election, self._steering = follower, election, steering
        self._bandwidth = bandwidth
        self._budgets = BudgetWriter(store, cluster, router)
        self._reports: dict[NodeId, float] = {}
        self._pool_reports: dict[NodeId, float] = {}
        #: The last round of the slow loop that this router held as the leader.
        self.outcome: Proposal | Hold | None = None

    def report(self, node: NodeId, at: float) -> None:
        if self._follower.record(node) is None:
            self._pool_reports[node] = at
            return
        self._reports[node] = at
        self._steering.overlay.reported(node, at)

    def view(self) -> ClusterView:
        return self._follower.view()

    def reports(self) -> Iterable[tuple[Node, float]]:
        reports, self._reports = self._reports, {}
        nodes = self.view().nodes
        self._steering.pace.seen(self.view())
        for name in filter(nodes.__contains__, reports):
            if (telemetry := self._follower.telemetry(name)) is not None:
                self._steering.pace.decoded(nodes[name], telemetry.counters)
        return [(nodes[name], at) for name, at in reports.items() if name in nodes]

    def pool_reports(self) -> Iterable[tuple[Pool, float]]:
        reports, self._pool_reports = self._pool_reports, {}
        pools = self.view().pools
        return [(pools[name], at) for name, at in reports.items() if name in pools]

    def demand(self) -> DemandSnapshot:
        own = self._steering.demand.snapshot(self.now())
        others = (each for each in self._follower.direction.routers.values() if each.router != self._router)
        return DemandSnapshot.merged([own, *map(snapshot_of, others)])

    def profiles(self) -> Profiles:
        return self._steering.pace.profiles

    def pinned(self) -> Pinned:
        pin = self._follower.direction.pin
        if pin is None:
            return Pinned()
        mode = Mode(pin.mode) if pin.mode in {known.value for known in Mode} else None
        return Pinned(pin.threshold_tokens, mode)

    def apply(self, decision: ThresholdDecision, links: Mapping[Pair, LinkState], abundant: bool) -> None:
        before = self._steering.situation.decision
        if before is None or (before.threshold_tokens, before.mode) != (decision.threshold_tokens, decision.mode):
            log.info(
                "threshold",
                threshold_tokens=decision.threshold_tokens,
                mode=decision.mode.value,
                reason=decision.reason.value,
                link_use=decision.link_use,
            )
        if self._bandwidth != "auto":
            abundant = self._bandwidth == "abundant"
        self._steering.apply(decision, links, abundant, self.now())

    def threshold_tokens(self) -> int:
        return self._steering.routing.threshold_tokens

    def leads(self) -> bool:
        return self._election.leads

    def plan_lost(self) -> bool:
        return self._follower.direction.plan_lost

    def considered(self, outcome: Proposal | Hold) -> None:
        self.outcome = outcome
        reason = outcome.reason if isinstance(outcome, Proposal) else outcome.reason.value
        log.info("slow_loop", outcome=type(outcome).__name__.lower(), reason=reason)

    async def publish(self, plan: Plan) -> bool:
        try:
            await publish_plan(self._store, self._cluster, plan, self._router)
        except StaleEpoch as error:
            log.warning("plan_overtaken", seen=error.seen, current=error.current)
        except PeerUnavailable as error:
            log.warning("plan_not_published", detail=error.detail)
        else:
            log.info("plan_published", epoch=plan.epoch, threshold_tokens=plan.threshold_tokens, reason=plan.reason)
            return True
        return False

    async def allow(self, budgets: Sequence[Budget]) -> Sequence[Budget]:
        """One after the other: they are few, and small. Of what fails the next round makes a new one."""
        in_force = []
        for budget in budgets:
            try:
                await self._budgets.publish(budget)
            except StaleEpoch as error:
                log.info("budget_of_another", target=budget.target, seen=error.seen, current=error.current)
            except PeerUnavailable as error:
                log.warning("budget_not_published", target=budget.target, detail=error.detail)
            else:
                in_force.append(budget)
        return in_force
