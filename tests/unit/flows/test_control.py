"""Both control loops in virtual time: what they set by what they see, and who may publish what."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from prfaas.cluster import (
    ClusterView,
    Egress,
    Incarnation,
    LinkState,
    Namespace,
    Node,
    NodeId,
    NodeKind,
    NodeLoad,
    Plan,
    Pool,
    RegionId,
    Role,
)
from prfaas.flows.control import ControlParams, Pinned, current_threshold, fast_loop, planned_shares, slow_loop
from prfaas.profile import CASE_STUDY, shipped
from prfaas.request import Mode
from prfaas.scheduling.congestion import LinkEstimator
from prfaas.scheduling.demand import Demand, DemandParams, DemandSnapshot
from prfaas.scheduling.rebalance import Hold, HoldReason, Proposal, RebalanceParams, Rebalancer
from prfaas.scheduling.rule import Pair, Profiles
from prfaas.scheduling.threshold import ThresholdController, ThresholdDecision, ThresholdReason
from prfaas.sim.kernel import Kernel

FAR, PD = RegionId("a"), RegionId("b")
PARAMS = ControlParams(model="m", pd_region=PD, threshold_tokens=20_000, slow_period_s=10.0)
#: A leader that makes up its mind at once.
EAGER = RebalanceParams(agreeing_rounds=1, dwell_s=0.0, warm_up_s=0.0, needed_requests=10.0)


IDLE = NodeLoad()


def node(name: str, share: float = 1.0, *, far: bool = False, load: NodeLoad = IDLE) -> Node:
    role = Role.PREFILL if share >= 1 else Role.DECODE if share <= 0 else Role.MIXED
    return Node(
        id=NodeId(name),
        region=FAR if far else PD,
        kind=NodeKind.PREFILL_WORKER if far else NodeKind.PD,
        role=role,
        incarnation=Incarnation(1),
        namespace=Namespace("ns"),
        model="m",
        rpc_address="",
        max_context_tokens=200_000,
        hardware="h200" if far else "h20",
        prefill_share=share if role is Role.MIXED else None,
        load=load,
    )


@dataclass
class Router:
    """`ControlPorts` in virtual time: a view that the test sets, and everything that the loops did."""

    kernel: Kernel
    nodes: tuple[Node, ...]
    plan: Plan | None = None
    highest_epoch: int = 0
    leading: bool = True
    lost: bool = False
    pin: Pinned = field(default_factory=Pinned)
    silent: frozenset[str] = frozenset()
    applied: list[ThresholdDecision] = field(default_factory=list)
    rounds: list[tuple[float, Proposal | Hold]] = field(default_factory=list)
    published: list[Plan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now, self.sleep = self.kernel.now, self.kernel.sleep
        self.within, self.race = self.kernel.within, self.kernel.race
        self.seen = Demand(DemandParams(), 0.0)

    def view(self) -> ClusterView:
        pd = [each for each in self.nodes if each.kind is NodeKind.PD]
        return ClusterView(
            nodes={each.id: each for each in self.nodes},
            remote_prefill=tuple(each.id for each in self.nodes if each.kind is NodeKind.PREFILL_WORKER),
            local_prefill=tuple(each.id for each in pd if each.role.prefills),
            decode=tuple(each.id for each in pd if each.role.decodes),
            plan=self.plan,
            highest_epoch=max(self.highest_epoch, self.plan.epoch if self.plan else 0),
        )

    def pool_reports(self) -> Iterable[tuple[Pool, float]]:
        return ()

    def reports(self) -> Iterable[tuple[Node, float]]:
        return [(each, self.now()) for each in self.nodes if each.id not in self.silent]

    def demand(self) -> DemandSnapshot:
        return self.seen.snapshot(self.now())

    def profiles(self) -> Profiles:
        return {hardware: shipped(CASE_STUDY, hardware) for hardware in ("h200", "h20")}

    def pinned(self) -> Pinned:
        return self.pin

    def apply(self, decision: ThresholdDecision, links: Mapping[Pair, LinkState], abundant: bool) -> None:
        self.applied.append(decision)

    def threshold_tokens(self) -> int:
        return self.applied[-1].threshold_tokens if self.applied else PARAMS.threshold_tokens

    def leads(self) -> bool:
        return self.leading

    def plan_lost(self) -> bool:
        return self.lost

    def considered(self, outcome: Proposal | Hold) -> None:
        self.rounds.append((self.now(), outcome))

    async def publish(self, plan: Plan) -> bool:
        self.published.append(plan)
        self.plan, self.lost = plan, False
        return True

    def arrive(self, per_s: float) -> None:
        """From now on, one after the other."""
        self.kernel.spawn(self._arrive(per_s), "arrivals")

    async def _arrive(self, per_s: float) -> None:
        for tokens in itertools.cycle(LENGTHS):
            self.seen.routed(tokens, self.now())
            self.seen.finished(1024, self.now())
            await self.sleep(1 / per_s)

    def later(self, seconds: float) -> None:
        self.kernel.run_until(self.kernel.now() + seconds)


def fast(*nodes: Node) -> Router:
    router = Router(Kernel(seed=0), nodes)
    router.kernel.spawn(fast_loop(router, LinkEstimator(), ThresholdController(), PARAMS), "fast loop")
    return router


def slow(*nodes: Node, leading: bool = True, rebalance: RebalanceParams = EAGER) -> Router:
    router = Router(Kernel(seed=0), nodes, leading=leading)
    router.kernel.spawn(slow_loop(router, LinkEstimator(), Rebalancer(rebalance), PARAMS), "slow loop")
    return router


def sending(queued_bytes: int, sent: float, backlogged: float | None) -> NodeLoad:
    return NodeLoad(egress=(Egress(PD, queued_bytes, sent, backlogged),))


TRIO = (node("p0", far=True), node("d0", 1.0), node("d1", 0.0), node("d2", 0.0))
LENGTHS = (4_000, 12_000, 25_000, 40_000, 80_000)


def test_t_follows_the_link_up_and_back():
    """A backlogged line that carries little raises t within a few reports; when it carries enough, t comes back."""
    router = fast(*TRIO)
    router.arrive(per_s=0.3)
    router.later(200.0)
    assert router.applied[-1].threshold_tokens == 20_000
    router.nodes = (node("p0", far=True, load=sending(2 << 30, 5e7, 5e7)), *TRIO[1:])
    router.later(3.0)
    assert router.applied[-1].threshold_tokens > 30_000
    assert router.applied[-1].reason is ThresholdReason.LINK_PRESSED
    router.nodes = (node("p0", far=True, load=sending(0, 1e8, 1e10)), *TRIO[1:])
    router.later(60.0)
    assert router.applied[-1].threshold_tokens == 20_000


def test_the_plans_t_replaces_the_configured_one():
    """From the report after it was published."""
    router = fast(*TRIO)
    router.later(1.5)
    assert router.applied[-1].threshold_tokens == 20_000
    router.plan = Plan(1, 7_000)
    router.later(1.0)
    assert router.applied[-1].threshold_tokens == 7_000


def test_what_an_operator_pins_overrules():
    """Threshold and mode, until they are unpinned."""
    router = fast(*TRIO)
    router.pin = Pinned(threshold_tokens=5)
    router.later(1.5)
    assert (router.applied[-1].threshold_tokens, router.applied[-1].reason) == (5, ThresholdReason.PINNED)
    router.pin = Pinned(mode=Mode.ALWAYS)
    router.later(1.0)
    assert router.applied[-1].mode is Mode.ALWAYS
    router.pin = Pinned()
    router.later(1.0)
    assert (router.applied[-1].threshold_tokens, router.applied[-1].mode) == (20_000, Mode.AUTO)


def test_a_region_that_falls_silent_gets_nothing_and_comes_back_by_itself():
    """Traffic stays local while the other region is not heard of, and this one is."""
    router = fast(*TRIO)
    router.later(6.0)
    router.silent = frozenset({"p0"})
    router.later(6.0)
    assert (router.applied[-1].mode, router.applied[-1].reason) == (Mode.NEVER, ThresholdReason.LINK_DOWN)
    router.silent = frozenset()
    router.later(1.0)
    assert router.applied[-1].mode is Mode.AUTO


def test_field_K1_an_outage_of_the_store_says_nothing_about_the_link():
    """When nobody is heard it is the store; and when all come back, the other region may be the last."""
    router = fast(*TRIO)
    router.later(6.0)
    router.silent = frozenset(each.id for each in TRIO)
    router.later(30.0)
    router.silent = frozenset({"p0"})
    router.later(2.0)
    router.silent = frozenset()
    router.later(5.0)
    assert {decision.mode for decision in router.applied} == {Mode.AUTO}


def test_field_K4_too_little_data_is_an_answer():
    """It is considered once per period, told to those who watch, and nothing is published."""
    router = slow(*TRIO)
    router.later(35.0)
    assert [outcome for _, outcome in router.rounds if isinstance(outcome, Hold)] == [
        outcome for _, outcome in router.rounds
    ]
    assert {outcome.reason for _, outcome in router.rounds if isinstance(outcome, Hold)} == {
        HoldReason.INSUFFICIENT_DATA
    }
    assert len(router.rounds) == 3 and router.published == []


def test_the_leader_publishes_under_the_next_epoch():
    """One more than any that is known, by the plan or by a worker, and for all PD nodes there are."""
    router = slow(node("p0", far=True), *(node(f"d{number}", 1.0 if number < 7 else 0.0) for number in range(8)))
    router.highest_epoch = 41
    router.arrive(per_s=2.0)
    router.later(10.5)
    [plan] = router.published
    assert plan.epoch == 42 and plan.reason
    assert set(plan.shares) == {f"d{number}" for number in range(8)}
    assert sum(plan.shares.values()) < 7, "with seven of eight prefilling, decode is the limit"


def test_what_is_under_way_is_looked_at_sooner():
    """A change waits to be confirmed for a part of the period, not for a whole one, and so do its further steps."""
    nodes = (node("p0", far=True), *(node(f"d{number}", 1.0 if number < 7 else 0.0) for number in range(8)))
    router = slow(*nodes, rebalance=replace(EAGER, agreeing_rounds=2))
    router.arrive(per_s=2.0)
    router.later(17.0)
    (first_at, first), (second_at, second), (third_at, _) = router.rounds
    assert isinstance(first, Hold) and first.reason is HoldReason.UNCONFIRMED and isinstance(second, Proposal)
    assert first_at == PARAMS.slow_period_s and second_at - first_at == third_at - second_at == 3.0
    router.nodes = tuple(
        node(each.id, router.published[-1].shares.get(each.id, 1.0), far=each.id == "p0") for each in nodes
    )
    router.later(600.0)
    at_rest = [later - earlier for (earlier, _), (later, _) in pairwise(router.rounds[-4:])]
    assert at_rest == [PARAMS.slow_period_s] * 3


def test_a_router_that_does_not_lead_publishes_nothing():
    """And when it comes to lead it watches for a period first."""
    router = slow(*(node(f"d{number}", 1.0 if number < 7 else 0.0) for number in range(8)), leading=False)
    router.arrive(per_s=2.0)
    router.later(55.0)
    assert router.rounds == [] and router.published == []
    router.leading = True
    router.later(8.0)
    assert router.rounds == []
    router.later(4.0)
    assert len(router.rounds) == 1


def test_a_plan_that_the_store_has_lost_is_published_again():
    """At once, as it was, under an epoch that no worker has seen; and once."""
    router = slow(*TRIO)
    router.plan, router.highest_epoch = Plan(7, 9_000, {NodeId("d0"): 1.0}, "as it was"), 9
    router.lost = True
    router.later(5.0)
    assert router.published == [Plan(10, 9_000, {NodeId("d0"): 1.0}, "as it was")]


def test_who_has_left_is_not_planned_for():
    """Those there are keep what was planned for them, or what they are."""
    router = Router(Kernel(seed=0), (node("d0", 0.0), node("d1", 1.0)))
    router.plan = Plan(1, 5_000, {NodeId("d0"): 0.5, NodeId("gone"): 1.0})
    assert planned_shares(router.view()) == {"d0": 0.5, "d1": 1.0}
    assert current_threshold(router.view(), 1) == 5_000
    assert current_threshold(replace(router.view(), plan=None), 1) == 1
