"""The paper's rule over two matches, load and failures."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import pytest

from prfaas.cluster import (
    ClusterView,
    Incarnation,
    Namespace,
    Node,
    NodeId,
    NodeKind,
    NodeLoad,
    RegionId,
    Role,
    WireRange,
)
from prfaas.errors import ModelNotFound, PeerUnavailable
from prfaas.request import NO_MATCHES, Match, Path, Reason, Request, RequestId, Sampling
from prfaas.scheduling.routing import (
    LEAST_LOADED,
    OWN_PREFILL_TOKENS,
    PREFIX_HOLDERS,
    RoutingParams,
    choose,
    fallback,
)

PARAMS = RoutingParams(threshold_tokens=1000)
ABUNDANT = RoutingParams(threshold_tokens=1000, abundant=True)


def node(name: str, role: Role, *, kind: NodeKind = NodeKind.PD, queued: int = 0, committed: int = 0) -> Node:
    return Node(
        id=NodeId(name),
        region=RegionId("far" if kind is NodeKind.PREFILL_WORKER else "near"),
        kind=kind,
        role=role,
        incarnation=Incarnation(1),
        namespace=Namespace("ns"),
        model="m",
        rpc_address="",
        max_context_tokens=1_000_000,
        load=NodeLoad(queued_prefill_tokens=queued, committed_tokens=committed),
    )


def far(name: str, queued: int = 0) -> Node:
    return node(name, Role.PREFILL, kind=NodeKind.PREFILL_WORKER, queued=queued)


def near(name: str, role: Role, *, queued: int = 0, committed: int = 0) -> Node:
    return node(name, role, queued=queued, committed=committed)


def cluster(*nodes: Node) -> ClusterView:
    """A view as the fold keeps it: classes ordered by load, draining nodes left out."""
    serving = sorted(
        (n for n in nodes if not n.load.draining), key=lambda n: n.load.queued_prefill_tokens + n.load.committed_tokens
    )
    pd = [n for n in serving if n.kind is NodeKind.PD]
    return ClusterView(
        nodes={n.id: n for n in nodes},
        remote_prefill=tuple(n.id for n in serving if n.kind is NodeKind.PREFILL_WORKER),
        local_prefill=tuple(n.id for n in pd if n.role.prefills),
        decode=tuple(n.id for n in pd if n.role.decodes),
    )


def prompt(tokens: int, *, model: str = "m", name: str = "r") -> Request:
    return Request(id=RequestId(name), model=model, prompt=bytes(4 * tokens), sampling=Sampling(max_tokens=1))


def holds(**matches: tuple[int, int]) -> dict[NodeId, Match]:
    """Joint and KV-only match by node."""
    return {NodeId(name): Match(joint, kv) for name, (joint, kv) in matches.items()}


TRIO = cluster(far("p0"), near("l0", Role.PREFILL), near("d0", Role.DECODE))


def test_a_long_prompt_is_prefilled_in_the_other_region():
    """More than t tokens to compute: PrfaaS, and all KV up to N-1 crosses."""
    route = choose(prompt(1001), NO_MATCHES, TRIO, PARAMS)
    assert (route.path, route.reason, route.prefill, route.decode) == (Path.REMOTE, Reason.LONG_PROMPT, "p0", "d0")
    assert (route.uncached_tokens, route.transfer_tokens) == (1001, 1000)


def test_a_prompt_of_exactly_the_threshold_stays():
    """The rule says <= t."""
    route = choose(prompt(1000), NO_MATCHES, TRIO, PARAMS)
    assert (route.path, route.reason, route.prefill) == (Path.LOCAL, Reason.SHORT_PROMPT, "l0")


def test_only_what_is_not_cached_counts():
    """A long prompt whose prefix the PD side holds is short."""
    route = choose(prompt(9000), holds(l0=(8000, 8000)), TRIO, PARAMS)
    assert (route.prefill, route.reason, route.uncached_tokens) == ("l0", Reason.SHORT_PROMPT, 1000)


def test_kv_without_a_state_saves_no_computing():
    """M1: a prefill resumes only where KV and a state meet."""
    assert choose(prompt(9000), holds(l0=(0, 8960)), TRIO, PARAMS).path is Path.REMOTE


def test_what_crosses_is_what_the_decode_node_lacks():
    """M2: KV alone at the decode node shortens the transfer, however little of it the prefill can resume from."""
    route = choose(prompt(9000), holds(d0=(0, 8000)), TRIO, PARAMS)
    assert (route.prefill, route.transfer_tokens, route.uncached_tokens) == ("p0", 999, 9000)


def test_a_scarce_link_ignores_what_the_other_region_has_cached():
    """Scarce: l_total - l_pd; the cache over there decides nothing."""
    assert choose(prompt(9000), holds(p0=(8500, 8500)), TRIO, PARAMS).reason is Reason.LONG_PROMPT


def test_an_abundant_link_counts_the_longer_of_both_caches():
    """Abundant: l_total - max(l_prfaas, l_pd)."""
    route = choose(prompt(9000), holds(p0=(8500, 8500)), TRIO, ABUNDANT)
    assert (route.path, route.reason, route.uncached_tokens) == (Path.LOCAL, Reason.SHORT_PROMPT, 500)
    assert choose(prompt(9000), holds(l0=(7000, 7000), p0=(7900, 7900)), TRIO, ABUNDANT).uncached_tokens == 1100


def test_the_last_token_is_never_taken_from_the_cache():
    """The N-1 rule: a match of the whole prompt still leaves one token to compute and nothing negative to move."""
    route = choose(prompt(64), holds(l0=(64, 64), d0=(0, 64)), TRIO, PARAMS)
    assert (route.uncached_tokens, route.transfer_tokens) == (1, 0)


def test_the_least_loaded_nodes_serve():
    """Each class by its own load."""
    view = cluster(far("p0", 50), far("p1", 10), near("d0", Role.DECODE, committed=9), near("d1", Role.DECODE))
    route = choose(prompt(5000), NO_MATCHES, view, PARAMS)
    assert (route.prefill, route.decode) == ("p1", "d1")


def test_a_cached_prefix_attracts_until_its_holder_is_busy():
    """E5: affinity yields to load. The queue in front of a holder counts as much as the tokens it saves."""
    idle_holder = cluster(far("p0", 900), far("p1"), near("d0", Role.DECODE))
    busy_holder = cluster(far("p0", 1100), far("p1"), near("d0", Role.DECODE))
    matches = holds(p0=(1000, 1000))
    assert choose(prompt(5000), matches, idle_holder, PARAMS).prefill == "p0"
    assert choose(prompt(5000), matches, busy_holder, PARAMS).prefill == "p1"


def test_a_mixed_decode_node_prefills_itself_unless_a_neighbour_is_freer():
    """No KV moves when both halves are on one node; on a tie it stays."""
    even = cluster(near("d0", Role.MIXED, queued=10), near("l0", Role.PREFILL, queued=10))
    assert choose(prompt(100), NO_MATCHES, even, PARAMS).prefill == "d0"
    assert choose(prompt(100), NO_MATCHES, even, PARAMS).transfer_tokens == 0
    freer = cluster(near("d0", Role.MIXED, queued=10), near("l0", Role.PREFILL, queued=9))
    assert choose(prompt(100), NO_MATCHES, freer, PARAMS).prefill == "l0"


def test_a_long_prompt_stays_when_no_remote_node_fits():
    """Without the other region the PD cluster serves everything."""
    view = cluster(near("l0", Role.PREFILL), near("d0", Role.DECODE))
    route = choose(prompt(5000), NO_MATCHES, view, PARAMS)
    assert (route.prefill, route.reason) == ("l0", Reason.NO_REMOTE_PREFILL)


def test_the_decode_node_is_the_last_resort():
    """A decode-role node accepts fallback prefill when nobody else can."""
    route = choose(prompt(5000), NO_MATCHES, cluster(near("d0", Role.DECODE)), PARAMS)
    assert (route.prefill, route.decode, route.path) == ("d0", "d0", Path.LOCAL)
    assert (route.reason, route.transfer_tokens) == (Reason.NO_REMOTE_PREFILL, 0)


def test_without_a_prefilling_pd_node_a_short_prompt_goes_to_the_other_region():
    """Decode nodes are not held up for more than about one chunk."""
    view = cluster(far("p0"), near("d0", Role.DECODE))
    few, more = prompt(OWN_PREFILL_TOKENS), prompt(OWN_PREFILL_TOKENS + 1)
    assert choose(few, NO_MATCHES, view, PARAMS).prefill == "d0"
    assert choose(few, NO_MATCHES, view, PARAMS).reason is Reason.SHORT_PROMPT
    assert choose(more, NO_MATCHES, view, PARAMS).prefill == "p0"
    assert choose(more, NO_MATCHES, view, PARAMS).reason is Reason.NO_LOCAL_PREFILL


@pytest.mark.parametrize(
    "other",
    [{"namespace": Namespace("other")}, {"wire": WireRange(2, 3)}, {"model": "other"}],
    ids=["namespace", "wire", "model"],
)
def test_field_G3_nodes_that_cannot_exchange_kv_are_never_paired(other):
    """A rollout mixes versions; a pair whose namespaces or wire versions do not meet is not picked."""
    view = cluster(replace(far("p0"), **other), replace(near("l0", Role.PREFILL), **other), near("d0", Role.DECODE))
    route = choose(prompt(5000), holds(p0=(4000, 4000)), view, PARAMS)
    assert (route.prefill, route.reason) == ("d0", Reason.NO_REMOTE_PREFILL)


def test_a_node_that_failed_the_request_is_not_used_again():
    """A retry goes elsewhere, and says so when it had to stay."""
    view = cluster(far("p0"), far("p1", 100), near("d0", Role.DECODE), near("d1", Role.DECODE, committed=99))
    again = choose(prompt(5000), NO_MATCHES, view, PARAMS, frozenset({NodeId("p0"), NodeId("d0")}))
    assert (again.prefill, again.decode) == ("p1", "d1")
    last = choose(prompt(5000), NO_MATCHES, view, PARAMS, frozenset({NodeId("p0"), NodeId("p1")}))
    assert (last.prefill, last.decode, last.reason) == ("d0", "d0", Reason.FALLBACK)


def test_an_avoided_holder_stays_avoided():
    """A cached prefix does not bring a failed node back."""
    view = cluster(far("p0"), far("p1"), near("d0", Role.DECODE), near("d1", Role.DECODE))
    avoid = frozenset({NodeId("p0"), NodeId("d0")})
    route = choose(prompt(5000), holds(p0=(4000, 4000), d0=(0, 4000)), view, PARAMS, avoid)
    assert (route.prefill, route.decode) == ("p1", "d1")


def test_without_a_decode_node_left_the_cluster_is_unavailable():
    """A known model whose decode nodes failed or drain is a matter of time, not a wrong name."""
    with pytest.raises(PeerUnavailable):
        choose(prompt(10), NO_MATCHES, TRIO, PARAMS, frozenset({NodeId("d0")}))
    draining = near("d0", Role.DECODE)
    with pytest.raises(PeerUnavailable):
        choose(prompt(10), NO_MATCHES, cluster(replace(draining, load=NodeLoad(draining=True))), PARAMS)


def test_an_unknown_model_is_the_clients_error():
    """Nothing in the cluster has this name."""
    with pytest.raises(ModelNotFound):
        choose(prompt(10, model="nope"), NO_MATCHES, TRIO, PARAMS)


def test_a_draining_or_departed_holder_gets_nothing_new():
    """The index may know prefixes of nodes that take no more requests or are gone."""
    view = cluster(
        near("l0", Role.PREFILL),
        replace(near("l1", Role.PREFILL), load=NodeLoad(draining=True)),
        near("d0", Role.DECODE),
    )
    assert choose(prompt(900), holds(l1=(896, 896), gone=(896, 896)), view, PARAMS).prefill == "l0"


def test_fallback_moves_nothing():
    """Prefill and decode on one node, whatever the length, and never on one that failed."""
    view = cluster(far("p0"), near("l0", Role.PREFILL), near("d0", Role.DECODE), near("d1", Role.DECODE, committed=5))
    route = fallback(prompt(90_000), NO_MATCHES, view, PARAMS, frozenset({NodeId("d0")}))
    assert (route.prefill, route.decode, route.reason) == ("d1", "d1", Reason.FALLBACK)
    assert route.transfer_tokens == 0 and not route.moves_kv


def test_field_L2_a_route_names_the_ways_not_taken():
    """A receipt can say what the alternatives would have cost."""
    route = choose(prompt(5000), holds(l0=(512, 512)), TRIO, PARAMS)
    weighed = {(way.prefill, way.path, way.uncached_tokens, way.transfer_tokens) for way in route.alternatives}
    assert route.prefill == "p0" and route.threshold_tokens == 1000
    assert weighed == {("d0", Path.LOCAL, 5000, 0), ("l0", Path.LOCAL, 4488, 4999)}


def test_equally_idle_nodes_share_requests():
    """Routers with the same view must not all pick the same node; one request always picks the same."""
    view = cluster(*(far(f"p{i}") for i in range(4)), *(near(f"d{i}", Role.DECODE) for i in range(4)))
    routes = [choose(prompt(5000, name=f"r{i}"), NO_MATCHES, view, PARAMS) for i in range(64)]
    assert {route.prefill for route in routes} == {"p0", "p1", "p2", "p3"}
    assert {route.decode for route in routes} == {"d0", "d1", "d2", "d3"}
    assert routes[7] == choose(prompt(5000, name="r7"), NO_MATCHES, view, PARAMS)


@dataclass
class CountedNodes(Mapping[NodeId, Node]):
    """Counts look-ups: what a decision costs, whatever the machine."""

    nodes: Mapping[NodeId, Node]
    lookups: int = 0

    def __getitem__(self, name: NodeId) -> Node:
        self.lookups += 1
        return self.nodes[name]

    def __iter__(self) -> Iterator[NodeId]:
        raise AssertionError("a decision walks over the whole cluster")

    def __len__(self) -> int:
        return len(self.nodes)


def test_the_cost_of_a_decision_does_not_grow_with_the_cluster():
    """The least loaded few and a few holders are looked at, not a thousand nodes."""

    def lookups(size: int) -> int:
        view = cluster(
            *(far(f"p{i}") for i in range(size)),
            *(near(f"l{i}", Role.PREFILL) for i in range(size)),
            *(near(f"d{i}", Role.DECODE) for i in range(size)),
        )
        counted = CountedNodes(view.nodes)
        matches = {name: Match(64, 64) for name in view.nodes}
        choose(prompt(5000), matches, replace(view, nodes=counted), PARAMS)
        return counted.lookups

    assert lookups(1000) == lookups(100) <= 3 * (LEAST_LOADED + PREFIX_HOLDERS) + 8
