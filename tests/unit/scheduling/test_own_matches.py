"""Opposite `prfaas/scheduling/own_matches.py`: prefixes that one engine alone can use."""

from prfaas.cluster import NodeId, Role
from prfaas.request import NO_MATCHES, Match, Path
from prfaas.scheduling.own_matches import OwnMatches
from prfaas.scheduling.region_matches import RegionMatches
from prfaas.scheduling.routing import RoutingParams, choose
from tests.unit.scheduling.test_routing import ABUNDANT, PARAMS, cluster, far, near, prompt

P0, P1, D0, D1 = map(NodeId, ("p0", "p1", "d0", "d1"))
VIEW = cluster(far("p0"), far("p1"), near("d0", Role.MIXED), near("d1", Role.MIXED))


def test_what_an_engine_has_is_beside_what_its_region_has():
    """Its nodes are named first, and only it has it."""
    region = RegionMatches(VIEW, {VIEW.nodes[P0].region: {VIEW.nodes[P0].namespace: Match(64, 128)}})
    found = OwnMatches(region, {P1: Match(own=640), D0: Match(own=64)})
    assert (found[P1], found.get(P0), found.get(D0)) == (Match(64, 128, 640), Match(64, 128), Match(own=64))
    assert found.get(D1) is None and found.get(D1, 7) == 7
    assert list(found) == ["p1", "d0", "p0"] and len(found) == 3


def test_a_prefill_goes_where_its_prefix_is():
    """In the other region, where the node is not the least loaded one, and at home, where that makes the prompt
    short."""
    view = cluster(far("p0"), far("p1", queued=500), near("d0", Role.DECODE))
    route = choose(prompt(9000), OwnMatches(NO_MATCHES, {P1: Match(own=6400)}), view, PARAMS)
    assert (route.prefill, route.prefill_tokens) == (P1, 9000 - 6400)
    assert route.transfer_tokens == 8999, "what prefill has, decode has not"
    route = choose(prompt(9000), OwnMatches(NO_MATCHES, {D1: Match(own=8960)}), VIEW, PARAMS)
    assert (route.path, route.prefill, route.decode, route.prefill_tokens) == (Path.LOCAL, D1, D1, 40)


def test_a_prefix_attracts_until_its_holder_is_busy():
    view = cluster(far("p0"), far("p1", queued=50_000), near("d0", Role.DECODE))
    assert choose(prompt(9000), OwnMatches(NO_MATCHES, {P1: Match(own=6400)}), view, PARAMS).prefill == P0


def test_nobody_can_be_sent_it():
    """It is no source of a pull, whatever there is of bandwidth; and a decode node that does not prefill has no use
    for it."""
    local = RoutingParams(1 << 20, abundant=True, cache_pulls=True)
    route = choose(prompt(9000), OwnMatches(NO_MATCHES, {P1: Match(own=6400)}), VIEW, local)
    assert (route.path, route.pull) == (Path.LOCAL, None)
    assert choose(prompt(9000), OwnMatches(NO_MATCHES, {P1: Match(own=6400)}), VIEW, ABUNDANT).pull is None
    view = cluster(far("p0"), near("d0", Role.DECODE), near("d1", Role.DECODE, committed=10))
    assert choose(prompt(9000), OwnMatches(NO_MATCHES, {D1: Match(own=6400)}), view, PARAMS).decode == D0
