"""Breakers: what opens them, who is to blame, and how they close again."""

from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prfaas.cluster import ClusterView, Incarnation, LinkState, Namespace, Node, NodeId, NodeKind, RegionId, Role
from prfaas.errors import (
    CACHE_LOST,
    DeadlineExceeded,
    EngineFailed,
    NamespaceMismatch,
    Overloaded,
    PeerUnavailable,
    PrfaasError,
    TransferFailed,
)
from prfaas.request import AttemptId
from prfaas.scheduling.blame import Guard
from prfaas.scheduling.breaker import BreakerParams, Cause, Circuit
from prfaas.scheduling.breakers import Breakers
from prfaas.scheduling.shut import OPEN_TO_ALL

FAR, NEAR = RegionId("far"), RegionId("near")
PARAMS = BreakerParams(min_outcomes=4, window_s=30.0, rest_s=1.0, max_rest_s=8.0, in_flight=16)
LINE = TransferFailed("a", "checksum")


CUT = {(FAR, NEAR): LinkState(FAR, NEAR, queued_bytes=9, stalled_s=0.6)}


class Scene:
    """Attempts of which nothing but their ends is of interest."""

    def __init__(self, params: BreakerParams = PARAMS) -> None:
        self.breakers, self.now, self._count = Breakers(params), 0.0, 0

    def begin(self, source: str, decode: str, predicted_s: float | None = None) -> AttemptId:
        self._count += 1
        attempt = AttemptId(f"a{self._count}")
        self.breakers.begin(attempt, (NodeId(source), FAR), (NodeId(decode), NEAR), predicted_s, self.now)
        return attempt

    def fail(self, source: str, decode: str, error: PrfaasError = LINE, times: int = 1) -> None:
        for _ in range(times):
            self.breakers.failed(self.begin(source, decode), error, self.now)
            self.breakers.check()

    def succeed(self, source: str, decode: str, times: int = 1) -> None:
        for _ in range(times):
            self.breakers.done(self.begin(source, decode), self.now)
            self.breakers.check()

    def wait(self, seconds: float) -> None:
        self.now += seconds

    @property
    def shut(self) -> set[tuple[str, ...]]:
        """Guards with both ends, as far as nothing may pass them."""
        shut = self.breakers.shut(self.now)
        pairs = {("pair", source, decode) for decode, sources in shut.pairs.items() for source in sources}
        broken = {(guard, source) for guard, source, *_ in self.breakers.states(self.now)}
        sources = {("source", name) for name in shut.sources if (Guard.SOURCE, name) in broken}
        return pairs | sources | {("link", *link) for link in shut.links}


def test_a_pair_opens_at_its_failure_rate_and_not_below_the_minimum():
    """Three failures of three say little; the fourth opens that pair, and nothing else."""
    scene = Scene()
    scene.fail("p0", "d0", times=3)
    assert scene.breakers.shut(scene.now) is OPEN_TO_ALL
    scene.fail("p0", "d0")
    assert scene.shut == {("pair", "p0", "d0")}
    assert scene.breakers.opened == {(Guard.PAIR, Cause.FAILED): 1}


def test_few_failures_among_many_do_not_open():
    """The share counts, within the window: successes that are long past do not make up for failures."""
    scene = Scene()
    scene.succeed("p0", "d0", times=10)
    for _ in range(2):
        scene.fail("p0", "d0", times=3)
        scene.succeed("p0", "d0")
    assert not scene.shut
    scene.wait(31.0)
    scene.fail("p0", "d0", times=4)
    assert scene.shut == {("pair", "p0", "d0")}


def test_what_has_worked_for_long_does_not_hide_that_it_does_no_more():
    """As many failures in a row as are enough at all."""
    scene = Scene()
    scene.succeed("p0", "d0", times=100)
    scene.fail("p0", "d0", times=3)
    assert not scene.shut
    scene.fail("p0", "d0")
    assert scene.shut == {("pair", "p0", "d0")}


def test_after_a_rest_one_probe_decides():
    """One goes through; the others wait for what comes of it. Failure rests twice as long, up to the bound."""
    scene = Scene()
    scene.fail("p0", "d0", times=4)
    rests = []
    for _ in range(6):
        opens_s = scene.breakers.shut(scene.now).half_opens_at
        rests.append(round(opens_s - scene.now, 6))
        scene.now = opens_s
        assert not scene.shut, "a probe may pass"
        probe = scene.begin("p0", "d0")
        assert scene.shut == {("pair", "p0", "d0")}, "but only one"
        scene.breakers.failed(probe, LINE, scene.now)
    assert rests == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    scene.wait(8.0)
    scene.succeed("p0", "d0")
    assert not scene.shut and not list(scene.breakers.states(scene.now))
    assert scene.breakers.probes == {(Guard.PAIR, "failed"): 6, (Guard.PAIR, "closed"): 1}


