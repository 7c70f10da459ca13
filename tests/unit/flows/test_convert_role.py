"""A node carries out plans in virtual time: what it accepts, what it finishes first, and what it refuses."""

from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cluster import NodeId, Plan, Role
from prfaas.errors import StaleEpoch
from prfaas.flows.convert_role import (
    NEXT,
    Assignment,
    ConvertParams,
    OnDrainTimeout,
    Phase,
    Standing,
    assigned,
    follow_plans,
    kept,
    role_of,
)
from prfaas.sim.kernel import Kernel
from prfaas.sim.task import Event

D0 = NodeId("d0")
DRAIN_S = 10.0


def plan(epoch: int, share: float | None = None, **others: float) -> Plan:
    shares = {NodeId(name): other for name, other in others.items()}
    return Plan(epoch, 1000, shares if share is None else shares | {D0: share})


@dataclass
class Seat:
    """`RolePorts` of one node in virtual time. `left_s` is how long the work that it has takes to end."""

    kernel: Kernel
    left_s: dict[Role | None, float] = field(default_factory=dict)
    node: NodeId = D0
    told: list[Standing] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    refusals: list[StaleEpoch] = field(default_factory=list)
    _ends: dict[Role | None, float] = field(default_factory=dict)
    _plan: Plan | None = None
    _changed: Event = field(default_factory=lambda: Event("plan"))

    def __post_init__(self) -> None:
        self.now, self.sleep = self.kernel.now, self.kernel.sleep
        self.within, self.race = self.kernel.within, self.kernel.race

    def publish(self, plan: Plan) -> None:
        self._plan = plan
        self._changed.set()
        self._changed = Event("plan")

    async def plan_other_than(self, seen: Plan | None) -> Plan:
        while self._plan is None or self._plan == seen:
            await self._changed.wait()
        return self._plan

    def stand(self, standing: Standing) -> None:
        self.told.append(standing)
        if standing.phase is Phase.SERVING:
            self._ends.clear()

    async def drained(self, keeps: Role | None) -> None:
        """What is there when a drain begins takes so long, however often that is asked."""
        ends = self._ends.setdefault(keeps, self.kernel.now() + self.left_s.get(keeps, 0.0))
        await self.kernel.sleep(max(0.0, ends - self.kernel.now()))

    async def reconfigure(self, share: float) -> None:
        self.shares.append(share)
        await self.kernel.sleep(0.1)

    def refused(self, error: StaleEpoch) -> None:
        self.refusals.append(error)

    @property
    def phases(self) -> list[tuple[Phase, Role | None]]:
        return [(standing.phase, standing.accepts) for standing in self.told]

    @property
    def last(self) -> Standing:
        return self.told[-1]


class World:
    """A node that started with `share`, and its kernel."""

    def __init__(
        self,
        share: float,
        left_s: dict[Role | None, float] | None = None,
        timeout: OnDrainTimeout = OnDrainTimeout.ABORT,
    ) -> None:
        self.kernel = Kernel(seed=0)
        self.seat = Seat(self.kernel, left_s or {})
        params = ConvertParams(drain_timeout_s=DRAIN_S, on_drain_timeout=timeout)
        story: Coroutine[Any, Any, None] = follow_plans(self.seat, Assignment(share), params)
        self.kernel.spawn(story, "follow plans")

    def later(self, seconds: float) -> Seat:
        self.kernel.run_until(self.kernel.now() + seconds)
        return self.seat

    def publish(self, plan: Plan, then_s: float = 1.0) -> Seat:
        self.seat.publish(plan)
        return self.later(then_s)


def test_a_decode_node_finishes_its_streams_and_then_prefills():
    """serving -> draining -> converting -> serving; it takes nothing new, for it keeps no part of its role."""
    world = World(0.0, {None: 5.0})
    seat = world.publish(plan(1, 1.0), then_s=4.9)
    assert seat.phases == [(Phase.DRAINING, None)] and seat.shares == []
    seat = world.later(1.0)
    assert seat.phases[1:] == [(Phase.CONVERTING, None), (Phase.SERVING, Role.PREFILL)]
    assert seat.shares == [1.0] and seat.last.assignment == Assignment(1.0, 1)


def test_a_mixed_node_goes_on_with_the_part_it_keeps():
    """Losing prefill it decodes on, new requests included."""
    world = World(0.5, {Role.DECODE: 3.0})
    seat = world.publish(plan(1, 0.0), then_s=4.0)
    assert seat.phases == [(Phase.DRAINING, Role.DECODE), (Phase.CONVERTING, Role.DECODE), (Phase.SERVING, Role.DECODE)]


def test_a_gain_waits_for_nothing():
    """Nothing is lost, so nothing has to end first."""
    seat = World(0.0, {None: 99.0}).publish(plan(1, 0.3))
    assert seat.last == Standing(Assignment(0.3, 1), Phase.SERVING, Role.MIXED)


