"""Opposite `prfaas/membership/direction.py`: plan, pin, drains and routers in the fold; plans that come too late."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cluster import Incarnation, Namespace, Node, NodeId, NodeKind, Plan, RegionId, Role
from prfaas.membership.plans import (
    DrainRecord,
    PinRecord,
    PlanRecord,
    RouterRecord,
    drains_prefix,
    pin_key,
    plan_key,
    read,
    readable,
    routers_prefix,
)
from prfaas.membership.records import Kind, NodeRecord, encode, key_of
from prfaas.membership.revisions import Revisions
from prfaas.membership.store import Resync, Snapshot
from prfaas.membership.view import MembershipView

GRACE_S = 30.0
NODE = Node(
    id=NodeId("d0"),
    region=RegionId("pd"),
    kind=NodeKind.PD,
    role=Role.MIXED,
    incarnation=Incarnation(7),
    namespace=Namespace("ns"),
    model="tiny",
    rpc_address="d0:1",
    max_context_tokens=4096,
    hardware="h20",
    prefill_share=0.25,
)


class Story:
    """A store's history as the fold is told it."""

    def __init__(self) -> None:
        self.fold = MembershipView("c", RegionId("pd"), grace_s=GRACE_S)
        self.data = Revisions(history_limit=1000)
        self.now = 0.0

    def put(self, key: str, record: msgspec.Struct | bytes) -> None:
        after = self.data.revision
        self.data.put(key, record if isinstance(record, bytes) else encode(record))
        self._tell(after)

    def delete(self, key: str) -> None:
        after = self.data.revision
        self.data.delete(lambda other: other == key)
        self._tell(after)

    def plan(self, epoch: int, threshold_tokens: int = 1000) -> None:
        self.put(plan_key("c"), PlanRecord(epoch=epoch, threshold_tokens=threshold_tokens, made_by="r"))

    def register(self, epoch: int = 0, accepting: bool = True, node: Node = NODE) -> None:
        record = msgspec.structs.replace(NodeRecord.of(node), epoch=epoch, accepting=accepting)
        self.put(key_of("c", Kind.NODE, node.id), record)

    def come_back(self, *, empty: bool) -> None:
        if empty:
            self.data = Revisions(history_limit=1000)
        self.fold.apply([Resync(Snapshot(self.data.revision, self.data.select(lambda key: True)))], self.now)

    def view(self, later_s: float = 0.0):
        self.now += later_s
        self.fold.check()
        return self.fold.view(self.now)

    def _tell(self, after: int) -> None:
        self.fold.apply(self.data.changes(lambda key: True, after), self.now)


def test_the_plan_is_in_the_view():
    """As it was written, and its epoch with it."""
    story = Story()
    assert (story.view().plan, story.view().highest_epoch) == (None, 0)
    plan = Plan(3, 900, {NodeId("d0"): 0.5}, "demand")
    story.put(plan_key("c"), PlanRecord.of(plan, "r"))
    assert (story.view().plan, story.view().highest_epoch) == (plan, 3)


def test_a_plan_overtaken_by_another_is_refused():
    """Whoever overwrites the key with an older plan changes nothing, and the loss is known."""
    story = Story()
    story.plan(5, 500)
    story.plan(4, 400)
    view = story.view()
    assert view.plan is not None and view.plan.threshold_tokens == 500
    assert (story.fold.direction.refused_plans, story.fold.direction.plan_lost) == (1, True)
    story.plan(6, 600)
    assert not story.fold.direction.plan_lost and story.view().highest_epoch == 6


def test_a_plan_older_than_what_a_worker_has_seen_is_refused():
    """A router that has just started knows no plan, but the workers do."""
    story = Story()
    story.register(epoch=9)
    story.plan(8)
    view = story.view()
    assert view.plan is None and view.highest_epoch == 9
    story.plan(10)
    assert story.view().plan is not None


def test_field_K1_a_store_that_comes_back_empty_does_not_freeze_the_cluster():
    """The last plan stays in force, the loss is known at once, and the next plan only has to be later than what the
    workers have seen."""
    story = Story()
    story.register(epoch=7)
    story.plan(7, 700)
    story.come_back(empty=True)
    assert story.fold.direction.plan_lost
    view = story.view()
    assert view.plan is not None and (view.plan.epoch, view.highest_epoch) == (7, 7)
    story.plan(8, 800)
    assert not story.fold.direction.plan_lost and story.view().highest_epoch == 8


