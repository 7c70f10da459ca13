"""The two loops that steer a cluster, at two timescales.

Every router runs the fast loop on its own view: with each round of reports it estimates the links and sets the
threshold by which it routes. The leader alone runs the slow loop: it looks at demand and roles, and now and then
publishes a plan; every router watches, as any of them may come to lead. What must hold: nothing is changed on the
strength of what is not known, and a plan always has a higher epoch than any that somebody in the cluster has seen.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Never, Protocol

from prfaas.cluster import ClusterView, LinkState, Node, NodeId, NodeKind, Plan, Pool, RegionId
from prfaas.flows.ports import Clock
from prfaas.request import Mode
from prfaas.scheduling.congestion import LinkEstimator
from prfaas.scheduling.demand import DemandSnapshot
from prfaas.scheduling.rebalance import Hold, HoldReason, Observation, Proposal, Rebalancer
from prfaas.scheduling.rule import Pair, Profiles
from prfaas.scheduling.signals import is_silent, read
from prfaas.scheduling.threshold import ThresholdController, ThresholdDecision

#: While a change is to be confirmed or has steps left, the slow loop looks so many times as often.
SOONER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlParams:
    """`threshold_tokens` holds until there is a plan. `report_s` is how often nodes report; a slow period should be
    many of those and longer than a role takes to change."""

    model: str
    pd_region: RegionId
    threshold_tokens: int
    report_s: float = 1.0
    #: Another region that is not heard of for so long, while this one is, cannot be reached. A few reports.
    silent_s: float = 4.0
    slow_period_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Pinned:
    """What an operator wants in place of what the loops find; None where they decide."""

    threshold_tokens: int | None = None
    mode: Mode | None = None


class ControlPorts(Clock, Protocol):
    """The world as the loops see it: one router's view, and the store while it leads."""

    def view(self) -> ClusterView: ...

    def reports(self) -> Iterable[tuple[Node, float]]:
        """Nodes whose telemetry has arrived since this was last asked, and when it did."""
        ...

    def pool_reports(self) -> Iterable[tuple[Pool, float]]:
        """The same of shards of the cache."""
        ...

    def demand(self) -> DemandSnapshot:
        """What arrives at all routers together."""
        ...

    def profiles(self) -> Profiles: ...

    def pinned(self) -> Pinned: ...

    def apply(self, decision: ThresholdDecision, links: Mapping[Pair, LinkState], abundant: bool) -> None:
        """Route by this from now on."""
        ...

    def threshold_tokens(self) -> int:
        """What routing follows now."""
        ...

    def leads(self) -> bool:
        """Whether this router is the leader now."""
        ...

    def plan_lost(self) -> bool:
        """The store has come back without the plan that is in force, or with an older one."""
        ...

    def considered(self, outcome: Proposal | Hold) -> None:
        """A round of the slow loop, for those who watch."""
        ...

    async def publish(self, plan: Plan) -> bool:
        """Put the plan in force, unless one of its epoch or a later one is there. False also when the store cannot be
        reached."""
        ...


async def fast_loop(
    ports: ControlPorts, links: LinkEstimator, controller: ThresholdController, params: ControlParams
) -> Never:
    """Set the threshold anew with each round of reports."""
    hearing = _Hearing(params.silent_s, ports.now())
    decision: ThresholdDecision | None = None
    while True:
        now, view = ports.now(), ports.view()
        for node, at in ports.reports():
            links.report(node, at)
            hearing.report(node.id, at)
        for pool, at in ports.pool_reports():
            links.report_of(pool.id, pool.region, view.pool_egress.get(pool.id, ()), at)
        states, pinned = links.update(now), ports.pinned()
        signals = read(
            view,
            params.model,
            params.pd_region,
            ports.profiles(),
            states,
            ports.demand(),
            current_threshold(view, params.threshold_tokens),
            short_tokens=decision.short_tokens if decision is not None else None,
            long_tokens=decision.long_tokens if decision is not None else None,
            unreachable=hearing.remote_is_silent(view, now),
            pinned_mode=pinned.mode,
            pinned_threshold_tokens=pinned.threshold_tokens,
        )
        decision = controller.update(signals, now)
        ports.apply(decision, states, links.abundant(params.pd_region))
        await ports.sleep(params.report_s)