def test_a_link_that_takes_nothing_opens_before_anything_on_it_is_due():
    """What its senders report is enough, whatever attempts have come of it; and while they go on reporting it nobody is
    sent to find out."""
    scene = Scene()
    under_way = scene.begin("p0", "d0", predicted_s=10.0)
    scene.breakers.heard({(FAR, NEAR): replace(CUT[FAR, NEAR], stalled_s=0.4)}, scene.now)
    assert not scene.shut, "a short pause is none"
    scene.breakers.heard(CUT, scene.now)
    assert scene.shut == {("link", FAR, NEAR)}
    for _ in range(5):
        scene.wait(1.0)
        scene.breakers.heard(CUT, scene.now)
        assert scene.shut == {("link", FAR, NEAR)}
        scene.breakers.check()
    assert scene.breakers.opened == {(Guard.LINK, Cause.STALLED): 1}
    scene.wait(1.0)
    assert not scene.shut, "nobody says so any more: a probe may pass"
    probe = scene.begin("p1", "d0", predicted_s=1.0)
    scene.breakers.heard(CUT, scene.now)
    assert scene.breakers.due_at(probe) == scene.now + PARAMS.due_s(1.0), "it is left to find out"
    scene.breakers.done(probe, scene.now)
    assert not scene.shut
    scene.breakers.done(under_way, scene.now)
    scene.breakers.check()


def test_a_probe_of_which_nothing_is_known_is_followed_by_another_rest():
    """Its client left: no doubling, but no second probe at once either."""
    scene = Scene()
    scene.fail("p0", "d0", times=4)
    scene.wait(1.0)
    scene.breakers.forget(scene.begin("p0", "d0"), scene.now)
    assert scene.shut == {("pair", "p0", "d0")}
    scene.wait(1.0)
    scene.succeed("p0", "d0")
    assert not scene.shut


def test_what_was_under_way_when_it_opened_does_not_close_it():
    """Only the probe counts."""
    scene = Scene()
    old = scene.begin("p0", "d0")
    scene.fail("p0", "d0", times=4)
    scene.breakers.done(old, scene.now)
    assert scene.shut == {("pair", "p0", "d0")}


@pytest.mark.parametrize(
    "error",
    [
        Overloaded("kv"),
        TransferFailed("a", CACHE_LOST),
        PeerUnavailable("d0", "died"),
    ],
    ids=["refused", "cache lost", "decode died"],
)
def test_nobody_is_to_blame(error):
    """A refusal, a cache that lost something, a decode node that died: neither source nor link failed."""
    scene = Scene()
    for source in ("p0", "p1"):
        scene.fail(source, "d0", error, times=10)
    assert scene.breakers.shut(scene.now) is OPEN_TO_ALL


def test_a_decode_node_that_dies_takes_no_source_and_no_link_with_it():
    """Its sources see broken transfers before anybody knows why. The pairs open, toward that node alone."""
    scene = Scene()
    scene.succeed("p0", "d1")
    scene.fail("p0", "d0", times=6)
    scene.fail("p1", "d0", times=6)
    assert scene.shut == {("pair", "p0", "d0"), ("pair", "p1", "d0")}


def test_an_engine_that_fails_is_its_sources_fault():
    """Whoever it was for."""
    scene = Scene()
    scene.succeed("p1", "d0", times=3)
    for decode in ("d0", "d1", "d0", "d0"):
        scene.fail("p0", decode, EngineFailed("p0", "boom"))
    assert scene.shut == {("source", "p0")}


def test_field_C17_a_pair_that_does_not_fit_is_not_tried_again_and_again():
    """Refused for its namespace: that pair, not the node, which may fit others."""
    scene = Scene()
    scene.fail("p0", "d0", NamespaceMismatch("a", "b"), times=4)
    assert scene.shut == {("pair", "p0", "d0")}


def test_field_F5_an_address_that_one_source_cannot_reach_costs_that_pair_alone():
    """A wrong advertised address, a firewall between two hosts: the source serves others, and others serve the node."""
    scene = Scene()
    for _ in range(4):
        scene.fail("p0", "d0", TransferFailed("a", "connect"))
        scene.succeed("p0", "d1")
        scene.succeed("p1", "d0")
    assert scene.shut == {("pair", "p0", "d0")}


