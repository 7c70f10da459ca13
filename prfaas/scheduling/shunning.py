"""Routes around nodes that are known to be bad before any request has failed on them.

Of two kinds: *unreachable* nodes are used when there are no others, because trying costs less than refusing; what is
*distrusted* is never used, because a wrong answer is worse than none.
"""

from collections.abc import Callable
from dataclasses import dataclass

from prfaas.cluster import ClusterView, NodeId
from prfaas.errors import PeerUnavailable
from prfaas.request import Matches, Request, Route
from prfaas.scheduling.routing import Choose, RoutingParams


@dataclass(frozen=True, slots=True)
class Shunned:
    unreachable: frozenset[NodeId] = frozenset()
    distrusted: frozenset[NodeId] = frozenset()


def shunning(choose: Choose, shunned: Callable[[], Shunned]) -> Choose:
    """`choose` among the other nodes. It is told whom it must not use besides, as of nodes that failed the request."""

    def chosen(
        request: Request, matches: Matches, view: ClusterView, params: RoutingParams, avoid: frozenset[NodeId]
    ) -> Route:
        bad = shunned()
        if not (bad.unreachable or bad.distrusted):
            return choose(request, matches, view, params, avoid)
        never = avoid | bad.distrusted
        try:
            return choose(request, matches, view, params, never | bad.unreachable)
        except PeerUnavailable:
            if bad.unreachable <= never:
                raise
            return choose(request, matches, view, params, never)

    return chosen
