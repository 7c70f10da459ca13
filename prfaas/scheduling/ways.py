"""What each way of serving one request would cost: ways differ in where the prompt is prefilled; where it is decoded is
settled before.

A cost is the work that waits in front of the request plus what the request itself adds, so that a cached prefix
attracts only until its holder is busy. It is counted in seconds where the profiles of all nodes that are compared are
known, and in tokens otherwise.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import repeat

from prfaas.cluster import ClusterView, Node, NodeId, NodeKind
from prfaas.request import Alternative, Matches, Path, Predicted, Pull, Reason, Request, Route
from prfaas.scheduling.candidates import PD, PREFILL_WORKER, Candidates, Cost
from prfaas.scheduling.prediction import Prediction
from prfaas.scheduling.rule import RoutingParams


class Ways:
    __slots__ = (
        "_candidates",
        "_cost_of",
        "_decode",
        "_decode_kv_tokens",
        "_handoff_tokens",
        "_prompt_tokens",
        "_toward",
        "_view",
        "params",
    )

    def __init__(
        self, request: Request, matches: Matches, view: ClusterView, params: RoutingParams, avoid: frozenset[NodeId]
    ) -> None:
        """Raises ModelNotFound, or PeerUnavailable when no node is left to decode."""
        self._view, self.params = view, params
        self._prompt_tokens, self._handoff_tokens = request.prompt_tokens, request.handoff_tokens
        self._candidates = Candidates(request, matches, view, avoid)
        self._cost_of = Prediction(request, params)
        self._decode = self._decode_node()
        self._decode_kv_tokens = self._candidates.kv_tokens(self._decode)
        self._toward = self._cost_of.toward(self._decode, view.load_of(self._decode), self._decode_kv_tokens)

    def own(self) -> Alternative:
        """Prefill where it decodes: nothing moves."""
        return self._way(self._decode)

    def beside(self) -> Alternative | None:
        """The best prefilling PD node other than the decode node."""
        return self._prefill(self._view.local_prefill, PD)

    def remote(self) -> Alternative | None:
        """The best prefill worker of another region."""
        return self._prefill(self._view.remote_prefill, PREFILL_WORKER)

    def local(self, own: Alternative, beside: Alternative | None) -> Alternative | None:
        """The decode node when it prefills and is no more loaded than the one beside it: then no KV moves."""
        if not self._decode.role.prefills:
            return beside
        if beside is None:
            return own
        nodes = [self._decode, self._view.nodes[beside.prefill]]
        own_cost, beside_cost = self._prefill_costs(nodes)
        return own if own_cost <= beside_cost else beside

    def compared_tokens(self, local: Alternative, remote: Alternative | None) -> int:
        """What the rule compares with t. Scarce: what the PD side lacks. Abundant: what both lack, because a longer
        prefix of the other region is brought here; unless that is known to cost more than computing it, or cannot be
        done."""
        if not self.params.abundant or remote is None or remote.uncached_tokens >= local.uncached_tokens:
            return local.uncached_tokens
        pull = self._pull(local, self._view.nodes[remote.prefill])
        counts = pull is not None and (pull.transfer_s is None or pull.chosen)
        return remote.uncached_tokens if counts else local.uncached_tokens

    def transfer_is_known(self, way: Alternative) -> bool:
        return self._toward.link_is_known(self._view.nodes[way.prefill])

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
        loads, held = self._candidates.loads(nodes), [self._candidates.kv_tokens(node) for node in nodes]
        seconds = self._cost_of.decode_s(nodes, loads, held) or repeat(0.0)
        costs: list[Cost] = []
        for load, kv_tokens, its_s in zip(loads, held, seconds, strict=False):
            tokens = load.committed_tokens + load.queued_prefill_tokens + self._handoff_tokens - kv_tokens
            costs.append((its_s, tokens, load.active_sequences))
        return self._candidates.least(nodes, costs)

    def _prefill(self, by_load: Iterable[NodeId], kind: NodeKind) -> Alternative | None:
        nodes = self._candidates.prefilling(by_load, kind, self._decode)
        return self._way(self._candidates.least(nodes, self._prefill_costs(nodes))) if nodes else None

    def _prefill_costs(self, nodes: list[Node]) -> list[Cost]:
        loads, cached = self._candidates.loads(nodes), [self._candidates.joint_tokens(node) for node in nodes]
        seconds = self._toward.prefill_s(nodes, loads, cached) or repeat(0.0)
        return [
            (its_s, load.queued_prefill_tokens + self._prompt_tokens - joint_tokens, 0)
            for load, joint_tokens, its_s in zip(loads, cached, seconds, strict=False)
        ]

    def _way(self, prefill: Node) -> Alternative:
        joint_tokens, moves = self._candidates.joint_tokens(prefill), prefill is not self._decode
        return Alternative(
            path=Path.REMOTE if prefill.kind is PREFILL_WORKER else Path.LOCAL,
            prefill=prefill.id,
            decode=self._decode.id,
            uncached_tokens=self._prompt_tokens - joint_tokens,
            transfer_tokens=self._handoff_tokens - self._decode_kv_tokens if moves else 0,
            transfer_bytes=self._toward.transfer_bytes(prefill),
            predicted=self._toward.predicted(prefill, self._view.load_of(prefill), joint_tokens),
        )

    def _pull(self, way: Alternative, source: Node | None) -> Pull | None:
        """Bringing the longer prefix of a node in another region to where the prompt is prefilled."""
        target = self._view.nodes[way.prefill]
        if source is None or source.region == target.region or not source.can_push_to(target):
            return None
        held, cached = self._candidates.joint_tokens(source), self._candidates.joint_tokens(target)
        if held <= cached:
            return None
        costs = self._cost_of.pull(source, target, cached, held)
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
            joint_tokens = self._candidates.joint_tokens(node)
            if joint_tokens > longest and node.region != region:
                longest, found = joint_tokens, node
        return found


def _with_pull(predicted: Predicted | None, pull: Pull | None) -> Predicted | None:
    """The prefix is fetched before the rest is computed."""
    if predicted is None or pull is None or not pull.chosen or pull.transfer_s is None or pull.recompute_s is None:
        return predicted
    return replace(
        predicted,
        prefill_s=max(0.0, predicted.prefill_s - pull.recompute_s),
        transfer_exposed_s=predicted.transfer_exposed_s + pull.transfer_s,
    )
