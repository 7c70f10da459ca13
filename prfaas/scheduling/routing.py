"""Where a request is prefilled and decoded: the paper's length rule over what is cached and how busy nodes are.

Two matches count. The *joint* match of the prefill node decides what must be computed (M1), and that is what the rule
compares with the threshold; the *KV* match of the decode node decides what must be moved (M2). The view keeps each
class of nodes ordered by load, so a decision weighs the least loaded few and the known holders of a prefix, never the
whole cluster.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from prfaas.cluster import ClusterView, Node, NodeId, NodeKind
from prfaas.errors import ModelNotFound, PeerUnavailable
from prfaas.request import Alternative, Match, Matches, Path, Reason, Request, Route

#: Of each class this many of the least loaded nodes are weighed, and this many holders of a prefix.
LEAST_LOADED = 8
PREFIX_HOLDERS = 16
#: Where no PD node prefills, a decode node computes up to this much by itself rather than have it sent from afar: about
#: one chunk, so that the sequences it decodes wait for one step.
OWN_PREFILL_TOKENS = 512

_NO_MATCH = Match()


@dataclass(frozen=True, slots=True)
class RoutingParams:
    """`abundant`: the link has room to spare, so that a prefix cached on either side counts."""

    threshold_tokens: int
    abundant: bool = False


def choose(
    request: Request,
    matches: Matches,
    view: ClusterView,
    params: RoutingParams,
    avoid: frozenset[NodeId] = frozenset(),
) -> Route:
    """The route of a request. `avoid` names nodes that failed it before: they are not used again, in either class.

    `matches` lists the best holders first. Raises ModelNotFound, or PeerUnavailable when no node is left to decode.
    """
    field = _Field(request, matches, view, avoid)
    decode = field.decode_node()
    own, beside, remote = field.way(decode, decode), field.beside(decode), field.remote(decode)
    local = field.local(decode, own, beside)
    ways = tuple(way for way in (own, beside, remote) if way is not None)
    compared = (local or own, remote) if params.abundant and remote is not None else (local or own,)
    uncached = min(way.uncached_tokens for way in compared)

    # In order: a short prompt stays with a PD node that prefills; where none does, the decode node computes a few
    # tokens by itself and more than that comes from the other region. A long prompt goes to the other region. What
    # cannot go where it should stays, and the decode node itself is the last resort of all.
    if uncached <= params.threshold_tokens and local is not None:
        return _route(local, Reason.SHORT_PROMPT, uncached, params, ways)
    if uncached <= params.threshold_tokens and own.uncached_tokens <= OWN_PREFILL_TOKENS:
        return _route(own, Reason.SHORT_PROMPT, uncached, params, ways)
    if remote is not None:
        reason = Reason.NO_LOCAL_PREFILL if uncached <= params.threshold_tokens else Reason.LONG_PROMPT
        return _route(remote, reason, uncached, params, ways)
    return _route(local or own, Reason.FALLBACK if avoid else Reason.NO_REMOTE_PREFILL, uncached, params, ways)


def fallback(
    request: Request,
    matches: Matches,
    view: ClusterView,
    params: RoutingParams,
    avoid: frozenset[NodeId] = frozenset(),
) -> Route:
    """Prefill where it decodes, whatever the length: nothing has to move, so nothing can break on the way."""
    field = _Field(request, matches, view, avoid)
    decode = field.decode_node()
    own = field.way(decode, decode)
    return _route(own, Reason.FALLBACK, own.uncached_tokens, params, (own,))


def _route(
    best: Alternative, reason: Reason, uncached_tokens: int, params: RoutingParams, ways: tuple[Alternative, ...]
) -> Route:
    return Route(
        prefill=best.prefill,
        decode=best.decode,
        path=best.path,
        reason=reason,
        uncached_tokens=uncached_tokens,
        transfer_tokens=best.transfer_tokens,
        threshold_tokens=params.threshold_tokens,
        alternatives=tuple(way for way in ways if way is not best),
    )


@dataclass(frozen=True, slots=True)
class _Field:
    """The nodes that one request may use, and what each would cost it. Costs are tokens: those that wait in front of
    the request plus those the request itself adds, so that a cached prefix attracts only until its holder is busy."""

    request: Request
    matches: Matches
    view: ClusterView
    avoid: frozenset[NodeId]

    def decode_node(self) -> Node:
        """The decode node with the least to hold, to prefill and to receive."""

        def cost(node: Node) -> tuple[int, int]:
            load = node.load
            tokens = load.committed_tokens + load.queued_prefill_tokens + self._missing_kv(node)
            return tokens, load.active_sequences

        nodes = self._candidates(self.view.decode, lambda node: node.kind is NodeKind.PD and node.role.decodes)
        if not nodes:
            raise self._nothing_decodes()
        return self._least(nodes, cost)

    def beside(self, decode: Node) -> Alternative | None:
        """The best prefilling PD node other than the decode node."""
        return self._prefill(self.view.local_prefill, decode, lambda node: node.kind is NodeKind.PD)

    def remote(self, decode: Node) -> Alternative | None:
        """The best prefill worker of another region."""
        return self._prefill(
            self.view.remote_prefill,
            decode,
            lambda node: node.kind is NodeKind.PREFILL_WORKER and node.region != decode.region,
        )

    def local(self, decode: Node, own: Alternative, beside: Alternative | None) -> Alternative | None:
        """The decode node when it prefills and is no more loaded than the one beside it: then no KV moves."""
        if decode.role.prefills and (beside is None or self._prefill_cost(own) <= self._prefill_cost(beside)):
            return own
        return beside

    def way(self, prefill: Node, decode: Node) -> Alternative:
        return Alternative(
            path=Path.REMOTE if prefill.kind is NodeKind.PREFILL_WORKER else Path.LOCAL,
            prefill=prefill.id,
            decode=decode.id,
            uncached_tokens=self._uncached(prefill),
            transfer_tokens=0 if prefill.id == decode.id else self._missing_kv(decode),
        )

    def _prefill(self, by_load: Iterable[NodeId], decode: Node, in_class: Callable[[Node], bool]) -> Alternative | None:
        def fits(node: Node) -> bool:
            return node.role.prefills and node.id != decode.id and node.can_push_to(decode) and in_class(node)

        nodes = self._candidates(by_load, fits)
        if not nodes:
            return None
        best = self._least(nodes, lambda node: (node.load.queued_prefill_tokens + self._uncached(node), 0))
        return self.way(best, decode)

    def _prefill_cost(self, way: Alternative) -> int:
        return self.view.nodes[way.prefill].load.queued_prefill_tokens + way.uncached_tokens

    def _candidates(self, by_load: Iterable[NodeId], fits: Callable[[Node], bool]) -> list[Node]:
        """The least loaded nodes of a class and those of its nodes that hold a prefix."""
        known = self.view.nodes
        idle = islice((node for name in by_load if self._usable(node := known[name]) and fits(node)), LEAST_LOADED)
        found = {node.id: node for node in idle}
        for name in islice(self.matches, PREFIX_HOLDERS):
            # The index may still know a holder that has left, and only the class lists leave draining nodes out.
            holder = known.get(name)
            if holder is not None and not holder.load.draining and self._usable(holder) and fits(holder):
                found[name] = holder
        return list(found.values())

    def _usable(self, node: Node) -> bool:
        return node.model == self.request.model and node.id not in self.avoid

    def _uncached(self, prefill: Node) -> int:
        joint = self.matches.get(prefill.id, _NO_MATCH).joint
        return self.request.prompt_tokens - min(joint, self.request.handoff_tokens)

    def _missing_kv(self, decode: Node) -> int:
        return max(0, self.request.handoff_tokens - self.matches.get(decode.id, _NO_MATCH).kv)

    def _least(self, nodes: list[Node], cost: Callable[[Node], tuple[int, int]]) -> Node:
        costs = [cost(node) for node in nodes]
        lowest = min(costs)
        equal = [node for node, its_cost in zip(nodes, costs, strict=True) if its_cost == lowest]
        return equal[0] if len(equal) == 1 else min(equal, key=self._tie)

    def _tie(self, node: Node) -> bytes:
        """Differs from request to request, so that all routers do not pick the same of several idle nodes."""
        return hashlib.sha256(f"{self.request.id} {node.id}".encode()).digest()

    def _nothing_decodes(self) -> ModelNotFound | PeerUnavailable:
        model = self.request.model
        if any(node.model == model and node.kind is NodeKind.PD for node in self.view.nodes.values()):
            return PeerUnavailable("cluster", f"no decode node of {model} is left for this request")
        return ModelNotFound(model)
