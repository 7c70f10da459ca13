"""The paper's rule over two matches, load and failures."""

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from prfaas.cluster import (
    ClusterView,
    Incarnation,
    LinkState,
    Namespace,
    Node,
    NodeId,
    NodeKind,
    NodeLoad,
    RegionId,
    Role,
    WireRange,
)
from prfaas.curve import Curve
from prfaas.errors import PeerUnavailable
from prfaas.profile import CASE_STUDY, GBPS, shipped
from prfaas.request import NO_MATCHES, Match, Mode, Path, Reason, Request, RequestId, Sampling
from prfaas.scheduling.routing import (
    LEAST_LOADED,
    OWN_PREFILL_TOKENS,
    PREFIX_HOLDERS,
    RoutingParams,
    choose,
    fallback,
)

PARAMS = RoutingParams(threshold_tokens=1000)
ABUNDANT = RoutingParams(threshold_tokens=1000, abundant=True, cache_pulls=True)


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


def test_field_H6_kv_without_a_state_saves_no_computing():
    """M1: a prefill resumes only where KV and a state meet."""
    assert choose(prompt(9000), holds(l0=(0, 8960)), TRIO, PARAMS).path is Path.REMOTE


def test_what_crosses_is_what_the_decode_node_lacks():
    """M2: KV alone at the decode node shortens the transfer, however little of it the prefill can resume from."""
    route = choose(prompt(9000), holds(d0=(0, 8000)), TRIO, PARAMS)
    assert (route.prefill, route.transfer_tokens, route.uncached_tokens) == ("p0", 999, 9000)


def test_a_scarce_link_ignores_what_the_other_region_has_cached():
    """Scarce: l_total - l_pd; the cache over there decides nothing."""
    assert choose(prompt(9000), holds(p0=(8500, 8500)), TRIO, PARAMS).reason is Reason.LONG_PROMPT


def test_without_profiles_the_other_regions_cache_is_not_counted_on():
    """A pull whose price is unknown is never made: the prompt goes to where its prefix is, instead of being computed
    whole here because it is short over there."""
    route = choose(prompt(31_001), holds(p0=(30_000, 30_000)), TRIO, replace(ABUNDANT, threshold_tokens=2000))
    assert (route.prefill, route.reason, route.uncached_tokens) == ("p0", Reason.LONG_PROMPT, 31_001)
    assert route.prefill_tokens == 1001 and (route.pull is None or not route.pull.chosen)


def test_the_last_token_is_never_taken_from_the_cache():
    """The N-1 rule: a match of the whole prompt still leaves one token to compute and nothing negative to move."""
    route = choose(prompt(64), holds(l0=(64, 64), d0=(0, 64)), TRIO, PARAMS)
    assert (route.uncached_tokens, route.transfer_tokens) == (1, 0)


def test_the_least_loaded_nodes_serve():
    """Each class by its own load."""
    view = cluster(far("p0", 50), far("p1", 10), near("d0", Role.DECODE, committed=9), near("d1", Role.DECODE))
    route = choose(prompt(5000), NO_MATCHES, view, PARAMS)
    assert (route.prefill, route.decode) == ("p1", "d1")


def test_field_E5_a_cached_prefix_attracts_until_its_holder_is_busy():
    """Affinity yields to load. The queue in front of a holder counts as much as the tokens it saves."""
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
    """A retry goes elsewhere, and stays where there is nobody else."""
    view = cluster(far("p0"), far("p1", 100), near("d0", Role.DECODE), near("d1", Role.DECODE, committed=99))
    again = choose(prompt(5000), NO_MATCHES, view, PARAMS, frozenset({NodeId("p0"), NodeId("d0")}))
    assert (again.prefill, again.decode) == ("p1", "d1")
    last = choose(prompt(5000), NO_MATCHES, view, PARAMS, frozenset({NodeId("p0"), NodeId("p1")}))
    assert (last.prefill, last.decode, last.reason) == ("d0", "d0", Reason.NO_REMOTE_PREFILL)


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


