"""The slow loop: roles follow demand in small, confirmed steps, and nothing else moves them."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from prfaas.cluster import ClusterView, Incarnation, LinkState, Namespace, Node, NodeId, NodeLoad, Plan, Role
from prfaas.profile import GBPS
from prfaas.scheduling.histogram import LengthCounts
from prfaas.scheduling.planner import Roles
from prfaas.scheduling.rebalance import Hold, HoldReason, Observation, Proposal, RebalanceParams, Rebalancer
from tests.unit.scheduling.steering_scenes import PLAN_T, PROFILES, case_study, demand, link, node, view_of

PERIOD_S = 120.0
USUAL = demand(2.5)
LONG = demand(2.5, mu=10.6)
SHORT = demand(2.5, mu=8.6)


def converted(each: Node, share: float) -> Node:
    role = Role.PREFILL if share >= 1 else Role.DECODE if share <= 0 else Role.MIXED
    return replace(each, role=role, prefill_share=share)


class Scene:
    """A cluster that carries plans out, and the leader's rounds over it."""

    def __init__(self, view: ClusterView, params: RebalanceParams = RebalanceParams()) -> None:  # noqa: B008
        self.view, self.rebalancer = view, Rebalancer(params)
        self.now, self.t, self.flips = 0.0, PLAN_T, 0
        self.obeys = True

    def observation(self, **changed: Any) -> Observation:
        usual: dict[str, Any] = {
            "view": self.view,
            "model": "m",
            "demand": USUAL,
            "profiles": PROFILES,
            "threshold_tokens": self.t,
            "link": link(100),
        }
        return Observation(**(usual | changed))

    def round(self, **changed: Any) -> Proposal | Hold:
        outcome = self.rebalancer.consider(self.observation(**changed), self.now)
        self.rebalancer.check()
        self.now += PERIOD_S
        if isinstance(outcome, Proposal):
            self.carry_out(outcome)
        return outcome

    def carry_out(self, proposal: Proposal) -> None:
        self.t = proposal.threshold_tokens
        self.flips += len(proposal.converts)
        epoch = 1 + (self.view.plan.epoch if self.view.plan is not None else 0)
        self.view = replace(self.view, plan=Plan(epoch, self.t, proposal.shares))
        if self.obeys:
            self.become(proposal.shares)

    def become(self, shares: Mapping[NodeId, float]) -> None:
        nodes = {name: converted(each, shares[name]) if name in shares else each for name, each in self.nodes.items()}
        self.view = view_of(*nodes.values(), plan=self.view.plan)

    def report(self, **loads: NodeLoad) -> None:
        nodes = [replace(each, load=loads.get(name, each.load)) for name, each in self.nodes.items()]
        self.view = view_of(*nodes, plan=self.view.plan)

    @property
    def nodes(self) -> dict[NodeId, Node]:
        return dict(self.view.nodes)

    def rounds(self, count: int, **changed: Any) -> list[Proposal | Hold]:
        return [self.round(**changed) for _ in range(count)]

    def prefilling(self) -> int:
        return len(self.view.local_prefill)


def reasons(outcomes: list[Proposal | Hold]) -> list[HoldReason | None]:
    return [outcome.reason if isinstance(outcome, Hold) else None for outcome in outcomes]


#: Steps are easier to follow one by one.
ONE_BY_ONE = RebalanceParams(converting_share=0.125)


def warm(n_p: int, n_d: int, params: RebalanceParams = ONE_BY_ONE) -> Scene:
    """After the first round, in which every node is new."""
    scene = Scene(case_study(n_p, n_d), params)
    assert reasons([scene.round()]) == [HoldReason.WARM_UP]
    return scene


def test_the_papers_roles_are_kept():
    """3 and 5 is the best there is for this demand."""
    scene = warm(3, 5)
    assert set(reasons(scene.rounds(10))) == {HoldReason.HYSTERESIS} and scene.flips == 0


def test_wrong_roles_are_put_right_step_by_step():
    """One node at a time, each confirmed, and t with every step."""
    scene = warm(1, 7)
    first, second = scene.rounds(2)
    assert reasons([first]) == [HoldReason.UNCONFIRMED]
    assert isinstance(second, Proposal) and len(second.converts) == 1 and scene.prefilling() == 2
    assert second.lambda_max > second.current_lambda_max
    assert second.threshold_tokens < second.target_threshold_tokens
    scene.rounds(8)
    assert scene.prefilling() in (3, 4) and scene.flips in (2, 3)


def test_longer_prompts_make_nodes_prefill():
    """Twice the length: decode has less to do for each second of prefill."""
    scene = warm(3, 5)
    scene.rounds(3)
    scene.rounds(8, demand=LONG)
    assert scene.prefilling() > 3


