"""What each way of serving one request would cost: ways differ in where the prompt is prefilled; where it is decoded is
settled before.

A cost is the work that waits in front of the request plus what the request itself adds, so that a cached prefix
attracts only until its holder is busy. It is counted in seconds where the profiles of all nodes that are compared are
known, and in tokens otherwise.
"""

from collections.abc import Iterable

from prfaas.cluster import ClusterView, Node, NodeId
from prfaas.request import Alternative, Matches, Path, Predicted, Pull, Reason, Request, Route
from prfaas.scheduling.candidates import PREFILL_WORKER, Candidates
from prfaas.scheduling.prediction import Decoding, Toward, pull_costs
from prfaas.scheduling.rule import RoutingParams


class Ways:
    __slots__ = (
        "_candidates",
        "_decode",
        "_decode_kv_tokens",
        "_decoding",
        "_handoff_tokens",
        "_matches",
        "_toward",
        "_view",
        "params",
    )

    def __init__(
        self, request: Request, matches: Matches, view: ClusterView, params: RoutingParams, avoid: frozenset[NodeId]
    ) -> None:
        """Raises PeerUnavailable when no node is left to decode."""
        self._view, self.params = view, params
        self._matches, self._handoff_tokens = matches, request.handoff_tokens
        self._candidates = Candidates(request, matches, view, avoid)
        self._decoding = Decoding(request, matches, params)
        self._decode = self._decode_node()
        match = matches.get(self._decode.id)
        self._decode_kv_tokens = 0 if match is None else min(match.kv, self._handoff_tokens)
        slot = self._decoding.slot(self._decode, view.busy_of(self._decode))
        self._toward = Toward(request, matches, params, self._decode, slot, self._decode_kv_tokens)

    def own(self) -> Alternative:
        """Prefill where it decodes: nothing moves."""
        return self._way(self._decode)

    def beside(self) -> Alternative | None:
        """The best prefilling PD node other than the decode node."""
        return self._prefill(self._candidates.beside(self._decode, self.params.shut.toward(self._decode.id)))

    def remote(self) -> Alternative | None:
        """The best prefill worker of another region."""
        shut, decode = self.params.shut, self._decode
        return self._prefill(self._candidates.remote(decode, shut.toward(decode.id), shut.into(decode.region)))

    def remote_is_shut(self) -> bool:
        """Breakers alone keep it from the other regions."""
        return bool(self.params.shut) and bool(self._candidates.remote(self._decode))

    def local(self, own: Alternative, beside: Alternative | None) -> Alternative | None:
        """The decode node when it prefills and is no more loaded than the one beside it: then no KV moves."""
        if not self._decode.role.prefills:
            return beside
        if beside is None:
            return own
        own_node, beside_node = self._decode, self._view.nodes[beside.prefill]
        own_s, beside_s = self._prefill_seconds(own_node), self._prefill_seconds(beside_node)
        if own_s is not None and beside_s is not None and own_s != beside_s:
            return own if own_s < beside_s else beside
        return own if self._prefill_tokens(own_node) <= self._prefill_tokens(beside_node) else beside

    def compared_tokens(self, local: Alternative, remote: Alternative | None) -> int:
        """What the rule compares with t. Scarce: what the PD side lacks. Abundant: what both lack, because a longer
        prefix of the other region is brought here. That is counted on only where it is going to be done: it can be, and
        is known to cost less than computing."""
        if not self.params.abundant or remote is None or remote.uncached_tokens >= local.uncached_tokens:
            return local.uncached_tokens
        pull = self._pull(local, self._view.nodes[remote.prefill])
        return remote.uncached_tokens if pull is not None and pull.chosen else local.uncached_tokens

    def transfer_is_known(self, way: Alternative) -> bool:
        source, target = self._view.nodes[way.prefill].region, self._decode.region
        return source == target or self.params.lanes.link_bytes_per_s(source, target) is not None

    def route(self, best: Alternative, reason: Reason, uncached_tokens: int, ways: Iterable[Alternative]) -> Route:
        pull = self._pull(best, self._longest_holder(best)) if self.params.abundant else None
        return Route(
            prefill=best.prefill,
            decode=best.decode,
            path=best.path,
            reason=reason,
            uncached_tokens=uncached_tokens,
            transfer_tokens=best.transfer_tokens,
            threshold_tokens=self.params.bounded_threshold_tokens,
            alternatives=tuple(way for way in ways if way is not best),
            prefill_tokens=best.uncached_tokens - (pull.tokens if pull is not None and pull.chosen else 0),
            transfer_bytes=best.transfer_bytes,
            predicted=_with_pull(best.predicted, pull),
            pull=pull,
        )

    def _decode_node(self) -> Node:
        """The decode node that is free soonest, and has the least to hold, to prefill and to receive."""
        nodes = self._candidates.decoding()
        cheapest = self._decoding.cheapest(nodes, self._view.busy)
        return self._candidates.one_of(nodes if cheapest is None else cheapest, self._decode_tokens)

    def _decode_tokens(self, node: Node) -> tuple[int, int]:
        load, match = self._view.busy_of(node), self._matches.get(node.id)
        held = 0 if match is None else min(match.kept(node), self._handoff_tokens)
        return load.committed_tokens + load.queued_prefill_tokens + self._handoff_tokens - held, load.active_sequences

    def _prefill(self, nodes: list[Node]) -> Alternative | None:
        if not nodes:
            return None
        cheapest = self._toward.cheapest(nodes, self._view.busy)
        return self._way(self._candidates.one_of(nodes if cheapest is None else cheapest, self._prefill_tokens))

    def _prefill_seconds(self, node: Node) -> float | None:
        waiting = self._view.busy_of(node).queued_prefill_tokens
        return self._toward.seconds(node, waiting, self._resumed_tokens(node.id))

    def _prefill_tokens(self, node: Node) -> tuple[int, int]:
        waiting = self._view.busy_of(node).queued_prefill_tokens
        return waiting + self._handoff_tokens + 1 - self._resumed_tokens(node.id), 0

    def _joint_tokens(self, node: NodeId) -> int:
        """What can be had from the node's region. The last token is never taken from a cache."""
        match = self._matches.get(node)
        return 0 if match is None else min(match.joint, self._handoff_tokens)

    def _resumed_tokens(self, node: NodeId) -> int:
        """What a prefill on the node resumes from."""
        match = self._matches.get(node)
        return 0 if match is None else min(match.resumed, self._handoff_tokens)

    def _way(self, prefill: Node) -> Alternative:
        resumed_tokens = self._resumed_tokens(prefill.id)
        waiting = self._view.busy_of(prefill).queued_prefill_tokens
        return Alternative(
            Path.REMOTE if prefill.kind is PREFILL_WORKER else Path.LOCAL,
            prefill.id,
            self._decode.id,
            self._handoff_tokens + 1 - resumed_tokens,
            self._handoff_tokens - self._decode_kv_tokens if prefill is not self._decode else 0,
            self._toward.transfer_bytes(prefill),
            self._toward.predicted(prefill, waiting, resumed_tokens),
        )

    def _pull(self, way: Alternative, source: Node | None) -> Pull | None:
        """Bringing the longer prefix of a node in another region to where the prompt is prefilled."""
        target = self._view.nodes[way.prefill]
        if source is None or source.region == target.region or not source.can_push_to(target):
            return None
        held, cached = self._joint_tokens(source.id), self._resumed_tokens(target.id)
        if held <= cached:
            return None
        costs = pull_costs(source, target, cached, held, self.params)
        if costs is None:
            return Pull(source=source.id, tokens=held - cached)
        nbytes, transfer_s, recompute_s = costs
        return Pull(
            source=source.id,
            tokens=held - cached,
            nbytes=nbytes,
            transfer_s=transfer_s,
            recompute_s=recompute_s,
            chosen=self.params.cache_pulls and transfer_s < recompute_s,
        )

    def _longest_holder(self, way: Alternative) -> Node | None:
        """Of the named holders in other regions the one that can resume farthest, the first named among equals."""
        region, longest, found = self._view.nodes[way.prefill].region, 0, None
        for node in self._candidates.holders:
            joint_tokens = self._matches[node.id].joint
            if joint_tokens > longest and node.region != region and node.model == self._decode.model:
                longest, found = joint_tokens, node
                if longest >= self._handoff_tokens:
                    break
        return found


def _with_pull(predicted: Predicted | None, pull: Pull | None) -> Predicted | None:
    """The prefix is fetched before the rest is computed."""
    if predicted is None or pull is None or not pull.chosen or pull.transfer_s is None or pull.recompute_s is None:
        return predicted
    return predicted._replace(
        prefill_s=max(0.0, predicted.prefill_s - pull.recompute_s),
        transfer_exposed_s=predicted.transfer_exposed_s + pull.transfer_s,
    )
