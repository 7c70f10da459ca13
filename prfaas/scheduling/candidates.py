"""The nodes that one request may use: of each class the least loaded few, and those that hold a prefix of it."""

import hashlib
from collections.abc import Iterable
from itertools import islice

from prfaas.cluster import ClusterView, Node, NodeId, NodeKind, NodeLoad, RegionId, Role
from prfaas.errors import ModelNotFound, PeerUnavailable
from prfaas.request import Matches, Request

#: Of each class this many of the least loaded nodes are weighed, and this many holders of a prefix.
LEAST_LOADED = 8
PREFIX_HOLDERS = 16

#: Seconds where they are known of all nodes compared and 0 otherwise, then tokens, then sequences.
Cost = tuple[float, int, int]
#: Looking up a member of an Enum costs more than comparing with it.
PREFILL, DECODE, PD, PREFILL_WORKER = Role.PREFILL, Role.DECODE, NodeKind.PD, NodeKind.PREFILL_WORKER


class Candidates:
    """`holders` are the named holders of a prefix, best first, as far as they can be used."""

    __slots__ = ("_avoid", "_handoff_tokens", "_matches", "_request", "_view", "holders")

    def __init__(self, request: Request, matches: Matches, view: ClusterView, avoid: frozenset[NodeId]) -> None:
        self._request, self._matches, self._view, self._avoid = request, matches, view, avoid
        self._handoff_tokens = request.handoff_tokens
        self.holders = self._usable_holders()

    def decoding(self) -> list[Node]:
        """Raises ModelNotFound, or PeerUnavailable when no node is left."""
        nodes, model, avoid, found = self._view.nodes, self._request.model, self._avoid, dict[NodeId, Node]()
        for name in self._view.decode:
            node = nodes[name]
            if node.model == model and name not in avoid and node.role is not PREFILL:
                found[name] = node
                if len(found) == LEAST_LOADED:
                    break
        for node in self.holders:
            if node.kind is PD and node.role is not PREFILL:
                found[node.id] = node
        if not found:
            raise self._nothing_decodes()
        return [*found.values()]

    def prefilling(self, by_load: Iterable[NodeId], kind: NodeKind, decode: Node) -> list[Node]:
        """Without the decode node. Namespaces and wire versions must meet. Of nodes that differ in nothing but their
        queue only those with the shortest are weighed."""
        nodes, model, avoid, found = self._view.nodes, self._request.model, self._avoid, dict[NodeId, Node]()
        shortest: dict[tuple[str, RegionId], int] = {}
        matches, better = self._matches, self._view.loads
        seen = 0
        for name in by_load:
            node = nodes[name]
            if (
                node.model != model
                or node.kind is not kind
                or name in avoid
                or name == decode.id
                or not _pushes(node, decode)
            ):
                continue
            if node.role is PREFILL and name not in matches:
                waiting = (better.get(name) or node.load).queued_prefill_tokens
                if waiting <= shortest.setdefault((node.hardware, node.region), waiting):
                    found[name] = node
            else:
                found[name] = node
            seen += 1
            if seen == LEAST_LOADED:
                break
        for node in self.holders:
            if node.kind is kind and node.id != decode.id and _pushes(node, decode):
                found[node.id] = node
        return [*found.values()]

    def joint_tokens(self, node: Node) -> int:
        """What a prefill can resume from. The last token is never taken from a cache."""
        match = self._matches.get(node.id)
        return 0 if match is None else min(match.joint, self._handoff_tokens)

    def kv_tokens(self, node: Node) -> int:
        match = self._matches.get(node.id)
        return 0 if match is None else min(match.kv, self._handoff_tokens)

    def loads(self, nodes: list[Node]) -> list[NodeLoad]:
        """As far as they are known."""
        better = self._view.loads
        return [better.get(node.id) or node.load for node in nodes]

    def least(self, nodes: list[Node], costs: list[Cost]) -> Node:
        """Of equals another one for another request."""
        lowest = min(costs)
        if costs.count(lowest) == 1:
            return nodes[costs.index(lowest)]
        equal = (node for node, its_cost in zip(nodes, costs, strict=True) if its_cost == lowest)
        return min(equal, key=self._tie)

    def _tie(self, node: Node) -> bytes:
        """Differs from request to request, so that all routers do not pick the same of several idle nodes."""
        return hashlib.sha256(f"{self._request.id} {node.id}".encode()).digest()

    def _usable_holders(self) -> list[Node]:
        """The index may still know a holder that has left, and only the class lists leave draining nodes out."""
        nodes, model, avoid, found = self._view.nodes, self._request.model, self._avoid, list[Node]()
        for name in islice(self._matches, PREFIX_HOLDERS):
            node = nodes.get(name)
            if node is not None and node.model == model and name not in avoid and not node.load.draining:
                found.append(node)
        return found

    def _nothing_decodes(self) -> ModelNotFound | PeerUnavailable:
        model = self._request.model
        if any(node.model == model and node.kind is PD for node in self._view.nodes.values()):
            return PeerUnavailable("cluster", f"no decode node of {model} is left for this request")
        return ModelNotFound(model)


def _pushes(node: Node, decode: Node) -> bool:
    """A prefill worker pushes into another region, a PD node within its own."""
    return (
        node.role is not DECODE
        and node.namespace == decode.namespace
        and (node.wire is decode.wire or node.wire.meets(decode.wire))
        and (node.kind is PD) == (node.region == decode.region)
    )