def test_field_K5_a_step_in_demand_is_one_way():
    """Roles go to the new best and stay; back when demand is back. Nothing goes to and fro."""
    scene, prefilling = warm(3, 5), [3]
    for seen in (USUAL, LONG, USUAL):
        for _ in range(12):
            scene.round(demand=seen)
            if scene.prefilling() != prefilling[-1]:
                prefilling.append(scene.prefilling())
    turns = [after > before for before, after in pairwise(prefilling)]
    assert turns == sorted(turns, reverse=True), f"roles went {prefilling}"
    assert max(prefilling) > 3 and prefilling[-1] in (3, 4)


@pytest.mark.parametrize("seed", range(4))
def test_field_K5_noise_flips_nothing(seed):
    """Two hours of demand as a router would measure it, wrong by what a few hundred requests leave open."""
    chance, scene = random.Random(seed), warm(3, 5)
    for _ in range(60):
        noisy = demand(2.5, mu=9.90 + chance.gauss(0, 0.04), seed=chance.randrange(1000), watched_s=240.0)
        scene.round(demand=replace(noisy, output_tokens=1024 * chance.uniform(0.95, 1.05)))
    assert scene.flips <= 1


def test_field_K5_a_change_is_not_undone_within_the_dwell_time():
    """Demand that swings back and forth faster than that moves roles one way at most."""
    scene = warm(3, 5, RebalanceParams(dwell_s=3600.0, agreeing_rounds=1, change_costs=0.0))
    scene.now += 3600.0
    outcomes = [scene.round(demand=LONG if number % 2 else SHORT) for number in range(20)]
    directions = {
        change.after > change.before for each in outcomes if isinstance(each, Proposal) for change in each.converts
    }
    assert len(directions) == 1 and HoldReason.DWELL in reasons(outcomes)


def test_going_on_the_same_way_does_not_wait_for_the_dwell_time():
    """Steps towards one target are one change."""
    scene = warm(1, 7, replace(ONE_BY_ONE, dwell_s=1000.0, change_costs=0.0))
    scene.now += 1000.0
    assert [isinstance(each, Proposal) for each in scene.rounds(3)] == [False, True, True]


@pytest.mark.parametrize(
    "lacking",
    [
        {"demand": None},
        {"demand": demand(0.1)},
        {"demand": demand(2.5, output=None)},
        {"demand": replace(USUAL, arrivals_per_s=float("nan"))},
        {"profiles": {}},
        {"link": link(float("nan"))},
        {"view": ClusterView()},
    ],
    ids=["no demand", "few requests", "nothing finished", "a rate that is no number", "no profile", "link", "no nodes"],
)
def test_field_K4_too_little_data_is_an_answer_of_its_own(lacking):
    """Roles are wrong and would change; without data they do not, and the answer says what is lacking."""
    scene = warm(1, 7)
    outcomes = scene.rounds(5, **lacking)
    assert set(reasons(outcomes)) == {HoldReason.INSUFFICIENT_DATA}
    assert all(isinstance(outcome, Hold) and outcome.detail for outcome in outcomes)


def test_field_K4_what_cold_nodes_report_is_not_believed():
    """Nodes that have just started look idle, or stalled. They count as nodes, but not as witnesses."""

    def correction(*, cold: bool) -> float:
        scene = warm(3, 5)
        stalled = NodeLoad(prefill_busy_ratio=1.0)
        scene.report(**{f"d{index}": stalled for index in range(3)})
        if cold:
            restarted = [
                replace(each, incarnation=Incarnation(99)) if name in ("d0", "d1", "d2") else each
                for name, each in scene.nodes.items()
            ]
            scene.view = view_of(*restarted)
        scene.round(demand=demand(1.0))
        return scene.rebalancer.correction.prefill

    assert correction(cold=False) > 1.2
    assert correction(cold=True) == 1.0


def test_a_wrong_profile_is_corrected_by_what_stages_report():
    """Prefill here is busier than the profile says: it takes longer, so more nodes are to do it."""
    scene = warm(3, 5)
    seen = demand(1.5)
    busy = {f"d{index}": NodeLoad(prefill_busy_ratio=0.95) for index in range(3)}
    scene.report(**busy)
    scene.rounds(6, demand=seen)
    assert scene.rebalancer.correction.prefill > 1.5
    assert scene.prefilling() > 3


def test_a_large_gain_is_taken_sooner_than_a_small_one():
    """From 1 and 7 after two rounds; for the few percent of a mixed node after more."""
    far_off, close = warm(1, 7), warm(3, 5, RebalanceParams(roles=Roles.MIXED))
    waited = [[isinstance(each, Proposal) for each in scene.rounds(8)].index(True) for scene in (far_off, close)]
    assert waited[0] == 1 < waited[1] < 5


