"""Opposite `prfaas/membership/view.py`."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.cluster import ClusterView, Incarnation, Namespace, Node, NodeId, NodeKind, NodeLoad, RegionId, Role
from prfaas.membership.records import Kind, Measured, NodeRecord, TelemetryRecord, encode, key_of
from prfaas.membership.revisions import Revisions
from prfaas.membership.store import Deleted, Entry, Put, Resync, Snapshot, StoreEvent
from prfaas.membership.view import MembershipView

PD, FAR = RegionId("pd"), RegionId("far")
STALE_S, GRACE_S = 10.0, 30.0


def a_node(name: str, role: Role = Role.DECODE, region: RegionId = PD, incarnation: int = 1) -> Node:
    return Node(
        id=NodeId(name),
        region=region,
        kind=NodeKind.PD if region == PD else NodeKind.PREFILL_WORKER,
        role=role,
        incarnation=Incarnation(incarnation),
        namespace=Namespace("ns"),
        model="tiny",
        rpc_address=f"{name}:1",
        max_context_tokens=4096,
    )


class Story:
    """A store's history as the fold is told it, at the times it is told."""

    def __init__(self) -> None:
        self.fold = MembershipView("c", PD, stale_s=STALE_S, grace_s=GRACE_S)
        self.data = Revisions(history_limit=1000)
        self.now = 0.0
        self.seq = 0

    def register(self, node: Node) -> None:
        self._put(Kind.NODE, node, encode(NodeRecord.of(node)))

    def report(self, node: Node, load: NodeLoad) -> None:
        self.seq += 1
        self._put(Kind.TELEMETRY, node, encode(TelemetryRecord.of(Measured(load), NodeRecord.of(node), self.seq)))

    def join(self, *nodes: Node) -> None:
        for node in nodes:
            self.register(node)
            self.report(node, node.load)

    def garble(self, kind: Kind, node: Node) -> None:
        self._put(kind, node, b"not a record")

    def leave(self, node: Node) -> None:
        after = self.data.revision
        self.data.delete(lambda key: key.endswith("/" + node.id))
        self._tell(after)

    def come_back_empty(self) -> None:
        self.data = Revisions(history_limit=1000)
        self.list_anew()

    def list_anew(self) -> None:
        self.fold.apply([Resync(Snapshot(self.data.revision, self.data.select(lambda key: True)))], self.now)

    def view(self, later_s: float = 0.0) -> ClusterView:
        self.now += later_s
        view = self.fold.view(self.now)
        self.fold.check()
        return view

    def _put(self, kind: Kind, node: Node, value: bytes) -> None:
        after = self.data.revision
        self.data.put(key_of("c", kind, node.id), value)
        self._tell(after)

    def _tell(self, after: int) -> None:
        self.fold.apply(self.data.changes(lambda key: True, after), self.now)


def test_nodes_fall_into_classes_by_region_kind_and_role():
    """Prefill workers elsewhere are remote; here, roles decide, and a mixed node is in both classes."""
    story = Story()
    story.join(a_node("far0", Role.PREFILL, FAR), a_node("p", Role.PREFILL), a_node("d"), a_node("m", Role.MIXED))
    story.join(replace(a_node("other", Role.MIXED, FAR), kind=NodeKind.PD))
    view = story.view()
    assert (view.remote_prefill, view.local_prefill, view.decode) == (("far0",), ("m", "p"), ("d", "m"))
    assert set(view.nodes) == {"far0", "p", "d", "m", "other"}


def test_each_class_is_ordered_by_its_own_load():
    """Prefill by the tokens that wait, decode by the sequences that run; equals by id."""
    story = Story()
    a, b, c = a_node("a", Role.MIXED), a_node("b", Role.MIXED), a_node("c", Role.MIXED)
    story.join(c, b, a)
    assert story.view().decode == ("a", "b", "c")
    story.report(a, NodeLoad(queued_prefill_tokens=500, active_sequences=1))
    story.report(b, NodeLoad(queued_prefill_tokens=10, active_sequences=9))
    story.report(c, NodeLoad(queued_prefill_tokens=90, active_sequences=4))
    view = story.view()
    assert (view.local_prefill, view.decode) == (("b", "c", "a"), ("a", "c", "b"))
    assert view.nodes[NodeId("a")].load.queued_prefill_tokens == 500
    story.report(a, NodeLoad(queued_prefill_tokens=5))
    assert story.view().local_prefill == ("a", "b", "c")