def test_a_model_that_nobody_has_any_more_is_not_called_unknown():
    """The client named a model that was there when it asked: its nodes have left since."""
    with pytest.raises(PeerUnavailable):
        choose(prompt(10, model="left"), NO_MATCHES, TRIO, PARAMS)


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


class CountedCurve(Curve):
    """Counts how often a measured cost is looked up."""

    looked_up = 0

    def __call__(self, x: float) -> float:
        CountedCurve.looked_up += 1
        return super().__call__(x)


def test_the_profiles_are_looked_at_by_kinds_of_nodes_not_by_nodes():
    """Once for each kind of hardware and each length of cached prefix."""

    def looked_up(size: int) -> int:
        given = shipped(CASE_STUDY, "h20")
        prefill, kv = (CountedCurve(curve.xs, curve.ys, curve.from_zero) for curve in (given.prefill, given.kv))
        view = cluster(
            *(on("h20", far(f"p{i}", i)) for i in range(size)),
            *(on("h20", near(f"l{i}", Role.PREFILL, queued=i)) for i in range(size)),
            *(on("h20", near(f"d{i}", Role.DECODE, committed=i)) for i in range(size)),
        )
        params = timed(profiles={"h20": replace(given, prefill=prefill, kv=kv)})
        matches = {name: Match(64, 128) for name in view.nodes}
        choose(prompt(5000), matches, view, params)
        CountedCurve.looked_up = 0
        for number in range(10):
            choose(prompt(5000, name=str(number)), matches, view, params)
        return CountedCurve.looked_up

    assert 0 < looked_up(100) == looked_up(1000) <= 10 * 20


# -- by seconds, where the hardware's profiles are known


FAR, NEAR = RegionId("far"), RegionId("near")
PROFILES = {hardware: shipped(CASE_STUDY, hardware) for hardware in ("h200", "h20")}
H200, H20 = PROFILES["h200"], PROFILES["h20"]


def timed(threshold_tokens: int = 19_400, **changed: Any) -> RoutingParams:
    """The case study's hardware behind a line of 100 Gbps, with a round trip of 20 ms."""
    usual: dict[str, Any] = {
        "profiles": PROFILES,
        "links": {(FAR, NEAR): line(100), (NEAR, FAR): line(100, back=True)},
        "rtt_s": {(FAR, NEAR): 0.02, (NEAR, FAR): 0.02},
        "short_tokens": 10_000.0,
        "long_tokens": 45_000.0,
        "output_tokens": 1024.0,
    }
    return RoutingParams(threshold_tokens, **(usual | changed))


def line(gbps: float | None, queued_bytes: int = 0, *, back: bool = False) -> LinkState:
    pair = (NEAR, FAR) if back else (FAR, NEAR)
    return LinkState(*pair, capacity_bytes_per_s=None if gbps is None else gbps * GBPS, queued_bytes=queued_bytes)


def on(hardware: str, each: Node, **load: int) -> Node:
    return replace(each, hardware=hardware, load=replace(each.load, **load))


def pair(*, far_queue: int = 0, near_queue: int = 0, running: int = 0) -> ClusterView:
    return cluster(
        on("h200", far("p0", far_queue)),
        on("h20", near("l0", Role.PREFILL, queued=near_queue)),
        on("h20", near("d0", Role.DECODE), active_sequences=running, max_batch=20),
    )


