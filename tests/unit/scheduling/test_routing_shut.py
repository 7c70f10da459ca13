"""Routes around open breakers."""

from dataclasses import replace
from types import MappingProxyType

import pytest

from prfaas.cluster import NodeId, RegionId, Role
from prfaas.request import NO_MATCHES, Match, Mode, Path, Reason, Request, RequestId, Route, Sampling
from prfaas.scheduling.routing import LEAST_LOADED, RoutingParams, choose
from prfaas.scheduling.shut import OPEN_TO_ALL, Shut
from tests.unit.scheduling.test_routing import cluster, far, near

PARAMS = RoutingParams(threshold_tokens=1000)
LONG = Request(id=RequestId("r"), model="m", prompt=bytes(4 * 5000), sampling=Sampling(max_tokens=10))
FAR, NEAR = RegionId("far"), RegionId("near")
CLUSTER = cluster(far("p0"), far("p1", queued=100), near("d0", Role.DECODE))


def source(*names: str) -> Shut:
    return Shut(sources=frozenset(map(NodeId, names)))


def pair(prefill: str, decode: str) -> Shut:
    return Shut(pairs=MappingProxyType({NodeId(decode): frozenset({NodeId(prefill)})}))


LINK = Shut(links=frozenset({(FAR, NEAR)}))


def route(shut: Shut, view=CLUSTER, matches=NO_MATCHES, **changes: object) -> Route:
    return choose(LONG, matches, view, replace(PARAMS, **changes).with_shut(shut))


@pytest.mark.parametrize("shut", [source("p0"), pair("p0", "d0")], ids=["source", "pair"])
def test_another_source_is_taken(shut):
    """Busier, but its breaker is closed. The shut one is no alternative either."""
    chosen = route(shut)
    assert (chosen.prefill, chosen.reason) == ("p1", Reason.LONG_PROMPT)
    assert "p0" not in {each.prefill for each in chosen.alternatives}


@pytest.mark.parametrize("shut", [OPEN_TO_ALL, pair("p0", "d1"), Shut(links=frozenset({(NEAR, FAR)}))])
def test_other_pairs_and_the_way_back_do_not_matter(shut):
    """Toward another decode node, in the other direction."""
    assert route(shut).prefill == "p0"


@pytest.mark.parametrize("shut", [source("p0", "p1"), LINK], ids=["all sources", "the link"])
@pytest.mark.parametrize("mode", [Mode.AUTO, Mode.ALWAYS])
def test_where_all_are_shut_the_prompt_stays_and_says_why(shut, mode):
    """Whatever the mode."""
    chosen = route(shut, mode=mode)
    assert (chosen.path, chosen.prefill, chosen.reason) == (Path.LOCAL, "d0", Reason.BREAKER_OPEN)


def test_without_any_prefill_node_breakers_are_not_the_reason():
    """There is nothing to be shut."""
    assert route(LINK, cluster(near("d0", Role.DECODE))).reason is Reason.NO_REMOTE_PREFILL


def test_a_shut_holder_of_the_prefix_is_not_taken_for_its_prefix():
    """However much it holds."""
    matches = {NodeId("p0"): Match(joint=4500, kv=4500)}
    assert route(source("p0"), matches=matches).prefill == "p1"
    assert route(LINK, matches=matches).prefill == "d0"


def test_shut_nodes_do_not_hide_the_others():
    """More of them are less loaded than are looked at."""
    many = cluster(*(far(f"p{number}") for number in range(LEAST_LOADED)), far("q", queued=9), near("d0", Role.DECODE))
    names = [f"p{number}" for number in range(LEAST_LOADED)]
    assert route(source(*names), many).prefill == "q"


def test_a_shut_neighbour_leaves_a_short_prompt_to_the_decode_node():
    """Pairs within a region have breakers as well."""
    view = cluster(near("m0", Role.PREFILL), near("d0", Role.DECODE))
    short = replace(LONG, prompt=bytes(4 * 300))
    assert choose(short, NO_MATCHES, view, PARAMS).prefill == "m0"
    assert choose(short, NO_MATCHES, view, PARAMS.with_shut(source("m0"))).prefill == "d0"


def test_what_is_shut_changes_nothing_else_of_the_rule():
    """Nor is anything worked out again for it."""
    other = PARAMS.with_shut(LINK)
    assert other.lanes is PARAMS.lanes and other.shut is LINK and PARAMS.shut is OPEN_TO_ALL
    assert replace(other, shut=OPEN_TO_ALL) == PARAMS
    assert PARAMS.with_shut(OPEN_TO_ALL) is PARAMS
