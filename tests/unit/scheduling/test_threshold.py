"""The fast loop: t leaves the plan's only for a reason, as far as needed, and comes back."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.cluster import LinkState
from prfaas.profile import GBPS
from prfaas.request import Mode
from prfaas.scheduling.demand import DemandSnapshot
from prfaas.scheduling.routing import RoutingParams
from prfaas.scheduling.signals import Signals
from prfaas.scheduling.threshold import ThresholdController, ThresholdDecision, ThresholdParams, ThresholdReason
from tests.unit.scheduling.steering_scenes import FAR, NEAR, PLAN_T, PROFILES, demand, link

DEMANDS = {rate: demand(rate) for rate in (1.0, 1.5, 2.0, 2.5, 6.0)}


def signals(gbps: float | None = 100, rate: float = 1.5, **changed: Any) -> Signals:
    """Four remote nodes and three local ones, as in the case study."""
    usual: dict[str, Any] = {
        "plan_threshold_tokens": PLAN_T,
        "link": link(gbps),
        "demand": DEMANDS[rate],
        "remote_profile": PROFILES["h200"],
        "remote_nodes": 4.0,
        "local_profile": PROFILES["h20"],
        "local_nodes": 3.0,
    }
    return Signals(**(usual | changed))


def settled(controller: ThresholdController, given: Signals, *, rounds: int = 30, start: int = 0) -> ThresholdDecision:
    for second in range(start, start + rounds):
        decision = controller.update(given, float(second))
        controller.check()
    return decision


def test_with_room_everywhere_the_plan_holds():
    """At 100 Gbps the link has eightfold slack."""
    decision = settled(ThresholdController(), signals())
    assert (decision.threshold_tokens, decision.mode, decision.reason) == (PLAN_T, Mode.AUTO, ThresholdReason.PLAN)
    assert decision.link_use is not None and decision.link_use < 0.1


def test_a_narrow_link_raises_t_with_the_very_next_report():
    """The predicted egress fits what is usable, with the aim's room."""
    controller = ThresholdController()
    settled(controller, signals(100))
    decision = controller.update(signals(6), 30.0)
    assert decision.reason is ThresholdReason.LINK_PRESSED and decision.threshold_tokens > PLAN_T
    assert decision.link_use is not None and decision.link_use <= 0.9
    assert decision.usable_bytes_per_s == pytest.approx(0.95 * 6 * GBPS)
    assert decision.egress_bytes_per_s is not None and decision.egress_bytes_per_s < 0.95 * 6 * GBPS


def test_field_L1_t_moves_with_the_load():
    """A threshold that suits one load is wrong for another: at 6 Gbps 1 req/s fits with the plan's t, 1.5 do not."""
    controller = ThresholdController()
    assert settled(controller, signals(6, 1.0)).threshold_tokens == PLAN_T
    assert settled(controller, signals(6, 1.5), start=30).threshold_tokens > 1.2 * PLAN_T
    assert settled(controller, signals(6, 1.0), start=60).threshold_tokens == PLAN_T


def test_t_comes_back_when_the_link_is_good_again():
    """After the calm reports, all the way."""
    controller = ThresholdController()
    high = settled(controller, signals(3, 1.0)).threshold_tokens
    assert high > 1.5 * PLAN_T
    assert settled(controller, signals(100, 1.0), rounds=5, start=30).threshold_tokens == high
    later = settled(controller, signals(100, 1.0), rounds=10, start=35)
    assert (later.threshold_tokens, later.reason) == (PLAN_T, ThresholdReason.PLAN)


def test_a_queue_on_the_link_leaves_less_of_it():
    """What waits has to go as well as what comes."""
    without = settled(ThresholdController(), signals(6, 1.0))
    waiting = settled(ThresholdController(), signals(link=link(6, queued_bytes=5 << 30), rate=1.0))
    assert waiting.usable_bytes_per_s < without.usable_bytes_per_s
    assert waiting.threshold_tokens > without.threshold_tokens == PLAN_T


def test_no_more_is_moved_here_than_the_local_nodes_can_take():
    """Where nothing fits, the worst pressure is as small as it can be: the sides are pressed alike."""
    decision = settled(ThresholdController(), signals(2, 2.5))
    assert decision.link_use == pytest.approx(decision.local_use, rel=0.1)
    assert decision.threshold_tokens < 131_072


def test_a_remote_backlog_keeps_work_here():
    """Prefill queues count like the link's. Not at once: three reports must agree."""
    controller = ThresholdController()
    settled(controller, signals(rate=2.0))
    busy = signals(rate=2.0, remote_backlog_s=60.0, local_nodes=6.0)
    assert controller.update(busy, 30.0).threshold_tokens == PLAN_T
    decision = settled(controller, busy, rounds=3, start=31)
    assert decision.threshold_tokens > PLAN_T and decision.reason is ThresholdReason.REMOTE_PRESSED


