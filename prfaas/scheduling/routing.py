"""Where a request is prefilled and decoded: the paper's length rule over what is cached and how busy nodes are.

Two matches count. The *joint* match of the prefill node decides what must be computed (M1), and that is what the rule
compares with the threshold; the *KV* match of the decode node decides what must be moved (M2). The rule finds the
class, the expected time to the first token the node within it, and whether the other class has to help out. The view
keeps each class of nodes ordered by load, so a decision weighs the least loaded few and the known holders of a prefix,
never the whole cluster.
"""

from collections.abc import Callable

from prfaas.cluster import ClusterView, NodeId
from prfaas.request import Alternative, Matches, Mode, Reason, Request, Route
from prfaas.scheduling.candidates import LEAST_LOADED, PREFIX_HOLDERS
from prfaas.scheduling.rule import RoutingParams
from prfaas.scheduling.ways import Ways

__all__ = ["LEAST_LOADED", "OWN_PREFILL_TOKENS", "PREFIX_HOLDERS", "Choose", "RoutingParams", "choose", "fallback"]

#: The signature of both rules: the nodes to avoid come last.
Choose = Callable[[Request, Matches, ClusterView, RoutingParams, frozenset[NodeId]], Route]

#: Where no PD node prefills, a decode node computes up to this much by itself rather than have it sent from afar: about
#: one chunk, so that the sequences it decodes wait for one step.
OWN_PREFILL_TOKENS = 512


def choose(
    request: Request,
    matches: Matches,
    view: ClusterView,
    params: RoutingParams,
    avoid: frozenset[NodeId] = frozenset(),
) -> Route:
    """The route of a request. `avoid` names nodes that are not used, in either class, as those that failed it before.

    `matches` lists the best holders first. Raises PeerUnavailable when no node is left to decode.
    """
    ways = Ways(request, matches, view, params, avoid)
    own, beside, remote = ways.own(), ways.beside(), ways.remote()
    local = ways.local(own, beside)
    uncached = ways.compared_tokens(local or own, remote)
    best, reason = _class(own, local, remote, uncached, params)
    if reason is Reason.NO_REMOTE_PREFILL and ways.remote_is_shut():
        reason = Reason.BREAKER_OPEN
    best, reason = _spilled(best, reason, local, remote, uncached, ways)
    return ways.route(best, reason, uncached, [way for way in (own, beside, remote) if way is not None])


def fallback(
    request: Request,
    matches: Matches,
    view: ClusterView,
    params: RoutingParams,
    avoid: frozenset[NodeId] = frozenset(),
) -> Route:
    """Prefill where it decodes, whatever the length: nothing has to move, so nothing can break on the way."""
    ways = Ways(request, matches, view, params, avoid)
    own = ways.own()
    return ways.route(own, Reason.FALLBACK, own.uncached_tokens, (own,))


def _class(
    own: Alternative,
    local: Alternative | None,
    remote: Alternative | None,
    uncached_tokens: int,
    params: RoutingParams,
) -> tuple[Alternative, Reason]:
    """In order: the mode, where it leaves no choice. A short prompt stays with a PD node that prefills; where none
    does, the decode node computes a few tokens by itself and more than that comes from the other region. A long prompt
    goes to the other region. What cannot go where it should stays, and the decode node itself is the last resort."""
    if params.mode is Mode.NEVER:
        return local or own, Reason.MODE_NEVER
    if params.mode is Mode.ALWAYS and remote is not None:
        return remote, Reason.MODE_ALWAYS
    short = params.mode is Mode.AUTO and params.is_short(uncached_tokens)
    if short and local is not None:
        return local, Reason.SHORT_PROMPT
    if short and own.uncached_tokens <= OWN_PREFILL_TOKENS:
        return own, Reason.SHORT_PROMPT
    if remote is not None:
        return remote, Reason.NO_LOCAL_PREFILL if short else Reason.LONG_PROMPT
    return local or own, Reason.NO_REMOTE_PREFILL


def _spilled(
    best: Alternative,
    reason: Reason,
    local: Alternative | None,
    remote: Alternative | None,
    uncached_tokens: int,
    ways: Ways,
) -> tuple[Alternative, Reason]:
    """The other class, when this one would miss the objective and the other keeps it with room to spare."""
    match reason:
        case Reason.SHORT_PROMPT if ways.params.may_spill_remote(uncached_tokens):
            other, spilled = remote, Reason.SPILLED_REMOTE
        case Reason.LONG_PROMPT if ways.params.may_spill_local(uncached_tokens):
            other, spilled = local, Reason.SPILLED_LOCAL
        case _:
            return best, reason
    slo_s = ways.params.ttft_slo_s
    if slo_s is None or other is None or not ways.transfer_is_known(other):
        return best, reason
    expected_s, other_s = best.predicted_ttft_s, other.predicted_ttft_s
    if expected_s is None or other_s is None or expected_s <= slo_s or other_s > ways.params.spill_share * slo_s:
        return best, reason
    return other, spilled
