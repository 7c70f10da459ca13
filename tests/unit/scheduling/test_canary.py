"""Whom canaries leave distrusted."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.cluster import Incarnation, Namespace, Node, NodeId, NodeKind, NodeLoad, RegionId, Role
from prfaas.scheduling.canary import MAX_SKIPS, Canary, CanaryParams, Probe, Verdict

PARAMS = CanaryParams(period_s=60.0, failures=2, max_share=0.01, skip_busy_ratio=0.8)
COST_S = 0.1


def far(name: str, incarnation: int = 1, busy_ratio: float = 0.0) -> Node:
    return _node(name, NodeKind.PREFILL_WORKER, Role.PREFILL, "far", incarnation, busy_ratio)


def near(name: str, incarnation: int = 1) -> Node:
    return _node(name, NodeKind.PD, Role.MIXED, "near", incarnation, 0.0)


def _node(name: str, kind: NodeKind, role: Role, region: str, incarnation: int, busy_ratio: float) -> Node:
    return Node(
        id=NodeId(name),
        region=RegionId(region),
        kind=kind,
        role=role,
        incarnation=Incarnation(incarnation),
        namespace=Namespace("n"),
        model="m",
        rpc_address="",
        max_context_tokens=1000,
        load=NodeLoad(prefill_busy_ratio=busy_ratio),
    )


class Region:
    """Prefill and decode nodes, and those of them that spoil what passes through."""

    def __init__(self, prefills: Sequence[Node], decodes: Sequence[Node], bad: set[str], routers: int = 1) -> None:
        self.prefills, self.decodes, self.bad, self.routers = prefills, decodes, bad, routers
        self.canary, self.now = Canary(PARAMS, lambda: 0.5), 0.0
        self.probes: list[tuple[float, Probe]] = []

    def run(self, seconds: float, cost_s: float = COST_S, verdict: Verdict = Verdict.WRONG) -> None:
        until = self.now + seconds
        while self.now < until:
            probe = self.canary.next(self.prefills, self.decodes, self.routers, self.now)
            if probe is None:
                self.now += 3.0
            else:
                self.probes.append((self.now, probe))
                self.now += cost_s
                spoiled = {probe.prefill, probe.decode} & self.bad
                said = verdict if spoiled else Verdict.RIGHT
                self.canary.heard(probe, said, "token 3", cost_s, self.routers, self.now)
            self.canary.check()

    @property
    def distrusted(self) -> set[str]:
        return set(self.canary.distrusted)


@pytest.mark.parametrize("verdict", [Verdict.WRONG, Verdict.FAILED])
def test_field_C15_a_prefill_node_that_spoils_kv_is_distrusted(verdict: Verdict):
    """After its second bad answer, soon after the first, and it alone."""
    region = Region([far("p0"), far("p1")], [near("d0"), near("d1")], {"p0"})
    region.run(2 * PARAMS.period_s, verdict=verdict)
    assert region.distrusted == {"p0"}
    first, second = [at for at, probe in region.probes if probe.prefill == "p0"][:2]
    assert second - first < PARAMS.period_s / 2
    assert "token 3" in region.canary.reasons()[NodeId("p0")]
    assert region.canary.poisoned == (region.distrusted if verdict is Verdict.WRONG else set())


def test_it_is_trusted_again_when_it_is_well():
    """It goes on being tried, and two right answers in a row are enough."""
    region = Region([far("p0")], [near("d0")], {"p0"})
    region.run(2 * PARAMS.period_s)
    assert region.distrusted == {"p0"}
    region.bad.clear()
    region.run(PARAMS.period_s / 2)
    assert region.distrusted == set()
    assert region.canary.poisoned == set()


def test_one_right_answer_between_two_wrong_ones_clears_nobody_and_convicts_nobody():
    """Failures and passes count in a row."""
    canary, probe = Canary(PARAMS, lambda: 0.0), Probe(NodeId("p0"), NodeId("d0"))
    canary.next([far("p0")], [near("d0")], 1, 0.0)
    for verdict in (Verdict.WRONG, Verdict.RIGHT, Verdict.WRONG, Verdict.SKIPPED):
        canary.heard(probe, verdict, "", COST_S, 1, 0.0)
        assert not canary.distrusted
    canary.heard(probe, Verdict.WRONG, "", COST_S, 1, 0.0)
    assert canary.distrusted == {"p0"}
    for verdict in (Verdict.RIGHT, Verdict.WRONG, Verdict.RIGHT):
        canary.heard(probe, verdict, "", COST_S, 1, 0.0)
        assert canary.distrusted == {"p0"}


@pytest.mark.parametrize("prefills", [1, 2, 4])
def test_a_decode_node_that_spoils_what_it_receives_is_told_from_those_that_send(prefills: int):
    """Whoever failed on it passes on the others: in the end it is distrusted, and none of them."""
    senders = [far(f"p{number}") for number in range(prefills)]
    region = Region(senders, [near("d0"), near("d1"), near("d2")], {"d1"})
    region.run(30 * PARAMS.period_s)
    assert region.distrusted == {"d1"}
    region.bad.clear()
    region.run(30 * PARAMS.period_s)
    assert region.distrusted == set()


def test_a_sender_that_left_does_not_shield_the_node_that_it_failed_on():
    """It will never pass elsewhere; those that are here tell, and its failures count no more."""
    canary, others = Canary(PARAMS, lambda: 0.0), [far("p1"), far("p2")]
    decodes = [near("d0"), near("d1")]
    canary.next([far("p0"), *others], decodes, 1, 0.0)

    def hear(verdict: Verdict, prefill: str, decode: str) -> None:
        canary.heard(Probe(NodeId(prefill), NodeId(decode)), verdict, "", COST_S, 1, 0.0)
        canary.check()

    hear(Verdict.WRONG, "p0", "d0")
    canary.next([far("p0", incarnation=2), *others], decodes, 1, 0.0)
    canary.check()
    hear(Verdict.WRONG, "p1", "d0")
    hear(Verdict.RIGHT, "p1", "d1")
    assert not canary.distrusted
    hear(Verdict.WRONG, "p0", "d0")
    hear(Verdict.WRONG, "p2", "d0")
    hear(Verdict.RIGHT, "p2", "d1")
    assert not canary.distrusted
    canary.next(others, decodes, 1, 0.0)
    canary.check()
    assert canary.distrusted == {"d0"}


def test_with_a_single_decode_node_the_senders_are_distrusted():
    """Which of the two it is cannot be known; without the senders nothing is sent, and what stays local is right."""
    region = Region([far("p0"), far("p1")], [near("d0")], {"d0"})
    region.run(4 * PARAMS.period_s)
    assert region.distrusted == {"p0", "p1"}


def test_a_node_that_starts_again_is_another_one():
    """What its earlier life did wrong is not held against it."""
    region = Region([far("p0")], [near("d0")], {"p0"})
    region.run(2 * PARAMS.period_s)
    assert region.distrusted == {"p0"}
    region.prefills, region.bad = [far("p0", incarnation=2)], set()
    region.canary.next(region.prefills, region.decodes, 1, region.now)
    assert region.distrusted == set()
    region.prefills = []
    region.canary.next(region.prefills, region.decodes, 1, region.now)
    assert region.canary.reasons() == {}


@pytest.mark.parametrize("routers", [1, 5])
def test_all_routers_together_try_each_node_once_a_period(routers: int):
    """However many there are."""
    region = Region([far("p0"), far("p1")], [near("d0")], set(), routers)
    region.run(50 * PARAMS.period_s)
    assert 0.8 * 100 / routers <= len(region.probes) <= 100 / routers


def test_canaries_take_no_more_than_their_share():
    """Where one takes long they are rare, those after a failure too."""
    for bad in (set[str](), {"p0"}):
        region = Region([far("p0")], [near("d0")], bad)
        region.run(10_000, cost_s=5.0)
        assert 2 <= len(region.probes) * 5.0 <= 0.011 * 10_000


def test_a_busy_node_is_passed_over_but_not_for_ever():
    """Its requests matter more, up to a point: what is never tried is never found."""
    region = Region([far("p0", busy_ratio=0.95)], [near("d0")], {"p0"})
    region.run(0.9 * MAX_SKIPS * PARAMS.period_s)
    assert region.probes == []
    region.run(3 * PARAMS.period_s)
    assert len(region.probes) > 0


def test_nobody_is_asked_of_what_does_not_fit():
    """A prefill node is tried only with decode nodes that it can push to, and never with itself."""
    region = Region([far("p0"), near("d0")], [near("d0")], set())
    region.run(3 * PARAMS.period_s)
    assert {probe for _, probe in region.probes} == {Probe(NodeId("p0"), NodeId("d0"))}


@settings(deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 7), st.sampled_from(Verdict), st.floats(0, 10), st.booleans()), max_size=40),
)
def test_whatever_comes_back_the_machine_is_sound(prefills: int, decodes: int, events):
    """In any order, with nodes that leave and restart: and after enough right answers everybody is trusted."""
    lives = dict.fromkeys(range(8), 1)
    region = Region([], [], set())
    for victim, verdict, cost_s, restart in events:
        if restart:
            lives[victim] += 1
        region.prefills = [far(f"p{each}", lives[each]) for each in range(prefills)]
        region.decodes = [near(f"d{each}", lives[4 + each]) for each in range(decodes)]
        region.now += 7.0
        if (probe := region.canary.next(region.prefills, region.decodes, 1, region.now)) is not None:
            region.canary.heard(probe, verdict, "x", cost_s, 1, region.now)
        region.canary.check()
    region.prefills = [far(f"p{each}", lives[each]) for each in range(prefills)]
    region.decodes = [near(f"d{each}", lives[4 + each]) for each in range(decodes)]
    region.run(40 * PARAMS.period_s + 2000)
    assert region.distrusted == set()
