"""What the regions' caches hold of one prompt, as the decision reads it: node by node.

The cache is regional: all nodes of a region that serve the same namespace have the same match. So this mapping answers
for any node, and names only one in each region: as a place that the longer prefix of a region can be had from.
"""

from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import TypeVar, overload

from prfaas.cluster import ClusterView, Namespace, NodeId, RegionId
from prfaas.request import Match

#: So many of the least loaded nodes of a class are looked at for one of a region.
_LOOKED_AT = 64


D = TypeVar("D")


class RegionMatches(Mapping[NodeId, Match]):
    """`by_region`: of each region the match of each namespace that is cached there."""

    __slots__ = ("_by_region", "_nodes", "_view")

    def __init__(self, view: ClusterView, by_region: Mapping[RegionId, Mapping[Namespace, Match]]) -> None:
        self._view, self._nodes, self._by_region = view, view.nodes, by_region

    def __getitem__(self, name: NodeId) -> Match:
        node = self._nodes[name]
        return self._by_region[node.region][node.namespace]

    @overload
    def get(self, name: NodeId, /) -> Match | None: ...
    @overload
    def get(self, name: NodeId, /, default: Match | D) -> Match | D: ...
    def get(self, name: NodeId, /, default: Match | D | None = None) -> Match | D | None:
        """A decision asks dozens of times, as a rule for nodes of regions that hold nothing."""
        node = self._nodes.get(name)
        matches = self._by_region.get(node.region) if node is not None else None
        return default if node is None or matches is None else matches.get(node.namespace, default)

    def __iter__(self) -> Iterator[NodeId]:
        """The least loaded node of each region that holds something, the longest match first."""
        wanted = {(region, name) for region, by in self._by_region.items() for name, match in by.items() if match.kv}
        found: list[NodeId] = []
        for name in self._named():
            node = self._nodes[name]
            if (place := (node.region, node.namespace)) in wanted:
                wanted.discard(place)
                found.append(name)
                if not wanted:
                    break
        return iter(sorted(found, key=lambda name: (-self[name].joint, -self[name].kv, name)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _named(self) -> Iterator[NodeId]:
        view = self._view
        classes = (view.remote_prefill, view.local_prefill, view.decode)
        return chain.from_iterable(islice(nodes, _LOOKED_AT) for nodes in classes)
