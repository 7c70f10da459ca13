"""Who may send how much of a line, and when that is said anew."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cluster import Budget, Egress, Node, NodeId, NodeLoad
from prfaas.scheduling.budget import Budgeter, BudgetParams, split
from tests.unit.scheduling.steering_scenes import FAR, NEAR, sending, view_of

LINE = 1000.0
PARAMS = BudgetParams()
SHARE = LINE * PARAMS.line_share
P0, P1, P2 = (NodeId(f"p{number}") for number in range(3))

backlogs = st.dictionaries(
    st.integers(0, 40).map(lambda number: NodeId(f"p{number}")), st.floats(0, 1e15), min_size=1, max_size=30
)


@given(backlogs, st.floats(1, 1e12), st.floats(0, 0.2))
def test_parts_add_up_and_none_is_below_the_floor(waiting, total, floor):
    """With more nodes than floors fit, all get the same at least."""
    parts = split(total, waiting, floor)
    assert parts.keys() == waiting.keys()
    assert math.fsum(parts.values()) == pytest.approx(total)
    least = total * min(floor, 1 / len(parts))
    assert all(part >= least * (1 - 1e-9) for part in parts.values())


@given(backlogs, st.floats(0, 1e15), st.data())
def test_who_waits_with_more_does_not_get_less(waiting, more, data):
    """Neither than another node, nor than before."""
    parts = split(LINE, waiting, PARAMS.floor)
    ranked = sorted(waiting, key=lambda node: waiting[node])
    for less, greater in itertools.pairwise(ranked):
        assert parts[less] <= parts[greater] * (1 + 1e-9)
    node = data.draw(st.sampled_from(sorted(waiting)))
    grown = split(LINE, {**waiting, node: waiting[node] + more}, PARAMS.floor)
    # Where nothing waits at all everybody has the same, which is more than in proportion.
    assert grown[node] >= parts[node] * (1 - 1e-9)


def test_parts_are_in_proportion_above_the_floor():
    """One small backlog gets the floor, and the others share the rest as 1 to 3."""
    parts = split(100.0, {P0: 1.0, P1: 100.0, P2: 300.0}, 0.05)
    assert parts == {P0: pytest.approx(5.0), P1: pytest.approx(95 / 4), P2: pytest.approx(95 * 3 / 4)}


def budgeter(line: float = LINE) -> Budgeter:
    return Budgeter({(FAR, NEAR): line}, PARAMS)


def told(made: Budgeter, now: float, *nodes: Node) -> Budget | None:
    """What is published in this round, if anything."""
    due = made.due(view_of(*nodes), now)
    for each in due:
        made.published(each, now)
    made.check()
    return due[0] if due else None


def test_who_sends_alone_may_use_the_share():
    """So may whoever begins before the next round: nobody is held back for a backlog that is not there."""
    made = budgeter()
    assert told(made, 0.0, sending("p0", sent=900.0, queued=9000), sending("p1", sent=0.0)) == Budget(FAR, NEAR, SHARE)


def test_two_that_send_split_the_share_by_their_backlogs():
    """A third node that is idle takes nothing away, and those in the target's own region are not asked."""
    made = budgeter()
    nodes = (sending("p0", sent=0.0, queued=3000), sending("p1", sent=0.0, queued=1000), sending("p2", sent=0.0))
    here = replace(sending("d0", sent=500.0, queued=5000), region=NEAR)
    budget = told(made, 0.0, *nodes, here)
    assert budget is not None and budget.bytes_per_s == SHARE
    assert budget.nodes == {P0: pytest.approx(SHARE * 3 / 4), P1: pytest.approx(SHARE / 4)}


@pytest.mark.parametrize(("jitter", "most"), [(0.1, 20), (0.2, 40)])
def test_noise_is_not_worth_a_record(jitter, most):
    """Backlogs that jitter by a tenth around their mean cause a record per repetition and no more, and by a fifth one
    in five rounds at most."""
    made, chance, records = budgeter(), random.Random(3), 0
    for second in range(200):
        queued = [round(4000 * chance.uniform(1 - jitter, 1 + jitter)) for _ in range(2)]
        nodes = [sending(f"p{number}", sent=300.0, queued=each) for number, each in enumerate(queued)]
        records += told(made, float(second), *nodes) is not None
    assert records <= most


def test_what_is_repeated_is_what_is_in_force():
    """Also when a small change would have made another one of it."""
    made = budgeter()
    first = told(made, 0.0, sending("p0", sent=0.0, queued=1000), sending("p1", sent=0.0, queued=1000))
    slightly = (sending("p0", sent=0.0, queued=1100), sending("p1", sent=0.0, queued=1000))
    assert told(made, 1.0, *slightly) is None
    assert told(made, PARAMS.repeat_s, *slightly) == first


def test_a_backlog_counts_at_once_and_fades():
    """A node that bursts has its part in the next round; one that has finished keeps a part for a moment only."""
    made = budgeter()
    told(made, 0.0, sending("p0", sent=900.0, queued=9000), sending("p1", sent=0.0))
    both = told(made, 1.0, sending("p0", sent=900.0, queued=9000), sending("p1", sent=0.0, queued=9900))
    assert both is not None and both.nodes[P1] == pytest.approx(SHARE / 2)
    ended = [
        told(made, float(second), sending("p0", sent=900.0, queued=9000), sending("p1", sent=0.0))
        for second in range(2, 60)
    ]
    changes = [each for each in ended if each is not None]
    assert changes[0].nodes and changes[-1].nodes == {}


def test_without_a_known_line_nobody_is_held_back():
    """Nothing configured, or nonsense."""
    for lines in ({}, {(FAR, NEAR): math.nan}, {(FAR, NEAR): 0.0}, {(FAR, NEAR): math.inf}):
        assert Budgeter(lines).due(view_of(sending("p0", sent=1.0, queued=9)), 0.0) == ()


reports = st.lists(
    st.tuples(st.integers(0, 3), st.one_of(st.floats(), st.floats(0, 1e9)), st.integers(-5, 10**9), st.integers(0, 20)),
    max_size=40,
)


@given(reports)
def test_whatever_is_reported_a_budget_is_sane(events):
    """NaN, infinity and negative numbers; nodes that come and go."""
    made, now, loads = budgeter(), 0.0, dict[str, Node]()
    for number, sent, queued, wait in events:
        now += wait
        egress = Egress(NEAR, queued_bytes=queued, sent_bytes_per_s=sent)
        name = f"p{number}"
        loads[name] = replace(sending(name, sent=0.0), load=NodeLoad(egress=(egress,)))
        if queued % 7 == 0:
            loads.pop(name)
        budget = told(made, now, *loads.values())
        if budget is not None and budget.nodes:
            assert math.fsum(budget.nodes.values()) == pytest.approx(SHARE)
            assert all(PARAMS.floor * SHARE <= part * (1 + 1e-9) for part in budget.nodes.values())