def test_a_local_backlog_sends_work_away():
    """t may fall below the plan's when the other region has room."""
    decision = settled(ThresholdController(), signals(rate=2.0, local_backlog_s=60.0, remote_nodes=8.0))
    assert decision.threshold_tokens < PLAN_T and decision.reason is ThresholdReason.LOCAL_PRESSED


def test_an_ordinary_queue_moves_nothing():
    """A loaded stage has one."""
    decision = settled(ThresholdController(), signals(rate=2.0, remote_backlog_s=8.0, local_backlog_s=8.0))
    assert decision.reason is ThresholdReason.PLAN


def test_raising_t_a_little_is_not_a_remedy_where_phi_rises():
    """With busy nodes and a KV that grows faster than prefill takes, a slightly higher t means more on the link. The
    controller goes by the model: it looks for a t that fits, past the hump."""
    from prfaas.curve import Curve
    from prfaas.scheduling.lengths import Lengths
    from prfaas.scheduling.pressure import PressureModel, Supply

    growing = replace(PROFILES["h200"], kv=Curve.through([(0.0, 0.0), (32_768.0, 2e8), (131_072.0, 6e9)]))
    given = signals(14, 6.0, remote_profile=growing, remote_nodes=4.0, local_nodes=60.0)
    lengths = DEMANDS[6.0].lengths(30)
    assert isinstance(lengths, Lengths)
    model, supply = PressureModel.of(lengths, growing, PROFILES["h20"]), Supply(
        remote_nodes=4, local_nodes=60, link_bytes_per_s=0.95 * 14 * GBPS
    )  # fmt: skip
    rate = DEMANDS[6.0].arrivals_per_s
    before, slogan = model.at(PLAN_T, rate, supply), model.at(round(1.25 * PLAN_T), rate, supply)
    assert before.remote > 1 and slogan.egress_bytes_per_s > before.egress_bytes_per_s
    decision = settled(ThresholdController(), given)
    assert decision.link_use is not None and decision.link_use <= 0.9
    assert decision.remote_use is not None and decision.remote_use <= 0.9


def test_a_new_plan_is_a_new_beginning():
    """It was made with what has been seen meanwhile."""
    controller = ThresholdController()
    settled(controller, signals(3))
    assert settled(controller, signals(100, plan_threshold_tokens=12_000), rounds=1).threshold_tokens == 12_000


def test_field_L4_both_bounds_hold():
    """Always here up to t_min, always there above t_force, whatever is pressed."""
    bounded = ThresholdParams(t_min=10_000, t_force=30_000)
    assert settled(ThresholdController(bounded), signals(2)).threshold_tokens == 30_000
    assert settled(ThresholdController(bounded), signals(plan_threshold_tokens=500)).threshold_tokens == 10_000
    assert settled(ThresholdController(bounded), signals(plan_threshold_tokens=90_000)).threshold_tokens == 30_000


@pytest.mark.parametrize("mode", [Mode.ALWAYS, Mode.NEVER])
def test_the_mode_is_somebodys_choice(mode):
    """Configured or pinned, it overrules the loop, also when the link is down."""
    assert settled(ThresholdController(ThresholdParams(mode=mode)), signals()).mode is mode
    pinned = settled(ThresholdController(), signals(pinned_mode=mode, unreachable=True))
    assert (pinned.mode, pinned.reason) == (mode, ThresholdReason.MODE)


def test_a_pinned_threshold_stays_where_it_is():
    """Until it is unpinned; the loop goes on underneath."""
    controller = ThresholdController()
    pinned = settled(controller, signals(6, pinned_threshold_tokens=777))
    assert (pinned.threshold_tokens, pinned.reason) == (777, ThresholdReason.PINNED)
    assert controller.update(signals(6), 30.0).threshold_tokens > PLAN_T


def test_an_unreachable_region_gets_nothing():
    """Within one report, and again as soon as it is heard of."""
    controller = ThresholdController()
    settled(controller, signals())
    down = controller.update(signals(unreachable=True, link=link(100, age_s=4.0)), 30.0)
    assert (down.mode, down.reason) == (Mode.NEVER, ThresholdReason.LINK_DOWN)
    assert controller.update(signals(), 31.0).mode is Mode.AUTO