def test_a_link_opens_when_all_fail_on_it_and_only_in_that_direction():
    """Two sources to two decode nodes: it is the way between the regions. The way back is another link."""
    scene = Scene()
    for source in ("p0", "p1"):
        for decode in ("d0", "d1"):
            scene.fail(source, decode)
    assert scene.shut == {("link", "far", "near")}
    shut = scene.breakers.shut(scene.now)
    assert shut.into(NEAR) == {FAR} and not shut.into(FAR)


def test_a_source_that_is_lost_toward_everybody_opens_alone():
    """Another source on the same link goes on."""
    scene = Scene()
    for decode in ("d0", "d1"):
        scene.succeed("p1", decode, times=2)
        scene.fail("p0", decode, PeerUnavailable("p0", "gone"), times=2)
    assert scene.shut == {("source", "p0")}


def test_field_C20_a_slow_source_opens_its_own_breaker_when_its_attempts_are_overdue():
    """Nobody has to give up on them first, and the slow ones do not count again when they do end."""
    scene = Scene()
    due_s = PARAMS.due_s(1.0)
    slow = [scene.begin("p0", decode, 1.0) for decode in ("d0", "d1", "d0", "d1")]
    for _ in range(4):
        scene.succeed("p1", "d0")
        scene.succeed("p1", "d1")
    scene.wait(due_s - 0.01)
    assert not scene.shut
    scene.wait(0.02)
    assert scene.shut == {("source", "p0")}
    assert scene.breakers.opened == {(Guard.SOURCE, Cause.SLOW): 1}
    for attempt in slow:
        scene.breakers.done(attempt, scene.now)
    assert scene.shut == {("source", "p0")}


def test_field_C20_a_source_that_does_not_keep_up_may_have_ever_fewer_under_way():
    """What it has is halved for each that is late; what ends in time gives it one more, up to the bound."""
    scene = Scene(replace(PARAMS, min_outcomes=1000))
    attempts = [scene.begin("p0", f"d{number}", 0.1) for number in range(16)]
    assert scene.breakers.shut(scene.now).full == {"p0"}
    scene.wait(PARAMS.due_s(0.1))
    assert list(scene.breakers.in_flight()) != []
    scene.breakers.shut(scene.now)
    assert list(scene.breakers.in_flight()) == [("p0", 16, PARAMS.least_in_flight)]
    for attempt in attempts:
        scene.breakers.forget(attempt, scene.now)
    for grown in range(1, 20):
        scene.succeed("p0", "d0")
        assert list(scene.breakers.in_flight()) == [("p0", 0, min(16, PARAMS.least_in_flight + grown))]


def test_a_deadline_counts_as_slow():
    """Without a prediction the flow's own limit is the first that is known of it."""
    scene = Scene()
    scene.fail("p0", "d0", DeadlineExceeded("prefill", 60.0), times=4)
    assert scene.breakers.opened[Guard.PAIR, Cause.SLOW] == 1


def node(name: str, life: int = 1) -> Node:
    prefills = name.startswith("p")
    return Node(
        id=NodeId(name),
        region=FAR if prefills else NEAR,
        kind=NodeKind.PREFILL_WORKER if prefills else NodeKind.PD,
        role=Role.PREFILL if prefills else Role.DECODE,
        incarnation=Incarnation(life),
        namespace=Namespace("ns"),
        model="m",
        rpc_address="",
        max_context_tokens=1000,
    )


def view(*nodes: Node) -> ClusterView:
    return ClusterView(nodes=MappingProxyType({each.id: each for each in nodes}))


def test_another_life_of_a_node_begins_anew():
    """What the old one did says nothing of the new one."""
    scene = Scene()
    scene.breakers.retain(view(node("p0"), node("d0")), scene.now)
    scene.fail("p0", "d0", times=4)
    scene.wait(1.0)
    scene.breakers.retain(view(node("p0", 2), node("d0")), scene.now)
    assert scene.breakers.shut(scene.now) is OPEN_TO_ALL