def test_the_route_says_what_it_expects():
    """Queue, prefill, what of the transfer shows, the wait for a slot and the first step, as the account has them."""
    route = choose(prompt(30_001), NO_MATCHES, pair(far_queue=90_000, running=5), timed())
    expected, rate = route.predicted, 100 * GBPS
    assert route.prefill == "p0" and expected is not None
    assert expected.prefill_queue_s == pytest.approx(90_000 / 45_000 * H200.prefill_s(45_000))
    assert expected.prefill_s == pytest.approx(H200.prefill_s(30_000))
    assert expected.transfer_exposed_s == pytest.approx(H200.kv(0) / rate + 0.02)
    assert (expected.decode_queue_s, expected.first_decode_step_s) == (0.0, pytest.approx(0.007 + 6 * 0.0009))
    assert route.predicted_ttft_s == pytest.approx(
        expected.prefill_queue_s + expected.prefill_s + expected.transfer_exposed_s + expected.first_decode_step_s
    )
    assert route.transfer_bytes == round(H200.kv_bytes(30_000))
    assert {way.prefill: way.predicted_ttft_s is not None for way in route.alternatives} == {"l0": True, "d0": True}


def test_a_transfer_shows_as_far_as_the_link_is_slower_than_the_prefill():
    """(KV + what waits) / rate - prefill, and the state and the round trip on top."""
    queued, rate = 1 << 30, 2 * GBPS
    params = timed(links={(FAR, NEAR): line(2, queued)})
    route = choose(prompt(30_001), NO_MATCHES, pair(), params)
    late_s = (H200.kv(30_000) - H200.kv(0) + queued) / rate - H200.prefill_s(30_000)
    assert route.predicted is not None and late_s > 0
    assert route.predicted.transfer_exposed_s == pytest.approx(late_s + H200.kv(0) / rate + 0.02)


def test_the_measured_round_trip_counts_where_none_is_configured():
    """What the configuration says is not measured anew; nonsense is no measurement."""
    rate = 100 * GBPS
    for configured, measured, expected in (
        (0.02, 0.08, 0.02),
        (None, 0.08, 0.08),
        (None, None, 0),
        (None, math.nan, 0),
    ):
        params = timed(
            links={(FAR, NEAR): replace(line(100), rtt_s=measured)},
            rtt_s={} if configured is None else {(FAR, NEAR): configured},
        )
        route = choose(prompt(30_001), NO_MATCHES, pair(), params)
        assert route.predicted is not None
        assert route.predicted.transfer_exposed_s == pytest.approx(H200.kv(0) / rate + expected)


def test_kv_at_the_decode_node_makes_the_transfer_shorter():
    """M2 in bytes: the missing rows and the whole state."""
    route = choose(prompt(30_001), holds(d0=(0, 20_000)), pair(), timed())
    assert route.transfer_tokens == 10_000
    assert route.transfer_bytes == round(H200.kv(30_000) - H200.kv(20_000) + H200.kv(0))


def test_the_node_with_the_earliest_first_token_prefills():
    """A longer queue in front of faster hardware may be the shorter wait; tokens alone would say otherwise."""
    view = cluster(
        on("h200", far("p0", 60_000)), on("h20", far("p1", 40_000)), on("h20", near("d0", Role.DECODE))
    )  # fmt: skip
    assert choose(prompt(30_000), NO_MATCHES, view, timed()).prefill == "p0"
    assert choose(prompt(30_000), NO_MATCHES, view, RoutingParams(19_400)).prefill == "p1"


def test_a_node_without_a_profile_makes_all_of_its_class_count_in_tokens():
    """Seconds and tokens are not compared."""
    view = cluster(on("h200", far("p0", 60_000)), on("?", far("p1", 40_000)), on("h20", near("d0", Role.DECODE)))
    route = choose(prompt(30_000), NO_MATCHES, view, timed())
    assert (route.prefill, route.predicted, route.transfer_bytes) == ("p1", None, None)


def test_a_cached_prefix_attracts_by_the_seconds_that_it_saves():
    """Until the queue in front of its holder is longer than that."""
    saved_s = H200.prefill_s(30_000)
    ahead = round(saved_s / (H200.prefill_s(45_000) / 45_000))
    for queue, expected in ((ahead - 500, "p0"), (ahead + 500, "p1")):
        view = cluster(on("h200", far("p0", queue)), on("h200", far("p1")), on("h20", near("d0", Role.DECODE)))
        assert choose(prompt(60_001), holds(p0=(30_000, 30_000)), view, timed()).prefill == expected


