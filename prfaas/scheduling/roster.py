"""Since when each PD node has been what it is, and what it is on its way to.

A leader that has just taken over learns this anew: to it every node is new.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from prfaas.cluster import ClusterView, Incarnation, Node, NodeId, NodeKind
from prfaas.scheduling.assignment import same
from prfaas.scheduling.readings import known


@dataclass(frozen=True, slots=True)
class Pool:
    """PD nodes that can take each other's place, with their shares as planned, who is on the way to its share, and who
    should better be left as it is because it did not become what it should."""

    nodes: tuple[Node, ...]
    shares: Mapping[NodeId, float]
    converting: tuple[NodeId, ...]
    stuck: tuple[NodeId, ...]


@dataclass(slots=True)
class _Tenure:
    incarnation: Incarnation
    share: float
    since: float
    wanted: float | None = None
    wanted_since: float = -math.inf
    failed_at: float = -math.inf


#: A node that did not become what it should is left alone for so many times the timeout.
REST = 3.0


class Roster:
    """A node that has not become what it should after `convert_timeout_s` is taken for what it is."""

    def __init__(self, convert_timeout_s: float) -> None:
        self._convert_timeout_s = convert_timeout_s
        self._tenures: dict[NodeId, _Tenure] = {}

    def pool(self, view: ClusterView, model: str, now: float) -> Pool:
        """A pool is what can be paired: one model, and of several namespaces the most common. A node that is on its way
        to another role drains, but belongs to it; one that drains for another reason does not."""
        planned = view.plan.shares if view.plan is not None else {}
        pd = [node for _, node in sorted(view.nodes.items()) if node.kind is NodeKind.PD and node.model == model]
        spaces = [node.namespace for node in pd]
        main = max(sorted(set(spaces)), key=spaces.count, default=None)
        nodes, shares, converting = [], {}, []
        for node in pd:
            wanted = self._follow(node, planned.get(node.id), now)
            if node.namespace != main or (node.load.draining and wanted is None):
                continue
            nodes.append(node)
            shares[node.id] = node.share if wanted is None else wanted
            if wanted is not None:
                converting.append(node.id)
        self._tenures = {node.id: self._tenures[node.id] for node in pd}
        rest_s = REST * self._convert_timeout_s
        stuck = tuple(node.id for node in nodes if now - self._tenures[node.id].failed_at < rest_s)
        return Pool(tuple(nodes), MappingProxyType(shares), tuple(converting), stuck)

    def tenure_s(self, node: NodeId, now: float) -> float:
        """How long the node has lived with its present share, as far as it was seen."""
        return now - self._tenures[node].since

    def check(self) -> None:
        for tenure in self._tenures.values():
            assert tenure.wanted is None or tenure.since <= tenure.wanted_since

    def _follow(self, node: Node, planned: float | None, now: float) -> float | None:
        """The share that the node is on its way to."""
        tenure = self._tenures.get(node.id)
        if tenure is None or tenure.incarnation != node.incarnation or not same(tenure.share, node.share):
            tenure = self._tenures[node.id] = _Tenure(node.incarnation, node.share, now)
        wanted = known(planned)
        if wanted is None or same(wanted, node.share):
            tenure.wanted, tenure.wanted_since = None, -math.inf
        elif tenure.wanted is None or not same(tenure.wanted, wanted):
            tenure.wanted, tenure.wanted_since = wanted, now
        if tenure.wanted is not None and now - tenure.wanted_since > self._convert_timeout_s:
            tenure.failed_at, tenure.wanted_since = now, math.inf
        return None if tenure.wanted_since == math.inf else tenure.wanted