def test_what_has_left_is_forgotten():
    """Nodes come and go for ever, and nothing piles up."""
    scene = Scene()
    for life in range(300):
        names = f"p{life}", f"d{life}"
        scene.breakers.retain(view(*map(node, names)), scene.now)
        scene.fail(*names, times=5)
        scene.wait(1.5)
    scene.wait(PARAMS.window_s + PARAMS.max_rest_s)
    scene.breakers.retain(view(), scene.now)
    assert not list(scene.breakers.states(scene.now)) and not list(scene.breakers.in_flight())
    assert scene.breakers.shut(scene.now) is OPEN_TO_ALL
    assert not scene.breakers._breakers and not scene.breakers._due


SOURCES, DECODES = ("p0", "p1", "p2"), ("d0", "d1")
ERRORS = (
    LINE,
    EngineFailed("p0", "boom"),
    Overloaded("kv"),
    DeadlineExceeded("prefill", 1.0),
    PeerUnavailable("p0", "gone"),
    PeerUnavailable("d0", "gone"),
)


class AnyOrder(RuleBasedStateMachine):
    """Whatever begins and ends in whatever order, with nodes that come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.scene = Scene()
        self.flying: list[AttemptId] = []
        self.life = 1

    @rule(source=st.sampled_from(SOURCES), decode=st.sampled_from(DECODES), seconds=st.sampled_from([None, 0.1, 3.0]))
    def begin(self, source: str, decode: str, seconds: float | None) -> None:
        self.flying.append(self.scene.begin(source, decode, seconds))

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), error=st.sampled_from([None, *ERRORS]))
    def end(self, data: st.DataObject, error: PrfaasError | None) -> None:
        attempt = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        if error is None:
            self.scene.breakers.done(attempt, self.scene.now)
        else:
            self.scene.breakers.failed(attempt, error, self.scene.now)
        self.scene.breakers.forget(attempt, self.scene.now)

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 5.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.scene.wait(seconds)

    @rule()
    def cut(self) -> None:
        self.scene.breakers.heard(CUT, self.scene.now)

    @rule(data=st.data())
    def change(self, data: st.DataObject) -> None:
        left = data.draw(st.sets(st.sampled_from((*SOURCES, *DECODES))))
        self.life += data.draw(st.integers(0, 1))
        self.scene.breakers.retain(view(*(node(name, self.life) for name in sorted(left))), self.scene.now)

    @rule()
    def heal(self) -> None:
        """Whatever has happened: once all goes well again, nothing stays open."""
        scene = self.scene
        for attempt in self.flying:
            scene.breakers.forget(attempt, scene.now)
        self.flying.clear()
        for _ in range(3):
            scene.wait(PARAMS.max_rest_s)
            for source in SOURCES:
                for decode in DECODES:
                    scene.succeed(source, decode)
        assert not list(scene.breakers.states(scene.now))

    @invariant()
    def consistent(self) -> None:
        breakers, now = self.scene.breakers, self.scene.now
        breakers.check()
        shut = breakers.shut(now)
        assert shut is breakers.shut(now), "the same while nothing changes"
        assert shut.half_opens_at > now
        assert len(breakers._breakers) <= len(SOURCES) + len(SOURCES) * len(DECODES) + 1
        for breaker in breakers._breakers.values():
            assert breaker.circuit is not Circuit.OPEN or breaker.half_opens_at > now


class OneBreaker(RuleBasedStateMachine):
    """A single pair against a plain count: it never opens below the minimum, and one rest lets one probe through."""

    def __init__(self) -> None:
        super().__init__()
        self.scene = Scene()
        self.closed_outcomes = 0
        self.probes_since_rest = 0

    def _is_shut(self) -> bool:
        return ("pair", "p0", "d0") in self.scene.shut

    @rule(failed=st.booleans())
    def attempt(self, failed: bool) -> None:
        scene, was_shut = self.scene, self._is_shut()
        circuit = next((state[3] for state in scene.breakers.states(scene.now) if state[0] is Guard.PAIR), None)
        if was_shut:
            scene.wait(0.25)
            return
        if circuit is not None:
            self.probes_since_rest += 1
            assert self.probes_since_rest == 1, "one probe for each rest"
        (scene.fail if failed else scene.succeed)("p0", "d0")
        if circuit is None:
            self.closed_outcomes += 1
            assert not self._is_shut() or (failed and self.closed_outcomes >= PARAMS.min_outcomes)
        elif not failed:
            assert not self._is_shut(), "a probe that is well closes it"
            self.closed_outcomes = 0
        if self._is_shut():
            self.closed_outcomes = self.probes_since_rest = 0
        elif not failed:
            self.probes_since_rest = 0

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.scene.wait(seconds)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestOneBreaker = OneBreaker.TestCase
TestOneBreaker.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