class _Hearing:
    """When each node was last heard of. Only a silence during which this region was heard all the time says something:
    after an outage of the store the one region may come back a moment before the other."""

    def __init__(self, silent_s: float, now: float) -> None:
        self._silent_s = silent_s
        self._heard: dict[NodeId, float] = {}
        self._heard_here_since = now

    def report(self, node: NodeId, at: float) -> None:
        self._heard[node] = at

    def remote_is_silent(self, view: ClusterView, now: float) -> bool:
        self._heard = {name: self._heard[name] for name in view.nodes if name in self._heard}
        here, after = (*view.local_prefill, *view.decode), now - self._silent_s
        if max((self._heard.get(name, -math.inf) for name in here), default=-math.inf) < after:
            self._heard_here_since = now
        silent = is_silent(view.remote_prefill, here, self._heard.get, after)
        return silent and self._heard_here_since <= after


async def slow_loop(ports: ControlPorts, links: LinkEstimator, rebalancer: Rebalancer, params: ControlParams) -> Never:
    """Plan, while this router leads. A new leader watches for a period before it changes anything, and a plan that the
    store has lost is put there again, under a new epoch, before anything else."""
    due = ports.now() + params.slow_period_s
    while True:
        await ports.sleep(params.report_s)
        now, view = ports.now(), ports.view()
        rebalancer.see(_observation(ports, links, params), ports.threshold_tokens(), now)
        if not ports.leads():
            due = now + params.slow_period_s
        elif ports.plan_lost() and view.plan is not None:
            await ports.publish(replace(view.plan, epoch=view.highest_epoch + 1))
        elif now >= due:
            outcome = rebalancer.consider(_observation(ports, links, params), now)
            due = now + params.slow_period_s / (SOONER if _is_under_way(outcome) else 1)
            ports.considered(outcome)
            if isinstance(outcome, Proposal):
                await ports.publish(_plan(view, outcome))


def _is_under_way(outcome: Proposal | Hold) -> bool:
    """Something is wanted that is not confirmed, or not carried out to its end."""
    if isinstance(outcome, Hold):
        return outcome.reason in (HoldReason.UNCONFIRMED, HoldReason.CONVERTING)
    return len(outcome.converts) > 0


def current_threshold(view: ClusterView, otherwise: int) -> int:
    """The plan's, once there is one."""
    return view.plan.threshold_tokens if view.plan is not None else otherwise


def planned_shares(view: ClusterView) -> dict[NodeId, float]:
    """What each PD node is to be: as planned, or as it is. Nodes that have left are not planned for."""
    planned = view.plan.shares if view.plan is not None else {}
    pd = (node for node in view.nodes.values() if node.kind is NodeKind.PD)
    return {node.id: planned.get(node.id, node.share) for node in pd}


def _plan(view: ClusterView, proposal: Proposal) -> Plan:
    return Plan(
        epoch=view.highest_epoch + 1,
        threshold_tokens=proposal.threshold_tokens,
        shares=planned_shares(view) | dict(proposal.shares),
        reason=proposal.reason,
    )


def _observation(ports: ControlPorts, links: LinkEstimator, params: ControlParams) -> Observation:
    view, now = ports.view(), ports.now()
    return Observation(
        view=view,
        model=params.model,
        demand=ports.demand(),
        profiles=ports.profiles(),
        threshold_tokens=current_threshold(view, params.threshold_tokens),
        link=_link(links.links(now), params),
    )


def _link(links: Mapping[Pair, LinkState], params: ControlParams) -> LinkState | None:
    """The one into the PD region; of several the fullest."""
    into = [link for (_, target), link in links.items() if target == params.pd_region]
    return max(into, key=lambda link: (link.utilization or 0.0, link.source), default=None)
