"""Routes around nodes that are known to be bad."""

import pytest

from prfaas.cluster import NodeId, Role
from prfaas.errors import PeerUnavailable
from prfaas.request import NO_MATCHES, Path, Reason, Request, RequestId, Route, Sampling
from prfaas.scheduling.routing import RoutingParams, choose
from prfaas.scheduling.shunning import Shunned, shunning
from tests.unit.scheduling.steering_scenes import PROFILES, node, view_of

RULE = RoutingParams(threshold_tokens=1000, profiles=PROFILES)


def route(shunned: Shunned, avoid: frozenset[NodeId] = frozenset()) -> Route:
    senders = [node(name, Role.PREFILL, far=True) for name in ("p0", "p1")]
    view = view_of(*senders, *(node(name, Role.MIXED) for name in ("d0", "d1")))
    request = Request(id=RequestId("0" * 32), model="m", prompt=bytes(4) * 8000, sampling=Sampling(max_tokens=1))
    return shunning(choose, lambda: shunned)(request, NO_MATCHES, view, RULE, avoid)


def nodes(*names: str) -> frozenset[NodeId]:
    return frozenset(NodeId(name) for name in names)


@pytest.mark.parametrize("kind", ["unreachable", "distrusted"])
def test_others_are_used_while_there_are_any(kind: str):
    """A bad prefill node: the other one. Both bad: the prompt stays here, however long it is. A bad decode node: the
    other one."""
    assert route(Shunned()).path is Path.REMOTE
    assert route(Shunned(**{kind: nodes("p0")})).prefill == "p1"
    here = route(Shunned(**{kind: nodes("p0", "p1")}))
    assert (here.path, here.reason) == (Path.LOCAL, Reason.NO_REMOTE_PREFILL)
    assert route(Shunned(**{kind: nodes("d0")})).decode == "d1"


def test_who_cannot_be_reached_is_tried_rather_than_nobody():
    """The link may be there again."""
    found = route(Shunned(unreachable=nodes("d0", "d1", "p0", "p1")))
    assert found.decode in nodes("d0", "d1")


def test_who_is_distrusted_is_not():
    """No answer is better than a wrong one."""
    with pytest.raises(PeerUnavailable):
        route(Shunned(distrusted=nodes("d0", "d1")))
    found = route(Shunned(unreachable=nodes("d0"), distrusted=nodes("d1", "p0", "p1")))
    assert (found.path, found.decode) == (Path.LOCAL, "d0")


def test_what_failed_the_request_stays_out_of_it():
    """A retry does not go back to a node that it has just come from because the others cannot be reached."""
    assert route(Shunned(unreachable=nodes("d1")), avoid=nodes("d0")).decode == "d1"
    with pytest.raises(PeerUnavailable):
        route(Shunned(unreachable=nodes("p0")), avoid=nodes("d0", "d1"))