def test_a_full_batch_is_avoided_and_waited_for():
    """The decode node with a free slot is taken; where none is, the wait is what those ahead still need."""
    full = near("d0", Role.DECODE, committed=1)
    free = near("d1", Role.DECODE, committed=500_000)
    view = cluster(
        on("h200", far("p0")),
        on("h20", full, active_sequences=20, max_batch=20),
        on("h20", free, active_sequences=19, max_batch=20),
    )
    assert choose(prompt(30_000), NO_MATCHES, view, timed()).decode == "d1"
    only = cluster(on("h200", far("p0")), on("h20", full, active_sequences=24, max_batch=20))
    route = choose(prompt(30_001), NO_MATCHES, only, timed())
    assert route.predicted is not None
    others_s = route.predicted.prefill_s + route.predicted.transfer_exposed_s
    assert route.predicted.decode_queue_s == pytest.approx(5 * 1024 * 0.025 / 20 - others_s)


def test_a_mixed_node_prefills_at_its_share():
    """A quarter of its time: four times as long, and its steps are stretched as well."""
    view = cluster(replace(on("h20", near("d0", Role.MIXED)), prefill_share=0.25))
    route = choose(prompt(5_001), NO_MATCHES, view, timed())
    assert route.prefill == "d0" and route.predicted is not None
    assert route.predicted.prefill_s == pytest.approx(4 * H20.prefill_s(5_000))
    assert route.predicted.first_decode_step_s == pytest.approx((0.007 + 0.0009) / 0.75)
    assert route.predicted.transfer_exposed_s == 0.0


# -- spill-over


def test_a_class_that_would_be_late_hands_over():
    """A short prompt goes there when the nodes here are busy, a long one stays when those there are, if the other class
    keeps the objective."""
    late_here = choose(prompt(10_000), NO_MATCHES, pair(near_queue=100_000), timed(ttft_slo_s=5.0))
    assert (late_here.prefill, late_here.reason) == ("p0", Reason.SPILLED_REMOTE)
    late_there = choose(prompt(21_000), NO_MATCHES, pair(far_queue=200_000), timed(ttft_slo_s=5.0))
    assert (late_there.prefill, late_there.reason) == ("l0", Reason.SPILLED_LOCAL)
    assert late_there.uncached_tokens == 21_000


def test_nobody_hands_over_without_an_objective_or_without_a_gain():
    """In time, not known to be late, or late both ways."""
    busy = pair(near_queue=100_000, far_queue=400_000)
    for view, params in (
        (pair(near_queue=100_000), timed()),
        (pair(near_queue=10_000), timed(ttft_slo_s=5.0)),
        (busy, timed(ttft_slo_s=5.0)),
        (pair(near_queue=100_000), timed(ttft_slo_s=5.0, links={(FAR, NEAR): line(None)})),
        (pair(near_queue=100_000), timed(ttft_slo_s=5.0, links={})),
        (pair(near_queue=100_000), RoutingParams(19_400, ttft_slo_s=5.0)),
    ):
        assert choose(prompt(10_000), NO_MATCHES, view, params).reason is Reason.SHORT_PROMPT


def test_the_other_class_must_have_room_to_spare():
    """Just keeping the objective is not enough: two loaded classes would pass requests back and forth."""
    view = pair(near_queue=400_000)
    remote = choose(prompt(30_000), NO_MATCHES, pair(), timed()).predicted_ttft_s
    assert remote is not None
    for slo_s, reason in ((remote / 0.75, Reason.SPILLED_REMOTE), (remote / 0.85, Reason.SHORT_PROMPT)):
        route = choose(prompt(30_000), NO_MATCHES, view, timed(40_000, ttft_slo_s=slo_s))
        assert route.reason is reason


# -- modes and bounds