def test_a_draining_node_is_known_but_not_chosen():
    """It finishes what it has and comes back into its class when it stops draining."""
    story = Story()
    d0, d1 = a_node("d0", Role.MIXED), a_node("d1", Role.MIXED)
    story.join(d0, d1)
    story.report(d0, NodeLoad(draining=True))
    view = story.view()
    assert view.decode == view.local_prefill == ("d1",) and "d0" in view.nodes
    story.report(d0, NodeLoad())
    assert story.view().decode == ("d0", "d1")


def test_the_registered_role_decides_at_once():
    """A flipped node moves between classes with its record, before it reports again."""
    story = Story()
    story.join(a_node("n", Role.DECODE))
    story.register(a_node("n", Role.PREFILL))
    view = story.view()
    assert (view.local_prefill, view.decode) == (("n",), ())


def test_field_I4_a_restarted_node_is_not_judged_by_what_its_predecessor_reported():
    """Telemetry of another incarnation than the registered one does not count, before and after the restart."""
    story = Story()
    old, new, peer = a_node("d", incarnation=1), a_node("d", incarnation=2), a_node("peer")
    story.join(old, peer)
    story.report(old, NodeLoad(active_sequences=0, kv_free_bytes=77))
    story.report(peer, NodeLoad(active_sequences=5))
    assert story.view().decode == ("d", "peer")
    story.register(new)
    view = story.view()
    assert view.nodes[NodeId("d")].load == NodeLoad() and story.fold.telemetry(NodeId("d")) is None
    assert view.decode == ("peer", "d"), "what is not known to be idle is not taken for idle"
    story.report(new, NodeLoad(active_sequences=1))
    assert story.view().decode == ("d", "peer")
    story.report(old, NodeLoad(active_sequences=9))
    assert story.view().nodes[NodeId("d")].load.active_sequences == 0


def test_field_C3_a_restart_on_the_same_id_counts_at_once():
    """The new incarnation and address replace the old ones without waiting for a lease."""
    story = Story()
    story.join(a_node("d", incarnation=1))
    story.register(replace(a_node("d", incarnation=2), rpc_address="elsewhere:9"))
    node = story.view().nodes[NodeId("d")]
    assert (node.incarnation, node.rpc_address) == (2, "elsewhere:9")


def test_a_silent_node_is_the_last_choice():
    """Older than the limit, its report says nothing about its load; a listing that repeats it does not make it
    young."""
    story = Story()
    quiet, busy = a_node("quiet"), a_node("busy")
    story.join(quiet)
    story.view(later_s=STALE_S / 2)
    story.join(busy)
    story.report(busy, NodeLoad(active_sequences=50))
    assert story.view().decode == ("quiet", "busy")
    story.list_anew()
    assert story.view(later_s=STALE_S / 2).decode == ("busy", "quiet")
    story.report(quiet, NodeLoad())
    assert story.view().decode == ("quiet", "busy")


def test_while_the_store_is_lost_the_order_stands():
    """Without any reports all nodes become unknown alike, and none leaves."""
    story = Story()
    a, b = a_node("a"), a_node("b")
    story.join(a, b)
    story.report(a, NodeLoad(active_sequences=3))
    story.report(b, NodeLoad(active_sequences=2))
    assert story.view(later_s=3600.0).decode == ("b", "a")


def test_a_deleted_node_leaves_at_once():
    """A stop revokes the lease, and the lease's end is a fact."""
    story = Story()
    story.join(a_node("a"), a_node("b"))
    story.leave(a_node("a"))
    view = story.view()
    assert view.decode == ("b",) and set(view.nodes) == {"b"}


def test_field_K1_a_store_that_comes_back_empty_does_not_empty_the_cluster():
    """Nodes keep serving until they had time to register again; who does not is gone then."""
    story = Story()
    stays, dies = a_node("stays"), a_node("dies")
    story.join(stays, dies)
    story.come_back_empty()
    assert story.view().decode == ("dies", "stays")
    story.view(later_s=GRACE_S / 2)
    story.join(stays)
    story.list_anew()
    assert story.view().decode == ("stays", "dies")
    assert set(story.view(later_s=GRACE_S / 2 - 0.1).nodes) == {"stays", "dies"}
    assert set(story.view(later_s=0.1).nodes) == {"stays"}
    assert set(story.view(later_s=GRACE_S).nodes) == {"stays"}


def test_a_node_in_doubt_that_is_deleted_leaves_at_once():
    """The grace is for silence, not for facts."""
    story = Story()
    story.join(a_node("d"))
    story.come_back_empty()
    story.join(a_node("d"))
    story.leave(a_node("d"))
    assert story.view().nodes == {}


