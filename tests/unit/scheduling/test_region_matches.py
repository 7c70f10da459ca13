"""Opposite `prfaas/scheduling/region_matches.py`."""

from dataclasses import replace

from prfaas.cluster import ClusterView, Namespace, NodeId, RegionId, Role
from prfaas.request import Match
from prfaas.scheduling.region_matches import RegionMatches
from prfaas.scheduling.routing import RoutingParams, choose
from tests.unit.scheduling.test_routing import cluster, far, near, prompt

NS, FAR, NEAR = far("p0").namespace, far("p0").region, near("d0", Role.DECODE).region
VIEW = cluster(far("p0"), far("p1"), near("d0", Role.DECODE), near("l0", Role.PREFILL))


def matches(view: ClusterView = VIEW, **by_region: Match) -> RegionMatches:
    places = {"far": FAR, "near": NEAR}
    return RegionMatches(view, {places[name]: {NS: match} for name, match in by_region.items()})


def test_all_nodes_of_a_region_have_its_match():
    """The cache is the region's."""
    found = matches(far=Match(640, 1280), near=Match(0, 64))
    assert found.get(NodeId("p0")) == found.get(NodeId("p1")) == Match(640, 1280)
    assert found[NodeId("d0")] == Match(0, 64)
    assert found.get(NodeId("gone")) is None and found.get(NodeId("gone"), 5) == 5
    assert matches(far=Match(64, 64)).get(NodeId("d0")) is None


def test_a_node_of_another_namespace_has_none():
    """Keys of one namespace say nothing about another."""
    other = replace(far("p1"), namespace=Namespace("other"))
    view = cluster(far("p0"), other, near("d0", Role.DECODE))
    assert matches(view, far=Match(640, 640)).get(NodeId("p1")) is None


def test_it_names_one_node_of_each_region_that_holds_something():
    """As sources of a pull, the longest first; the others are weighed by their load anyway."""
    assert list(matches(far=Match(64, 640), near=Match(128, 128))) == ["l0", "p0"]
    assert list(matches(far=Match(64, 640), near=Match())) == ["p0"]
    assert len(matches()) == 0


def test_the_rule_compares_what_is_left_of_the_prompt():
    """A prompt whose prefix the PD region has is short."""
    params = RoutingParams(1000)
    whole = choose(prompt(5000), matches(), VIEW, params)
    cached = choose(prompt(5000), matches(near=Match(4480, 4992)), VIEW, params)
    assert (whole.prefill in {"p0", "p1"}, whole.transfer_tokens) == (True, 4999)
    assert (cached.uncached_tokens, cached.prefill_tokens) == (520, 520)
    assert VIEW.nodes[cached.prefill].region == NEAR
    assert cached.transfer_tokens in {0, 4999 - 4992}
    assert RegionId("far") != NEAR
