"""Own work that no report shows yet, over the fold's view."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prfaas.cluster import Busy, ClusterView, Node, NodeId, NodeLoad, Plan, Role
from prfaas.membership.ranking import Classes
from prfaas.request import NO_MATCHES, AttemptId, Request, RequestId, Sampling
from prfaas.scheduling.laid import Work
from prfaas.scheduling.overlay import Overlay
from prfaas.scheduling.routing import RoutingParams, choose
from tests.unit.scheduling.steering_scenes import NEAR, node

PARAMS = RoutingParams(threshold_tokens=1000)


def fold(*nodes: Node, plan: Plan | None = None) -> ClusterView:
    """As the fold makes it, all loads known."""
    classes = Classes(NEAR)
    for each in nodes:
        classes.place(each, load_known=True)
    return ClusterView(
        nodes={each.id: each for each in nodes},
        remote_prefill=classes.remote_prefill.ids(),
        local_prefill=classes.local_prefill.ids(),
        decode=classes.decode.ids(),
        plan=plan,
    )


def loaded(name: str, role: Role, *, far: bool = False, waiting: int = 0, running: int = 0, held: int = 0) -> Node:
    load = NodeLoad(queued_prefill_tokens=waiting, active_sequences=running, committed_tokens=held)
    return node(name, role, far=far, load=load)


FOUR = fold(
    *(loaded(f"p{i}", Role.PREFILL, far=True, waiting=10 * i) for i in range(4)),
    *(loaded(f"d{i}", Role.DECODE, running=i, held=100 * i) for i in range(4)),
)


def overlay(view: ClusterView = FOUR, now: float = 0.0) -> Overlay:
    """All nodes have reported just now."""
    made = Overlay(NEAR)
    for name in view.nodes:
        made.reported(name, now)
    return made


def load(view: ClusterView, name: str) -> NodeLoad:
    return view.loads.get(NodeId(name), view.nodes[NodeId(name)].load)


def charge(over: Overlay, attempt: str, prefill: str, decode: str, tokens: int, now: float) -> None:
    over.charge(AttemptId(attempt), NodeId(prefill), NodeId(decode), tokens, tokens + 50, 7 * tokens, now)


def test_a_charge_counts_at_once():
    """The prefill node's queue, the decode node's sequences, tokens and KV bytes; other nodes are as they were."""
    over = overlay()
    charge(over, "a", "p0", "d0", 100, 1.0)
    view = over.view(FOUR, 1.0)
    assert load(view, "p0").queued_prefill_tokens == 100
    taken = load(view, "d0")
    assert (taken.active_sequences, taken.committed_tokens, taken.decoding) == (1, 150, 0)
    assert tuple(view.remote_prefill) == ("p1", "p2", "p3", "p0")
    assert tuple(view.decode) == ("d1", "d0", "d2", "d3")
    assert view.nodes is FOUR.nodes and set(view.loads) == {"p0", "d0"}


def test_a_burst_within_one_report_is_spread():
    """Twenty requests see the same report; without the overlay all went to the same two nodes."""
    view = fold(*(loaded(f"p{i}", Role.PREFILL, far=True) for i in range(5)), loaded("d0", Role.DECODE))
    over, taken = overlay(view), []
    for number in range(20):
        request = Request(id=RequestId(str(number)), model="m", prompt=bytes(4 * 5000), sampling=Sampling(max_tokens=1))
        route = choose(request, NO_MATCHES, over.view(view, 1.0), PARAMS)
        charge(over, str(number), route.prefill, route.decode, route.prefill_tokens, 1.0)
        taken.append(route.prefill)
    assert {name: taken.count(name) for name in set(taken)} == {f"p{i}": 4 for i in range(5)}


def test_a_handed_over_prefill_frees_its_queue_and_takes_a_slot():
    """Between two reports as well."""
    over = overlay()
    charge(over, "a", "p0", "d0", 100, 1.0)
    over.prefilled(AttemptId("a"), 1.5)
    over.prefilled(AttemptId("a"), 1.6)
    view = over.view(FOUR, 1.5)
    assert load(view, "p0").queued_prefill_tokens == 0
    assert load(view, "d0").decoding == 1


@pytest.mark.parametrize("handed_over", [False, True])
def test_an_attempt_that_is_over_leaves_nothing(handed_over):
    """However often it is said, and however far it came."""
    over = overlay()
    charge(over, "a", "p0", "d0", 100, 1.0)
    if handed_over:
        over.prefilled(AttemptId("a"), 1.1)
    for _ in range(2):
        over.discharge(AttemptId("a"), 1.2)
    assert over.view(FOUR, 1.2) is FOUR


def test_what_a_report_shows_is_not_counted_twice():
    """A charge is in the next report; what ends after that is taken off it until the report after."""
    over = overlay()
    charge(over, "a", "p0", "d0", 100, 1.0)
    shown = fold(*(replace(each, load=replace(each.load, queued_prefill_tokens=100)) if each.id == "p0" else each
                   for each in FOUR.nodes.values()))  # fmt: skip
    over.reported(NodeId("p0"), 2.0)
    assert load(over.view(shown, 2.0), "p0").queued_prefill_tokens == 100
    over.prefilled(AttemptId("a"), 2.5)
    assert load(over.view(shown, 2.5), "p0").queued_prefill_tokens == 0


def test_a_report_does_not_show_what_is_still_under_way():
    """What was sent a moment before it came may not have been there when it was made."""
    over = overlay()
    charge(over, "a", "p0", "d0", 100, 1.95)
    over.reported(NodeId("p0"), 2.0)
    assert load(over.view(FOUR, 2.0), "p0").queued_prefill_tokens == 100
    over.reported(NodeId("p0"), 3.0)
    assert "p0" not in over.view(FOUR, 3.0).loads


def test_without_reports_own_work_still_counts():
    """A store outage must not send everything to one node: all are stale alike, own work orders them."""
    over = overlay()
    for number in range(40):
        charge(over, str(number), "p0", "d0", 1, float(number))
    view = over.view(FOUR, 100.0)
    assert load(view, "p0").queued_prefill_tokens == 40
    assert tuple(view.remote_prefill) == ("p1", "p2", "p3", "p0")
    over.check()


def test_a_node_not_heard_of_comes_last():
    """Its load is not known, so own work does not bring it forward again."""
    view = replace(FOUR, remote_prefill=tuple(map(NodeId, ("p1", "p2", "p3", "p0"))))  # the fold put p0 last
    over = overlay(view)
    for name in ("p1", "p2", "p3"):
        over.reported(NodeId(name), 20.0)
    for number, name in enumerate(("p0", "p3")):
        charge(over, str(number), name, "d0", 1, 21.0)
    assert tuple(over.view(view, 21.0).remote_prefill) == ("p1", "p2", "p3", "p0")


def test_nothing_falls_below_zero():
    """A restarted node reports nothing of what its old life had; the end of that is no credit."""
    over = overlay()
    charge(over, "a", "p0", "d0", 100, 1.0)
    for name in ("p0", "d0"):
        over.reported(NodeId(name), 2.0)
    over.discharge(AttemptId("a"), 2.5)
    left = load(over.view(FOUR, 2.5), "d0")
    assert (left.active_sequences, left.committed_tokens, left.kv_free_bytes) == (0, 0, 0)


def test_what_changes_without_a_report_shows_at_once():
    """A node that drains or has left is seen to, whatever own work it had."""
    over = overlay()
    charge(over, "a", "p0", "d0", 100, 1.0)
    over.view(FOUR, 1.0)
    leaving = replace(FOUR.nodes[NodeId("p0")], load=NodeLoad(draining=True))
    drained = fold(leaving, *(each for each in FOUR.nodes.values() if each.id != "p0"))
    assert "p0" not in tuple(over.view(drained, 1.1).remote_prefill)
    gone = fold(*(each for each in FOUR.nodes.values() if each.id != "p0"))
    assert "p0" not in over.view(gone, 1.2).nodes
    assert "p0" not in tuple(over.view(gone, 1.2).remote_prefill)


def test_the_plan_shows_through():
    plan = Plan(3, 500)
    over = overlay()
    charge(over, "a", "p0", "d0", 1, 1.0)
    assert over.view(replace(FOUR, plan=plan, highest_epoch=3), 1.0).plan is plan
    assert over.view(replace(FOUR, plan=plan, highest_epoch=3), 1.0).highest_epoch == 3


def test_a_view_that_was_handed_out_does_not_change():
    """Whoever holds it decides on what it was."""
    over = overlay()
    charge(over, "a", "p0", "d0", 100, 1.0)
    first = over.view(FOUR, 1.0)
    charge(over, "b", "p1", "d1", 500, 1.0)
    over.view(FOUR, 1.0)
    assert tuple(first.remote_prefill) == ("p1", "p2", "p3", "p0")
    assert load(first, "p1").queued_prefill_tokens == 10


def test_a_load_with_own_work_is_otherwise_the_one_reported():
    """No field is left out, or mistaken for another."""
    reported = NodeLoad(*range(100, 100 + len(fields(NodeLoad))))
    assert Work().onto(reported) == reported
    changed = replace(reported, queued_prefill_tokens=101, active_sequences=103, committed_tokens=105, decoding=111)
    assert Work(1, 2, 3, 0, 5).onto(reported) == changed
    assert Work(kv_bytes=50).onto(reported) == replace(reported, kv_free_bytes=53)


def test_a_role_that_changes_without_a_report_changes_the_class():
    """The node is found where it belongs now, once, though its own work was laid over where it was."""
    over = overlay()
    charge(over, "a", "d0", "d1", 100, 1.0)
    over.view(FOUR, 1.0)
    flipped = replace(FOUR.nodes[NodeId("d0")], role=Role.PREFILL)
    view = over.view(fold(flipped, *(each for each in FOUR.nodes.values() if each.id != "d0")), 1.1)
    assert tuple(view.local_prefill) == ("d0",)
    assert tuple(view.decode) == ("d2", "d1", "d3")


@pytest.mark.parametrize("times", [-3, -1, 0, 1, 3])
def test_how_busy_own_work_makes_a_node_follows_from_the_load_it_makes(times):
    """Both are floored alike, whichever counts are below what is taken away."""
    for decoding, active in ((0, 0), (2, 9), (9, 2)):
        reported = NodeLoad(250, active, 250, decoding=decoding, waiting_decodes=1, max_batch=20)
        for work in (Work(100 * times), Work(0, 4 * times, 100 * times), Work(0, 0, 0, 50, 4 * times)):
            assert work.busy(reported) == Busy.of(work.onto(reported))


def test_what_was_worked_out_from_another_load_is_found_out():
    """A decision never reads a load, only what follows from it."""
    over = overlay()
    charge(over, "a", "p0", "d0", 100, 1.0)
    view = over.view(FOUR, 1.0)
    view.check()
    over.check()
    with pytest.raises(AssertionError):
        replace(view, busy={**view.busy, NodeId("p0"): Busy.of(NodeLoad(99))}).check()


@dataclass
class CountedNodes(Mapping[NodeId, Node]):
    """Counts look-ups; walking over all nodes is an error."""

    nodes: Mapping[NodeId, Node]
    lookups: int = 0

    def __getitem__(self, name: NodeId) -> Node:
        self.lookups += 1
        return self.nodes[name]

    def __iter__(self) -> Iterator[NodeId]:
        raise AssertionError("the overlay walks over the whole cluster")

    def __len__(self) -> int:
        return len(self.nodes)


def test_a_decision_costs_by_what_is_touched_not_by_the_cluster():
    """Laying over, choosing and charging: the same look-ups at a hundred nodes and at a thousand."""

    def lookups(size: int) -> int:
        view = fold(
            *(loaded(f"p{i:04}", Role.PREFILL, far=True, waiting=i) for i in range(size)),
            *(loaded(f"l{i:04}", Role.PREFILL, waiting=i) for i in range(size)),
            *(loaded(f"d{i:04}", Role.DECODE, running=i) for i in range(size)),
        )
        counted = CountedNodes(view.nodes)
        base, over = replace(view, nodes=counted), overlay(view)
        counted.lookups = 0
        for number in range(50):
            request = Request(
                id=RequestId(str(number)), model="m", prompt=bytes(4 * 5000), sampling=Sampling(max_tokens=1)
            )
            route = choose(request, NO_MATCHES, over.view(base, 1.0), PARAMS)
            charge(over, str(number), route.prefill, route.decode, route.prefill_tokens, 1.0)
        return counted.lookups

    assert lookups(1000) == lookups(100) <= 50 * 120


class OverlayAgainstTruth(RuleBasedStateMachine):
    """Nodes that do what they are told without delay, and report when they like. The overlaid view is the truth."""

    NAMES = tuple(map(NodeId, ("p0", "p1", "d0", "d1", "x0")))

    @initialize()
    def start(self) -> None:
        self.now, self.number = 0.0, 0
        self.over = Overlay(NEAR, settle_s=0.0)
        roles = {"p": (Role.PREFILL, True), "d": (Role.DECODE, False), "x": (Role.MIXED, False)}
        self.true = {name: loaded(name, roles[name[0]][0], far=roles[name[0]][1]) for name in self.NAMES}
        self.known = dict(self.true)
        self.attempts: dict[AttemptId, list] = {}
        for name in self.NAMES:
            self.over.reported(name, 0.0)

    def add(self, name: NodeId, **changes: int) -> None:
        before = self.true[name].load
        added = {field: getattr(before, field) + change for field, change in changes.items()}
        self.true[name] = replace(self.true[name], load=replace(before, **added))

    @rule(prefill=st.sampled_from(("p0", "p1", "x0")), decode=st.sampled_from(("d0", "d1", "x0")), n=st.integers(1, 99))
    def route(self, prefill: str, decode: str, n: int) -> None:
        self.number += 1
        attempt = AttemptId(str(self.number))
        self.over.charge(attempt, NodeId(prefill), NodeId(decode), n, 2 * n, 0, self.now)
        self.attempts[attempt] = [NodeId(prefill), NodeId(decode), n, False]
        self.add(NodeId(prefill), queued_prefill_tokens=n)
        self.add(NodeId(decode), active_sequences=1, committed_tokens=2 * n)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        attempt = data.draw(st.sampled_from(sorted(self.attempts)))
        prefill, decode, n, handed = self.attempts[attempt]
        self.over.prefilled(attempt, self.now)
        if not handed:
            self.add(prefill, queued_prefill_tokens=-n)
            self.add(decode, decoding=1)
        self.attempts[attempt][3] = True

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        attempt = data.draw(st.sampled_from(sorted(self.attempts)))
        prefill, decode, n, handed = self.attempts.pop(attempt)
        self.over.discharge(attempt, self.now)
        if not handed:
            self.add(prefill, queued_prefill_tokens=-n)
        self.add(decode, active_sequences=-1, committed_tokens=-2 * n, decoding=-int(handed))

    @rule(name=st.sampled_from(NAMES))
    def report(self, name: NodeId) -> None:
        self.now += 0.001
        self.known[name] = self.true[name]
        self.over.reported(name, self.now)
        self.now += 0.001

    @invariant()
    def the_view_is_the_truth(self) -> None:
        if not hasattr(self, "over"):
            return
        self.over.check()
        base = fold(*self.known.values())
        view, truth = self.over.view(base, self.now), fold(*self.true.values())
        view.check()
        self.over.check()
        assert {n: load(view, n) for n in view.nodes} == {n: self.true[n].load for n in self.true}
        for field in ("remote_prefill", "local_prefill", "decode"):
            assert tuple(getattr(view, field)) == getattr(truth, field)

    def teardown(self) -> None:
        """All is over and everybody has reported: nothing is left."""
        if hasattr(self, "over"):
            for attempt in self.attempts:
                self.over.discharge(attempt, self.now)
            for name in self.NAMES:
                self.over.reported(name, self.now + 1)
            base = fold(*self.known.values())
            assert self.over.view(base, self.now + 1) is base


TestOverlayAgainstTruth = OverlayAgainstTruth.TestCase
TestOverlayAgainstTruth.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