def test_an_unreadable_value_is_counted_and_leaves_what_is_known_in_place_for_a_while():
    """One bad key costs the others nothing, and a node that stays unreadable goes after the grace."""
    story = Story()
    a, b = a_node("a"), a_node("b")
    story.join(a, b)
    story.garble(Kind.NODE, a)
    story.garble(Kind.NODE, a_node("never-known"))
    assert set(story.view().nodes) == {"a", "b"}
    assert story.fold.malformed == 2
    assert set(story.view(later_s=GRACE_S).nodes) == {"b"}
    story.join(a)
    story.garble(Kind.TELEMETRY, a)
    assert set(story.view(later_s=GRACE_S).nodes) == {"a", "b"}


def test_an_unchanged_cluster_is_the_same_view():
    """Reading costs nothing between changes, and other keys of the cluster change nothing."""
    story = Story()
    story.join(a_node("d"))
    view = story.view()
    story.fold.apply([Put(Entry("/prfaas/c/plan", b"{}", 99))], story.now)
    story.list_anew()
    assert story.view() is view
    story.report(a_node("d"), NodeLoad(active_sequences=1))
    assert story.view() is not view and view.nodes[NodeId("d")].load.active_sequences == 0


def test_time_is_due_when_it_changes_something():
    """`next_due` is the moment at which the view changes without an event, no earlier and no later."""
    story = Story()
    assert story.fold.next_due() is None
    story.join(a_node("d"))
    assert story.fold.next_due() == STALE_S
    story.view(later_s=STALE_S)
    assert story.fold.next_due() is None
    story.come_back_empty()
    assert story.fold.next_due() == STALE_S + GRACE_S


NAMES = st.sampled_from(["a", "b", "c"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("register"), NAMES, st.sampled_from(Role), st.integers(1, 2)),
        st.tuples(st.just("report"), NAMES, st.integers(1, 2), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("garble"), NAMES, st.sampled_from(Kind)),
        st.tuples(st.just("leave"), NAMES),
    ),
    max_size=30,
)


def history(steps: list[tuple]) -> Revisions:
    """The store after the steps, with every change still in its history."""
    data = Revisions(history_limit=1000)
    for seq, step in enumerate(steps):
        match step:
            case "register", name, role, incarnation:
                record = NodeRecord.of(a_node(name, role, incarnation=incarnation))
                data.put(key_of("c", Kind.NODE, name), encode(record))
            case "report", name, incarnation, running, draining:
                measured = Measured(NodeLoad(active_sequences=running, draining=draining))
                of = NodeRecord.of(a_node(name, incarnation=incarnation))
                data.put(key_of("c", Kind.TELEMETRY, name), encode(TelemetryRecord.of(measured, of, seq)))
            case "garble", name, kind:
                data.put(key_of("c", kind, name), b"?")
            case "leave", name:
                data.delete(lambda key, name=name: key.endswith("/" + name))
    return data


def everything(key: str) -> bool:
    return True


def listing(data: Revisions, revision: int) -> Resync:
    return Resync(Snapshot(revision, data.select(everything, revision)))


@settings(max_examples=300)
@given(STEPS, st.data())
def test_whatever_is_repeated_the_view_ends_as_the_last_listing_makes_it(steps: list[tuple], draw: st.DataObject):
    """Changes in order, with listings in between and earlier changes told again, end in the same view as the final
    listing alone, once the time of grace is over."""
    data = history(steps)
    changes: list[StoreEvent] = [*data.changes(everything, 1)]
    fold = MembershipView("c", PD, stale_s=100.0, grace_s=1.0)
    fold.apply([listing(data, 1)], 0.0)
    for told, event in enumerate(changes):
        fold.apply([event], 0.0)
        fold.check()
        revision = revision_of(event)
        match draw.draw(st.sampled_from(["on", "repeat", "list", "list twice"])):
            case "repeat":
                first, last = draw.draw(st.integers(0, told)), draw.draw(st.integers(0, told))
                fold.apply(changes[first : last + 1], 0.0)
            case "list" if told + 1 == len(changes) or revision_of(changes[told + 1]) > revision:
                fold.apply([listing(data, revision)], 0.0)
            case "list twice":
                fold.apply([listing(data, data.revision), listing(data, revision)], 0.0)
    direct = MembershipView("c", PD, stale_s=100.0, grace_s=1.0)
    direct.apply([listing(data, data.revision)], 0.0)
    assert fold.view(2.0) == direct.view(2.0)
    assert fold.view(200.0) == direct.view(200.0)


def revision_of(event: StoreEvent) -> int:
    assert isinstance(event, Put | Deleted)
    return event.entry.mod_revision if isinstance(event, Put) else event.revision
