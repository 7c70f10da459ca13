"""Which nodes change: as few as possible, the least loaded ones, the same on every machine."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.cluster import NodeId, NodeLoad, Role
from prfaas.scheduling.assignment import changes, same
from tests.unit.scheduling.steering_scenes import node


def pd(*shares: float, held: tuple[int, ...] = ()) -> tuple[list, dict]:
    loads = [NodeLoad(committed_tokens=tokens) for tokens in held] or [NodeLoad()] * len(shares)
    nodes = [
        node(f"d{index}", Role.PREFILL if share == 1 else Role.MIXED if share else Role.DECODE, share=share, load=load)
        for index, (share, load) in enumerate(zip(shares, loads, strict=True))
    ]
    return nodes, {each.id: share for each, share in zip(nodes, shares, strict=True)}


def test_the_least_loaded_node_of_the_losing_role_changes():
    """It is the soonest drained."""
    nodes, shares = pd(1.0, 0.0, 0.0, 0.0, held=(0, 30, 10, 20))
    (only,) = changes(nodes, shares, [1.0, 1.0, 0.0, 0.0])
    assert (only.node, only.before, only.after) == ("d2", 0.0, 1.0)


def test_equal_nodes_are_told_apart_by_their_ids():
    nodes, shares = pd(0.0, 0.0, 0.0)
    assert [change.node for change in changes(nodes, shares, [1.0, 0.0, 0.0])] == ["d0"]


def test_the_largest_change_comes_first():
    """It brings most."""
    nodes, shares = pd(1.0, 1.0, 0.0, 0.0)
    made = changes(nodes, shares, [0.4, 0.0, 0.0, 0.0])
    assert [(change.before, change.after) for change in made] == [(1.0, 0.0), (1.0, 0.4)]


def test_a_share_that_hardly_differs_is_kept():
    """A conversion costs more. A whole role is not a mixed one, though."""
    nodes, shares = pd(1.0, 0.40, 0.0)
    assert changes(nodes, shares, [1.0, 0.43, 0.0]) == ()
    assert same(0.40, 0.43) and not same(0.0, 0.01) and not same(1.0, 0.99)


roles = st.lists(st.sampled_from([0.0, 1.0, 0.3, 0.6]), min_size=1, max_size=10)


@given(st.data())
def test_the_changes_lead_to_what_is_wanted(data):
    """Applied to the shares they give the plan, each node once, and never more of them than necessary."""
    now = data.draw(roles)
    each = st.sampled_from([*now, 0.0, 1.0, 0.6])
    wanted = data.draw(st.lists(each, min_size=len(now), max_size=len(now)))
    nodes, shares = pd(*now)
    made = changes(nodes, shares, wanted)
    after = shares | {change.node: change.after for change in made}
    assert sorted(after.values()) == sorted(wanted)
    assert len({change.node for change in made}) == len(made)
    kept = sum(min(now.count(share), wanted.count(share)) for share in {0.0, 1.0, 0.3, 0.6})
    assert len(made) == len(now) - kept
    assert all(shares[NodeId(change.node)] == change.before != change.after for change in made)