@pytest.mark.parametrize(("mode", "path"), [(Mode.ALWAYS, Path.REMOTE), (Mode.NEVER, Path.LOCAL)])
def test_a_mode_overrules_the_length(mode, path):
    """Short or long, in time or late."""
    params = timed(mode=mode, ttft_slo_s=0.1)
    for tokens in (10, 90_000):
        route = choose(prompt(tokens), NO_MATCHES, pair(), params)
        assert (route.path, route.reason.value) == (path, f"mode_{mode.value}")


def test_always_is_as_far_as_possible():
    """Without the other region the prompt is prefilled here rather than not at all."""
    view = cluster(near("l0", Role.PREFILL), near("d0", Role.DECODE))
    route = choose(prompt(10), NO_MATCHES, view, RoutingParams(100, mode=Mode.ALWAYS))
    assert (route.prefill, route.reason) == ("l0", Reason.NO_REMOTE_PREFILL)


def test_field_L4_bounds_hold_for_the_rule_and_for_the_spill_over():
    """Up to t_min always here, above t_force always there, whatever t is and however late it gets."""
    bounded = timed(50_000, t_min=5_000, t_force=30_000, ttft_slo_s=5.0)
    forced = choose(prompt(31_000), NO_MATCHES, pair(far_queue=400_000), bounded)
    assert (forced.path, forced.threshold_tokens) == (Path.REMOTE, 30_000)
    kept = choose(prompt(5_000), NO_MATCHES, pair(near_queue=400_000), replace(bounded, threshold_tokens=0))
    assert (kept.path, kept.threshold_tokens) == (Path.LOCAL, 5_000)
    between = choose(prompt(20_000), NO_MATCHES, pair(near_queue=400_000), bounded)
    assert between.reason is Reason.SPILLED_REMOTE


def test_field_L5_what_is_cached_counts_in_tokens_wherever_it_lies():
    """A mostly cached prompt stays, with profiles or without: what decides is how many tokens are left."""
    for params in (timed(1000), PARAMS):
        route = choose(prompt(64_000), holds(l0=(63_488, 63_488)), pair(), params)
        assert (route.prefill, route.reason, route.uncached_tokens) == ("l0", Reason.SHORT_PROMPT, 512)


# -- fetching a prefix from the other region


def test_a_pull_is_priced_against_computing():
    """Bytes of the rows that are missing and the state there, over the line, against prefill of the difference."""
    params = timed(1000, abundant=True)
    route = choose(prompt(60_001), holds(l0=(30_000, 30_000)), pair(), params)
    assert route.prefill == "p0" and route.pull is not None
    pull, nbytes = route.pull, H200.kv_bytes(30_000)
    assert (pull.source, pull.tokens, pull.nbytes) == ("l0", 30_000, round(nbytes))
    assert pull.transfer_s == pytest.approx(nbytes / (100 * GBPS) + 0.02)
    assert pull.recompute_s == pytest.approx(H200.prefill_s(30_000))
    assert pull.pays and not pull.chosen and route.prefill_tokens == 60_001


def test_a_pull_that_can_be_made_and_pays_is_counted_on():
    """Then the longer of both caches is what the rule counts; a slow line or no such worker, and it is not."""
    held = holds(p0=(30_000, 30_000))
    pulled = choose(prompt(31_001), held, pair(), timed(2000, abundant=True, cache_pulls=True))
    assert (pulled.prefill, pulled.uncached_tokens, pulled.prefill_tokens) == ("l0", 1001, 1001)
    assert pulled.pull is not None and pulled.pull.chosen and pulled.predicted is not None
    assert pulled.predicted.prefill_s == pytest.approx(H20.prefill_s(31_000, 30_000))
    assert pulled.predicted.transfer_exposed_s == pytest.approx(pulled.pull.transfer_s)
    slow = {(FAR, NEAR): line(0.1), (NEAR, FAR): line(0.1, back=True)}
    for params in (
        timed(2000, abundant=True, cache_pulls=True, links=slow),
        timed(2000, abundant=True),
        timed(2000, cache_pulls=True),
    ):
        route = choose(prompt(31_001), held, pair(), params)
        assert (route.prefill, route.uncached_tokens) == ("p0", 31_001)
        assert route.pull is None or not route.pull.chosen