def test_a_plan_that_nobody_brings_back_is_forgotten_after_the_grace():
    """A new cluster in the place of the old one begins with the first epoch."""
    story = Story()
    story.plan(7)
    story.come_back(empty=True)
    assert story.view(GRACE_S - 1).plan is not None
    assert story.view(2).plan is None and not story.fold.direction.plan_lost
    story.plan(1)
    assert story.view().plan is not None


def test_a_store_that_comes_back_whole_has_lost_nothing():
    """The same listing again is no news."""
    story = Story()
    story.register(epoch=2)
    story.plan(2)
    before = story.view()
    story.come_back(empty=False)
    assert not story.fold.direction.plan_lost and story.view() == before


def test_a_plan_that_was_deleted_is_gone():
    """A deletion is a fact."""
    story = Story()
    story.plan(2)
    story.delete(plan_key("c"))
    assert story.view().plan is None


def test_a_node_that_accepts_nothing_is_in_no_class_at_once():
    """Without waiting for its telemetry."""
    story = Story()
    story.register()
    assert story.view().decode == ("d0",)
    story.register(epoch=1, accepting=False)
    assert story.view().decode == () and story.view().nodes[NodeId("d0")].load.draining
    story.register(epoch=1)
    assert story.view().decode == ("d0",)


def test_a_drain_means_one_life_of_a_node():
    """A node that has started again is taken for new."""
    story = Story()
    story.register()
    key = drains_prefix("c") + "d0"
    story.put(key, DrainRecord(incarnation=f"{7:016x}"))
    assert story.view().decode == ()
    story.register(node=replace(NODE, incarnation=Incarnation(8)))
    assert story.view().decode == ("d0",)
    story.register()
    assert story.view().decode == ()
    story.delete(key)
    assert story.view().decode == ("d0",)


def test_pins_and_routers_are_kept_and_dropped():
    """Each by its key."""
    story, direction = Story(), None
    direction = story.fold.direction
    story.put(pin_key("c"), PinRecord(threshold_tokens=5))
    story.put(routers_prefix("c") + "r0", RouterRecord(router="r0", arrivals_per_s=2.0, lengths=((3, 1.5),)))
    assert direction.pin == PinRecord(threshold_tokens=5) and direction.routers["r0"].lengths == ((3, 1.5),)
    story.delete(pin_key("c"))
    story.delete(routers_prefix("c") + "r0")
    assert direction.pin is None and direction.routers == {}


def test_what_a_node_is_comes_back_as_it_was_written():
    """Share and hardware included."""
    story = Story()
    story.register()
    node = story.view().nodes[NodeId("d0")]
    assert (node.role, node.share, node.hardware) == (Role.MIXED, 0.25, "h20")


@pytest.mark.parametrize(
    "value", [b"{}", b'{"epoch": 0, "threshold_tokens": 1}', b'{"epoch": 2, "threshold_tokens": -1}']
)
def test_half_a_plan_is_no_plan(value: bytes):
    """Nor is one with a share that makes no sense."""
    assert read(PlanRecord, value) is None
    assert read(PlanRecord, b'{"epoch": 2, "threshold_tokens": 1, "shares": {"d0": 1.5}}') is None


def test_plans_can_be_read_by_people():
    """One line per field, as `etcdctl get` shows it."""
    shown = readable(PlanRecord(epoch=2, threshold_tokens=7, shares={"d0": 1.0})).decode()
    assert '"threshold_tokens": 7' in shown and shown.count("\n") > 3


@given(st.sampled_from(["plan", "pin", "drains/d0", "routers/r0"]), st.binary() | st.text().map(str.encode))
def test_nothing_that_the_store_contains_can_make_the_fold_fail(key: str, value: bytes):
    """What is readable later counts then."""
    story = Story()
    story.register()
    story.put(f"/prfaas/c/{key}", value)
    story.view()
    story.come_back(empty=False)
    story.view(2 * GRACE_S)
    story.plan(1)
    assert story.view().plan is not None


@given(st.lists(st.tuples(st.sampled_from(["plan", "worker", "empty", "whole"]), st.integers(1, 5)), max_size=12))
def test_the_plan_in_force_never_gets_older(events: list[tuple[str, int]]):
    """Whatever plans are written, by whom and in what order, within the grace."""
    story, before = Story(), 0
    for what, epoch in events:
        match what:
            case "plan":
                story.plan(epoch)
            case "worker":
                story.register(epoch=epoch)
            case _:
                story.come_back(empty=what == "empty")
        plan = story.view(later_s=0.1).plan
        assert plan is None or plan.epoch >= before
        before = plan.epoch if plan is not None else before
