"""Shards of the prefix caches in the store and in the view."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.cluster import Incarnation, Namespace, NodeId, Pool, RegionId
from prfaas.membership.records import Kind, PoolRecord, encode, key_of, read_pool
from prfaas.membership.store import Deleted, Entry, Put, Resync, Snapshot
from prfaas.membership.view import MembershipView

GRACE_S = 30.0


def a_pool(name: str = "c0", incarnation: int = 1) -> Pool:
    return Pool(
        id=NodeId(name),
        region=RegionId("far"),
        incarnation=Incarnation(incarnation),
        namespace=Namespace("ns"),
        rpc_address=f"{name}:1",
        kv_addresses={"": f"{name}:2", "near": "wan:3"},
        capacity_bytes=2**40,
        resumes_anywhere=True,
    )


def put(pool: Pool, revision: int = 1) -> Put:
    return Put(Entry(key_of("c", Kind.POOL, pool.id), encode(PoolRecord.of(pool)), revision))


def fold() -> MembershipView:
    return MembershipView("c", RegionId("near"), grace_s=GRACE_S)


def test_a_shard_is_in_the_view_as_it_registered():
    """Beside the nodes, and none of them."""
    view = fold()
    view.apply([put(a_pool("c1")), put(a_pool("c0"))], now=0.0)
    pools = view.view(0.0).pools
    assert list(pools.items()) == [(NodeId("c0"), a_pool("c0")), (NodeId("c1"), a_pool("c1"))]
    assert not view.view(0.0).nodes
    assert pools[NodeId("c0")].kv_address_for(RegionId("near")) == "wan:3"
    view.check()


def test_a_restart_replaces_it_and_a_deletion_removes_it_at_once():
    view = fold()
    view.apply([put(a_pool()), put(a_pool(incarnation=2), 2)], now=0.0)
    assert view.view(0.0).pools[NodeId("c0")].incarnation == 2
    view.apply([Deleted(key_of("c", Kind.POOL, "c0"), 3)], now=0.0)
    assert not view.view(0.0).pools
    view.check()


def test_a_store_that_comes_back_empty_does_not_empty_the_pools_at_once():
    """They have the time of a lease to register again; what cannot be read is doubted in the same way."""
    for doubt in (Resync(Snapshot(revision=5, entries=())), Put(Entry(key_of("c", Kind.POOL, "c0"), b"no record", 5))):
        view = fold()
        view.apply([put(a_pool())], now=0.0)
        view.apply([doubt], now=1.0)
        assert view.view(1.0 + GRACE_S - 0.1).pools
        assert not view.view(1.0 + GRACE_S).pools
        view.check()


def test_the_pools_are_the_same_object_until_they_change():
    """Whoever follows them looks often, and nodes report all the time."""
    view = fold()
    view.apply([put(a_pool())], now=0.0)
    pools = view.view(0.0).pools
    view.apply([put(a_pool(), 2)], now=1.0)
    view.apply([Put(Entry(key_of("c", Kind.NODE, "n"), b"no record", 3))], now=1.0)
    assert view.view(1.0).pools is pools


@given(st.binary() | st.text().map(str.encode))
def test_no_bytes_can_make_reading_fail(value: bytes):
    assert read_pool(NodeId("c0"), value) is None
    assert read_pool(NodeId("other"), encode(PoolRecord.of(a_pool()))) is None