def test_an_abundant_link_counts_the_longer_of_both_caches():
    """Abundant: l_total - max(l_prfaas, l_pd)."""
    params = timed(1000, abundant=True, cache_pulls=True)
    route = choose(prompt(9000), holds(p0=(8500, 8500)), pair(), params)
    assert (route.path, route.reason, route.uncached_tokens) == (Path.LOCAL, Reason.SHORT_PROMPT, 500)
    assert choose(prompt(9000), holds(l0=(7000, 7000), p0=(7900, 7900)), pair(), params).uncached_tokens == 1100
    assert choose(prompt(9000), holds(l0=(7900, 7900), p0=(7000, 7000)), pair(), params).uncached_tokens == 1100


def test_equal_caches_mean_no_pull():
    """Both empty is the common case."""
    for held in (NO_MATCHES, holds(l0=(8000, 8000), p0=(8000, 8000))):
        assert choose(prompt(60_000), held, pair(), timed(1000, abundant=True, cache_pulls=True)).pull is None


def test_field_G3_nothing_is_pulled_from_another_namespace():
    """A longer prefix of another model's KV is none."""
    view = pair()
    alien = replace(view.nodes[NodeId("l0")], id=NodeId("l1"), namespace=Namespace("other"))
    view = replace(view, nodes={**view.nodes, alien.id: alien})
    route = choose(prompt(60_001), holds(l1=(30_000, 30_000)), view, timed(1000, abundant=True, cache_pulls=True))
    assert route.prefill == "p0" and route.pull is None


def test_better_known_loads_count():
    """What the view knows beyond the reports."""
    view = cluster(on("h200", far("p0")), on("h200", far("p1", 9)), on("h20", near("d0", Role.DECODE)))
    busy = replace(view, loads={NodeId("p0"): NodeLoad(queued_prefill_tokens=500)})
    assert choose(prompt(30_000), NO_MATCHES, view, timed()).prefill == "p0"
    assert choose(prompt(30_000), NO_MATCHES, busy, timed()).prefill == "p1"
    assert choose(prompt(30_000), NO_MATCHES, busy, RoutingParams(100)).prefill == "p1"


def test_the_shortest_queues_are_found_whatever_is_left_out():
    """Of nodes that differ in nothing but their queue only the shortest is weighed; weighing all gives the same."""
    for seed in range(60):
        chance = random.Random(seed)
        nodes = [
            on(chance.choice(("h200", "h20")), far(f"p{i}", chance.choice((0, 0, 5_000, 40_000)))) for i in range(8)
        ]
        view = cluster(*nodes, on("h20", near("d0", Role.DECODE)))
        held = holds(**{f"p{i}": (chance.choice((0, 8_000)), 0) for i in chance.sample(range(8), 3)})
        route = choose(prompt(30_001, name=str(seed)), held, view, timed())
        best = min(
            each.load.queued_prefill_tokens * PROFILES[each.hardware].prefill_s(45_000) / 45_000
            + PROFILES[each.hardware].prefill_s(30_000, held.get(each.id, Match()).joint)
            for each in nodes
        )
        assert route.predicted is not None
        assert route.predicted.prefill_queue_s + route.predicted.prefill_s == pytest.approx(best)


def test_a_pd_node_of_another_region_is_not_a_neighbour():
    """It belongs to another cluster, whatever prefix it holds."""
    view = pair()
    elsewhere = replace(view.nodes[NodeId("l0")], id=NodeId("l9"), region=FAR)
    view = replace(view, nodes={**view.nodes, elsewhere.id: elsewhere})
    route = choose(prompt(5_000), holds(l9=(4_992, 4_992)), view, timed())
    assert route.prefill == "l0" and "l9" not in {way.prefill for way in route.alternatives}
