"""The nodes that one request may use: of each class the least loaded few, and those that hold a prefix of it.

Whether a node may be used for a stage follows from its traits and from the model or the decode node's traits, so that
it is judged once for each pair of them and then remembered, over many requests.
"""

import hashlib
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import islice

from prfaas.cluster import ClusterView, Node, NodeId, NodeKind, RegionId, Role, Traits
from prfaas.errors import PeerUnavailable
from prfaas.remembered import Remembered
from prfaas.request import Matches, Request

#: Of each class this many of the least loaded nodes are weighed, and this many holders of a prefix.
LEAST_LOADED = 8
PREFIX_HOLDERS = 16

#: Looking up a member of an Enum costs more than comparing with it.
PREFILL, DECODE, PD, PREFILL_WORKER = Role.PREFILL, Role.DECODE, NodeKind.PD, NodeKind.PREFILL_WORKER


class Candidates:
    """`holders` are the named holders of a prefix, best first, as far as they can be used."""

    __slots__ = ("_avoid", "_request", "_view", "holders")

    def __init__(self, request: Request, matches: Matches, view: ClusterView, avoid: frozenset[NodeId]) -> None:
        self._request, self._view, self._avoid = request, view, avoid
        # The index may still know a holder that has left, and only the class lists leave draining nodes out.
        self.holders = [
            node
            for name in islice(matches, PREFIX_HOLDERS)
            if (node := view.nodes.get(name)) is not None and not node.traits.draining and name not in avoid
        ]

    def decoding(self) -> list[Node]:
        """Some may be named twice. Raises PeerUnavailable when no node is left."""
        found = self._fitting(self._view.decode, _decodes(self._request.model))
        if not found:
            raise PeerUnavailable("cluster", f"no decode node of {self._request.model} is left for this request")
        return found

    def beside(self, decode: Node, shut: frozenset[NodeId] = frozenset()) -> list[Node]:
        """PD nodes that prefill for it, within its region, without the shut ones; some may be named twice."""
        return self._fitting(self._view.local_prefill, _prefills_beside(decode.traits), decode, shut)

    def remote(
        self, decode: Node, shut: frozenset[NodeId] = frozenset(), regions: frozenset[RegionId] = frozenset()
    ) -> list[Node]:
        """Prefill workers that push into its region, without the shut ones and those of shut regions; some may be named
        twice."""
        return self._fitting(self._view.remote_prefill, _prefills_afar(decode.traits), None, shut, regions)

    def one_of(self, nodes: list[Node], tokens: Callable[[Node], tuple[int, int]]) -> Node:
        """The one with the fewest tokens. Of equals another one for another request."""
        if len(nodes) == 1:
            return nodes[0]
        costs = [tokens(node) for node in nodes]
        fewest = min(costs)
        nodes = [node for node, cost in zip(nodes, costs, strict=True) if cost == fewest]
        if len(nodes) == 1:
            return nodes[0]
        # Differs from request to request, so that all routers do not pick the same of several idle nodes.
        salt = f"{self._request.id} "
        return min(nodes, key=lambda node: hashlib.sha256((salt + node.id).encode()).digest())

    def _fitting(
        self,
        by_load: Iterable[NodeId],
        fits: Remembered[Traits, bool],
        other_than: Node | None = None,
        shut: frozenset[NodeId] = frozenset(),
        regions: frozenset[RegionId] = frozenset(),
    ) -> list[Node]:
        nodes, avoid, left, found = self._view.nodes, self._avoid, LEAST_LOADED, list[Node]()
        if shut:
            avoid = avoid | shut
        for name in by_load:
            node = nodes[name]
            if fits[node.traits] and node is not other_than and name not in avoid:
                if regions and node.region in regions:
                    continue
                found.append(node)
                left -= 1
                if not left:
                    break
        holders = self.holders
        if shut or regions:
            holders = [node for node in holders if node.id not in shut and node.region not in regions]
        return found + [node for node in holders if fits[node.traits] and node is not other_than]


@lru_cache(maxsize=64)
def _decodes(model: str) -> Remembered[Traits, bool]:
    return Remembered(lambda traits: traits.kind is PD and traits.role is not PREFILL and traits.model == model)


@lru_cache(maxsize=256)
def _prefills_beside(target: Traits) -> Remembered[Traits, bool]:
    return Remembered(
        lambda traits: traits.kind is PD and traits.region == target.region and _prefills_for(traits, target)
    )


@lru_cache(maxsize=256)
def _prefills_afar(target: Traits) -> Remembered[Traits, bool]:
    return Remembered(
        lambda traits: (
            traits.kind is PREFILL_WORKER and traits.region != target.region and _prefills_for(traits, target)
        )
    )


def _prefills_for(traits: Traits, target: Traits) -> bool:
    return traits.role is not DECODE and traits.model == target.model and traits.can_push_to(target)