def test_a_gain_that_is_too_small_moves_nobody():
    """4 and 4 is about one percent worse than 3 and 5."""
    scene = warm(4, 4)
    assert all(not isinstance(each, Proposal) or not each.converts for each in scene.rounds(8))


def test_one_conversion_at_a_time():
    """The next step waits until the node has become what it should."""
    scene = warm(1, 7)
    scene.obeys = False
    outcomes = scene.rounds(4)
    assert reasons(outcomes) == [HoldReason.UNCONFIRMED, None, HoldReason.CONVERTING, HoldReason.CONVERTING]
    proposal = outcomes[1]
    assert isinstance(proposal, Proposal)
    scene.become(proposal.shares)
    assert isinstance(scene.round(), Proposal)


def test_a_quarter_of_the_nodes_may_convert_at_once():
    """More nodes, more of them: the way to a better plan is as long for any cluster."""
    scene = warm(1, 7, RebalanceParams())
    _, proposal = scene.rounds(2)
    assert isinstance(proposal, Proposal) and len(proposal.converts) == 2


def test_a_node_that_drains_on_its_way_still_belongs_to_the_cluster():
    """It serves nobody for a moment; that is no reason to plan for fewer nodes."""
    scene = warm(1, 7)
    scene.obeys = False
    _, proposal = scene.rounds(2)
    assert isinstance(proposal, Proposal)
    scene.report(**{change.node: NodeLoad(draining=True) for change in proposal.converts})
    assert reasons(scene.rounds(2)) == [HoldReason.CONVERTING] * 2


def test_a_node_that_never_converts_does_not_stop_the_rest():
    """After the timeout it is taken for what it is, and another one is asked."""
    scene = warm(1, 7, replace(ONE_BY_ONE, convert_timeout_s=500.0))
    scene.obeys = False
    _, stuck = scene.rounds(2)
    assert isinstance(stuck, Proposal)
    outcomes = scene.rounds(8)
    assert reasons(outcomes)[:3] == [HoldReason.CONVERTING] * 3
    other = next(each for each in outcomes if isinstance(each, Proposal))
    (asked,), (again,) = stuck.converts, other.converts
    assert again.node != asked.node and other.shares[asked.node] == asked.before


def test_field_K6_only_nodes_of_the_pool_are_chosen():
    """Another model, another namespace and the remote nodes are never converted; ids decide between equals."""
    others = [
        replace(node("a0", Role.DECODE), model="other"),
        replace(node("a1", Role.DECODE), namespace=Namespace("elsewhere")),
        node("a2", Role.DECODE, load=NodeLoad(draining=True)),
    ]
    scene = Scene(view_of(*case_study(1, 7).nodes.values(), *others), ONE_BY_ONE)
    scene.rounds(2)
    proposal = scene.round()
    assert isinstance(proposal, Proposal)
    assert [change.node for change in proposal.converts] == ["d1"]
    assert set(proposal.shares) == {f"d{index}" for index in range(8)}


def test_the_least_loaded_node_is_converted():
    scene = warm(1, 7)
    scene.report(**{f"d{index}": NodeLoad(committed_tokens=1000 * index) for index in (1, 2, 3)})
    _, proposal = scene.rounds(2)
    assert isinstance(proposal, Proposal) and [change.node for change in proposal.converts] == ["d4"]


def test_mixed_roles_close_the_gap():
    """One node shares its time where that gains enough."""
    scene = warm(3, 5, RebalanceParams(roles=Roles.MIXED))
    scene.rounds(8)
    shares = sorted((each.share for name, each in scene.nodes.items() if name.startswith("d")), reverse=True)
    assert shares[:3] == [1.0] * 3 and 0 < shares[3] < 1 and shares[4:] == [0.0] * 4
    assert scene.flips == 1


def test_a_threshold_that_does_not_suit_the_roles_is_put_right():
    """Without a conversion, when several rounds agree."""
    scene = warm(3, 5)
    scene.t = 60_000
    outcomes = scene.rounds(3)
    assert reasons(outcomes) == [HoldReason.HYSTERESIS, None, HoldReason.HYSTERESIS]
    assert 15_000 < scene.t < 25_000 and scene.flips == 0


def test_a_narrow_link_is_planned_for():
    """At 4 Gbps more is prefilled here, so more nodes do it."""
    scene = warm(3, 5)
    scene.rounds(12, link=link(4))
    assert scene.prefilling() >= 5 and scene.t > 35_000


def test_a_cluster_without_the_other_region_is_planned_alone():
    """Homogeneous PD: the paper's 12 nodes split 9 to 3."""
    scene = Scene(view_of(*(each for each in case_study(6, 6).nodes.values() if each.id.startswith("d"))))
    scene.rounds(14, demand=demand(2.0))
    assert scene.prefilling() in (8, 9) and scene.t >= 100_000