def test_a_plan_that_does_not_name_the_node_leaves_it_alone():
    """It reports the epoch, and converts nothing."""
    seat = World(0.5).publish(plan(4, d1=1.0))
    assert seat.told == [Standing(Assignment(0.5, 4), Phase.SERVING, Role.MIXED)] and seat.shares == []


def test_a_newer_plan_calls_a_drain_off():
    """Draining -> serving, with the role it had."""
    world = World(0.0, {None: 8.0})
    world.publish(plan(1, 1.0))
    seat = world.publish(plan(2, 0.0))
    assert seat.phases == [(Phase.DRAINING, None), (Phase.SERVING, Role.DECODE), (Phase.SERVING, Role.DECODE)]
    assert seat.last.assignment == Assignment(0.0, 2) and seat.shares == []


def test_a_newer_plan_of_the_same_mind_does_not_start_the_drain_again():
    """Another node's change comes with a new epoch; what is under way goes on."""
    world = World(0.0, {None: 3.0})
    world.publish(plan(1, 1.0))
    world.publish(plan(2, 1.0, d7=0.0))
    seat = world.later(2.5)
    assert (Phase.SERVING, Role.DECODE) not in seat.phases
    assert seat.last == Standing(Assignment(1.0, 2), Phase.SERVING, Role.PREFILL)


@pytest.mark.parametrize(("policy", "share"), [(OnDrainTimeout.ABORT, 0.0), (OnDrainTimeout.PROCEED, 1.0)])
def test_a_drain_has_an_end(policy: OnDrainTimeout, share: float):
    """A stream that never ends costs the plan, or only that stream its speed, as configured. The epoch stays seen."""
    world = World(0.0, {None: 1e9}, policy)
    world.publish(plan(3, 1.0))
    seat = world.later(DRAIN_S)
    assert seat.last == Standing(Assignment(share, 3), Phase.SERVING, role_of(share))


def test_a_stale_plan_is_refused_and_changes_nothing():
    """A leader that has been overtaken does no harm, and the next plan is obeyed."""
    world = World(0.0)
    world.publish(plan(9, 0.5))
    before = list(world.seat.told)
    seat = world.publish(plan(7, 1.0))
    assert seat.told == before
    assert [(error.seen, error.current) for error in seat.refusals] == [(7, 9)]
    assert world.publish(plan(10, 0.0)).last == Standing(Assignment(0.0, 10), Phase.SERVING, Role.DECODE)


def test_a_stale_plan_does_not_end_a_drain():
    """What is refused is not a reason to stop."""
    world = World(0.0, {None: 3.0})
    world.publish(plan(9, 1.0))
    seat = world.publish(plan(7, 0.0), then_s=3.0)
    assert seat.last == Standing(Assignment(1.0, 9), Phase.SERVING, Role.PREFILL) and len(seat.refusals) == 1


def test_a_share_that_is_no_number_says_nothing():
    """The node stays what it is."""
    assert assigned(plan(2, float("nan")), D0, Assignment(0.5, 1)) == Assignment(0.5, 2)
    assert assigned(plan(2, 7.0), D0, Assignment(0.5, 1)) == Assignment(1.0, 2)


@pytest.mark.parametrize("before", Role)
@pytest.mark.parametrize("after", Role)
def test_what_is_kept_is_part_of_both_roles(before: Role, after: Role):
    """And everything that is part of both is kept."""
    rest = kept(before, after)
    assert (rest is not None and rest.prefills) == (before.prefills and after.prefills)
    assert (rest is not None and rest.decodes) == (before.decodes and after.decodes)


SHARES = st.sampled_from([0.0, 0.25, 0.5, 1.0])


@given(
    start=SHARES,
    plans=st.lists(st.tuples(st.integers(1, 6), SHARES, st.floats(0, 15)), max_size=8),
    left_s=st.fixed_dictionaries({role: st.floats(0, 20) for role in (None, *Role)}),
)
def test_whatever_plans_come_phases_follow_the_table_and_epochs_never_fall(
    start: float, plans: list[tuple[int, float, float]], left_s: dict[Role | None, float]
):
    """And in the end the node serves, as the last plan that was not stale wants it or as it was."""
    world = World(start, left_s)
    for epoch, share, pause_s in plans:
        world.publish(plan(epoch, share), pause_s)
    seat = world.later(200.0)
    phase, epoch = Phase.SERVING, 0
    for standing in seat.told:
        assert standing.phase is phase or standing.phase in NEXT[phase]
        assert standing.assignment.epoch >= epoch
        if standing.phase is Phase.SERVING:
            assert standing.accepts is standing.assignment.role
        phase, epoch = standing.phase, standing.assignment.epoch
    assert phase is Phase.SERVING
    if plans:
        assert epoch == max(epoch for epoch, _, _ in plans)