BROKEN: dict[str, Any] = {
    "no link": {"link": None},
    "a stale link": {"link": link(100, age_s=60.0)},
    "an age that is no number": {"link": link(100, age_s=math.nan)},
    "a capacity that is no number": {"link": link(math.nan)},
    "a negative capacity": {"link": link(-5)},
    "a negative queue": {"link": link(100, queued_bytes=-1)},
    "no demand": {"demand": None},
    "a rate that is no number": {"demand": replace(DEMANDS[1.5], arrivals_per_s=math.nan)},
    "too little demand": {"demand": demand(0.03)},
    "no remote profile": {"remote_profile": None},
    "no local profile": {"local_profile": None},
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_a_missing_signal_never_lowers_t(broken):
    """Raised for a narrow link, t stays; at the plan's it stays there; below it, it goes back to it."""
    raised = ThresholdController()
    high = settled(raised, signals(3)).threshold_tokens
    assert settled(raised, signals(**broken), start=30).threshold_tokens == high > PLAN_T
    assert settled(ThresholdController(), signals(**broken)).threshold_tokens == PLAN_T
    lowered = ThresholdController()
    low = settled(lowered, signals(rate=2.0, local_backlog_s=60.0, remote_nodes=8.0)).threshold_tokens
    assert low < PLAN_T
    assert settled(lowered, signals(**broken), start=30).threshold_tokens == PLAN_T


def test_a_capacity_that_is_not_known_presses_nothing():
    """A fresh report without one means that nothing has been backlogged for long: t may come back."""
    controller = ThresholdController()
    settled(controller, signals(3))
    assert settled(controller, signals(None), start=30).threshold_tokens == PLAN_T


@pytest.mark.parametrize("gbps", [2.5, 6.0, 7.2])
def test_noise_does_not_move_t(gbps):
    """Ten minutes of a link that is measured 15 % wrong either way, near and far from the limit: it finds its place."""
    chance, controller, changes, t = random.Random(3), ThresholdController(), 0, PLAN_T
    for second in range(600):
        decision = controller.update(signals(gbps * chance.uniform(0.85, 1.15)), float(second))
        changes, t = changes + (decision.threshold_tokens != t), decision.threshold_tokens
    assert changes <= 4


def test_noise_in_demand_and_queues_does_not_move_t():
    """Poisson arrivals at 1.5 req/s and backlogs that come and go."""
    chance, controller, changes, t = random.Random(5), ThresholdController(), 0, PLAN_T
    for second in range(600):
        seen = replace(DEMANDS[1.5], arrivals_per_s=1.5 * chance.uniform(0.75, 1.25))
        given = signals(
            20, demand=seen, remote_backlog_s=chance.expovariate(1 / 4), local_backlog_s=chance.expovariate(1 / 4)
        )
        decision = controller.update(given, float(second))
        changes, t = changes + (decision.threshold_tokens != t), decision.threshold_tokens
    assert changes == 0


def test_a_step_down_and_up_is_two_moves():
    """100 -> 3 -> 100 Gbps: up once, and back once; t does not hunt."""
    controller, moves, t = ThresholdController(), [], PLAN_T
    for second in range(300):
        decision = controller.update(signals(3 if 100 <= second < 200 else 100, 1.0), float(second))
        if decision.threshold_tokens != t:
            moves.append((second, decision.threshold_tokens > t))
            t = decision.threshold_tokens
    assert [up for _, up in moves] == [True, False]
    assert moves[0][0] == 100 and moves[1][0] <= 210


@given(st.floats(0.2, 120), st.floats(0.2, 120), st.integers(0, 1 << 34), st.integers(0, 1 << 34))
@settings(deadline=None, max_examples=60)
def test_a_worse_link_never_means_a_lower_t(one, other, few, many):
    """Monotone in capacity and in what is queued."""
    (narrow, wide), (little, much) = sorted((one, other)), sorted((few, many))
    worse = ThresholdController().update(signals(link=link(narrow, queued_bytes=much)), 0.0)
    better = ThresholdController().update(signals(link=link(wide, queued_bytes=little)), 0.0)
    assert worse.threshold_tokens >= better.threshold_tokens


odd = st.one_of(st.none(), st.floats())


@given(st.lists(st.tuples(odd, st.integers(-5, 1 << 40), st.floats(), odd, odd, st.floats(), st.floats()), max_size=20))
@settings(deadline=None, max_examples=60)
def test_whatever_comes_in_t_stays_within_its_bounds(rounds):
    """Any float at all, in any signal."""
    controller = ThresholdController(ThresholdParams(t_min=100, t_force=50_000))
    for second, (capacity, queued, age, far, near, rate, nodes) in enumerate(rounds):
        given = signals(
            link=LinkState(FAR, NEAR, capacity_bytes_per_s=capacity, queued_bytes=queued, age_s=age),
            remote_backlog_s=far,
            local_backlog_s=near,
            demand=DemandSnapshot(counts=DEMANDS[1.0].counts, arrivals_per_s=rate, output_tokens=rate),
            remote_nodes=nodes,
            local_nodes=nodes,
        )
        decision = controller.update(given, float(second))
        controller.check()
        assert 100 <= decision.threshold_tokens <= 50_000


def test_the_decision_goes_into_the_routing():
    """With what the queues are like."""
    decision = settled(ThresholdController(), signals(6))
    routing = decision.applied(RoutingParams(threshold_tokens=1, ttft_slo_s=3.0))
    assert (routing.threshold_tokens, routing.mode, routing.ttft_slo_s) == (decision.threshold_tokens, Mode.AUTO, 3.0)
    assert routing.short_tokens is not None and routing.long_tokens is not None
    assert routing.short_tokens < decision.threshold_tokens < routing.long_tokens
    assert routing.output_tokens == pytest.approx(1024)