def test_a_single_node_is_left_in_peace():
    """Nobody could take its place."""
    scene = Scene(view_of(node("d0", Role.DECODE), *(node(f"p{i}", Role.PREFILL, far=True) for i in range(4))))
    assert all(not isinstance(each, Proposal) or not each.converts for each in scene.rounds(6))


def test_the_same_rounds_give_the_same_answers():
    """Nothing depends on the order of a set or of the nodes in the view."""

    def outcomes(order: int) -> list[Any]:
        view = case_study(1, 7)
        names = list(view.nodes)
        random.Random(order).shuffle(names)
        scene = Scene(replace(view, nodes={name: view.nodes[name] for name in names}))
        return [(type(each), getattr(each, "converts", None)) for each in scene.rounds(8)]

    assert outcomes(1) == outcomes(2)


def test_field_K5_a_second_of_noise_in_busy_ratios_flips_nothing():
    """Reports cover a second: a node is all busy or not at all. What counts is how busy it is over minutes."""
    scene, chance = Scene(case_study(3, 5)), random.Random(3)
    stages = {Role.PREFILL: 0.78, Role.DECODE: 0.33}
    for second in range(20 * int(PERIOD_S)):
        loads = {
            name: NodeLoad(
                prefill_busy_ratio=float(chance.random() < stages[Role.PREFILL]),
                decode_busy_ratio=chance.random() * 2 * stages[Role.DECODE],
            )
            for name in scene.nodes
        }
        scene.report(**loads)
        scene.rebalancer.see(scene.observation(), scene.t, float(second))
        if second % PERIOD_S == 0:
            scene.now = float(second)
            scene.round()
    assert scene.flips == 0


def watched(scene: Scene, seconds: int, states: Callable[[int], LinkState]) -> list[Proposal | Hold]:
    """A round every period, and a look at the link every second."""
    outcomes, start = [], int(scene.now)
    for second in range(start, start + seconds):
        state = states(second)
        scene.rebalancer.see(scene.observation(link=state), scene.t, float(second))
        if second % PERIOD_S == 50:
            scene.now = float(second)
            outcomes.append(scene.round(link=state))
    scene.now = float(start + seconds)
    return outcomes


def test_a_narrow_link_that_is_idle_for_a_moment_is_not_taken_for_a_wide_one():
    """Its capacity recovers in the estimate as soon as nothing waits for it, which is when the rounds look here."""
    scene = Scene(case_study(5, 3))
    queue = int(2 * GBPS)
    outcomes = watched(
        scene, 12 * int(PERIOD_S), lambda second: link(3, queued_bytes=queue) if second % 60 < 40 else link(100)
    )
    assert all(outcome.target_threshold_tokens > 40_000 for outcome in outcomes if isinstance(outcome, Proposal))
    assert scene.prefilling() >= 5


def test_a_few_bad_seconds_of_a_wide_link_convert_nobody():
    """Even when every round looks in the middle of them."""
    scene = Scene(case_study(3, 5))
    bad = link(3, queued_bytes=int(2 * GBPS))
    outcomes = watched(scene, 600, lambda second: bad if second in (48, 49, 50, 51, 290, 291) else link(100))
    assert scene.flips == 0 and set(reasons(outcomes)) == {HoldReason.WARM_UP, HoldReason.HYSTERESIS}


def test_a_gain_that_chance_may_have_made_is_not_taken():
    """The same lengths, seen in a hundred requests and in thousands: roles that would gain five percent by them."""
    many = demand(8.0, mu=10.04)
    few = replace(many, counts=LengthCounts(tuple(count * 110 / many.counts.total for count in many.counts.counts)))
    flips = []
    for seen in (few, many):
        scene = warm(3, 5)
        scene.rounds(12, demand=seen)
        flips.append(scene.flips)
    assert flips == [0, 1]


def test_going_back_costs_both_ways():
    """What is forgone has to add up to twice as much before a change that undoes one as before one that does not."""
    params = RebalanceParams(change_costs=5.0, dwell_s=PERIOD_S)

    def rounds_until_fewer_prefill(scene: Scene) -> int:
        prefilling, count = scene.prefilling(), 0
        while scene.prefilling() >= prefilling:
            scene.round()
            count += 1
        return count

    came = warm(5, 3, params)
    while came.prefilling() < 6:
        came.round(link=link(2), demand=LONG)
    been, returned = rounds_until_fewer_prefill(warm(6, 2, params)), rounds_until_fewer_prefill(came)
    assert been >= 2 and returned in (2 * been - 1, 2 * been)
