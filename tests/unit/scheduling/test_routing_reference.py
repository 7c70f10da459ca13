"""The route is the one that the rule as written down gives, sum by sum, on thousands of clusters."""

import hashlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from prfaas.cluster import (
    ClusterView,
    Incarnation,
    LinkState,
    Namespace,
    Node,
    NodeId,
    NodeKind,
    NodeLoad,
    RegionId,
    Role,
    WireRange,
)
from prfaas.errors import PeerUnavailable
from prfaas.profile import CASE_STUDY, GBPS, shipped
from prfaas.request import Match, Matches, Mode, Reason, Request, RequestId, Sampling
from prfaas.scheduling.routing import LEAST_LOADED, OWN_PREFILL_TOKENS, PREFIX_HOLDERS, RoutingParams, choose

NEAR, FAR, FARTHER = RegionId("near"), RegionId("far"), RegionId("farther")
PROFILES = {hardware: shipped(CASE_STUDY, hardware) for hardware in ("h200", "h20")}
LEAST_SHARE = 0.05


@dataclass
class Plainly:
    """One request, weighed with nothing but sum and min."""

    request: Request
    matches: Matches
    view: ClusterView
    params: RoutingParams
    avoid: frozenset[NodeId]

    def route(self) -> tuple[NodeId, NodeId, Reason, int]:
        """Prefill node, decode node, reason, and the tokens that were compared with t."""
        self.decode = self.least(self.decoding(), self.decode_seconds, self.decode_tokens)
        beside = self.best("local_prefill", NodeKind.PD)
        remote = self.best("remote_prefill", NodeKind.PREFILL_WORKER)
        own, local = self.decode, beside
        if own.role is not Role.DECODE and (beside is None or self.no_worse(own, beside)):
            local = own
        compared = self.compared(local or own, remote)
        chosen, reason = self.by_length(own, local, remote, compared)
        chosen, reason = self.or_the_other_class(chosen, reason, local, remote, compared)
        return chosen.id, self.decode.id, reason, compared

    # -- who may serve

    def usable(self, node: Node) -> bool:
        return node.model == self.request.model and node.id not in self.avoid

    def holders(self) -> list[Node]:
        named = [self.view.nodes[name] for name in list(self.matches)[:PREFIX_HOLDERS] if name in self.view.nodes]
        return [node for node in named if self.usable(node) and not node.load.draining]

    def among(self, ids: object, fits: Callable[[Node], bool]) -> list[Node]:
        by_load = [self.view.nodes[name] for name in ids if self.usable(self.view.nodes[name])]  # type: ignore[attr-defined]
        return [node for node in by_load if fits(node)][:LEAST_LOADED] + [node for node in self.holders() if fits(node)]

    def decoding(self) -> list[Node]:
        return self.among(self.view.decode, lambda node: node.kind is NodeKind.PD and node.role is not Role.PREFILL)

    def best(self, field: str, kind: NodeKind) -> Node | None:
        def fits(node: Node) -> bool:
            here = node.region == self.decode.region
            pushes = node.can_push_to(self.decode) and here is (kind is NodeKind.PD)
            return node.kind is kind and node.role is not Role.DECODE and node.id != self.decode.id and pushes

        found = self.among(getattr(self.view, field), fits)
        return self.least(found, self.prefill_seconds, self.prefill_tokens) if found else None

    # -- what it costs

    def load(self, node: Node) -> NodeLoad:
        return self.view.loads.get(node.id, node.load)

    def joint(self, node: Node) -> int:
        return min(self.matches.get(node.id, Match()).joint, self.request.handoff_tokens)

    def held(self, node: Node) -> int:
        return min(self.matches.get(node.id, Match()).kv, self.request.handoff_tokens)

    def rate(self, source: RegionId, target: RegionId) -> float | None:
        link = self.params.links.get((source, target))
        rate = None if link is None else link.capacity_bytes_per_s
        return rate if rate is not None and 0 <= rate < math.inf else None

    def usual(self, tokens: float | None, otherwise: float) -> float:
        return tokens if tokens is not None and 0 <= tokens < math.inf else otherwise

    def prefill_terms(self, node: Node) -> tuple[float, float, float]:
        profile, total = self.params.profiles[node.hardware], self.request.handoff_tokens
        share = max(LEAST_SHARE, node.share) if node.role is Role.MIXED else 1.0
        remote = node.region != self.decode.region
        others = self.params.long_tokens if remote else self.params.short_tokens
        usual = max(1.0, self.usual(others, self.request.prompt_tokens))
        queue_s = self.load(node).queued_prefill_tokens * (profile.prefill_s(usual) / usual) / share
        prefill_s = profile.prefill_s(total, self.joint(node)) / share
        if node.id == self.decode.id:
            return queue_s, prefill_s, 0.0
        rate, pair = self.rate(node.region, self.decode.region), (node.region, self.decode.region)
        late_s, tail_s = 0.0, self.params.rtt_s.get(pair, 0.0)
        if rate is not None:
            rows = profile.kv_bytes(total, self.held(self.decode)) - profile.kv(0)
            stream_s = (rows + self.params.links[pair].queued_bytes) / max(rate, 1.0)
            late_s, tail_s = max(0.0, stream_s - prefill_s), tail_s + profile.kv(0) / max(rate, 1.0)
        return queue_s, prefill_s, late_s + tail_s

    def prefill_seconds(self, node: Node) -> float:
        return sum(self.prefill_terms(node))

    def prefill_tokens(self, node: Node) -> tuple[int, int]:
        return self.load(node).queued_prefill_tokens + self.request.prompt_tokens - self.joint(node), 0

    def slot(self, node: Node) -> tuple[float, float]:
        decode, load = self.params.profiles[node.hardware].decode, self.load(node)
        if decode is None:
            return 0.0, 0.0
        left = max(LEAST_SHARE, 1 - node.share) if node.role is Role.MIXED else 1.0
        batch = 1 + max(load.active_sequences, load.decoding + load.waiting_decodes)
        full = load.max_batch if load.max_batch and batch > load.max_batch else batch
        step_s = decode.step_s(full) / left
        output = self.usual(self.params.output_tokens, self.request.sampling.max_tokens)
        return (batch - full) * output * step_s / full, step_s

    def decode_seconds(self, node: Node) -> float:
        missing = self.params.profiles[node.hardware].kv_bytes(self.request.handoff_tokens, self.held(node))
        rates = [self.rate(*pair) for pair in self.params.links if pair[1] == node.region]
        known = [rate for rate in rates if rate is not None]
        return sum(self.slot(node)) + (missing / max(min(known), 1.0) if known else 0.0)

    def decode_tokens(self, node: Node) -> tuple[int, int]:
        load = self.load(node)
        missing = self.request.handoff_tokens - self.held(node)
        return load.committed_tokens + load.queued_prefill_tokens + missing, load.active_sequences

    def costs(
        self, nodes: list[Node], seconds: Callable[[Node], float], tokens: Callable[[Node], tuple[int, int]]
    ) -> list[tuple[float, tuple[int, int]]]:
        timed = all(node.hardware in self.params.profiles for node in nodes)
        return [(seconds(node) if timed else 0.0, tokens(node)) for node in nodes]

    def least(
        self, nodes: list[Node], seconds: Callable[[Node], float], tokens: Callable[[Node], tuple[int, int]]
    ) -> Node:
        if not nodes:
            raise PeerUnavailable("cluster", "nobody decodes")
        costs = self.costs(nodes, seconds, tokens)
        equal = [node for node, cost in zip(nodes, costs, strict=True) if cost == min(costs)]
        return min(equal, key=lambda node: hashlib.sha256(f"{self.request.id} {node.id}".encode()).digest())

    def no_worse(self, own: Node, beside: Node) -> bool:
        own_cost, beside_cost = self.costs([own, beside], self.prefill_seconds, self.prefill_tokens)
        return own_cost <= beside_cost

    def ttft_s(self, node: Node) -> float | None:
        if not {node.hardware, self.decode.hardware} <= self.params.profiles.keys():
            return None
        before_s, (wait_s, step_s) = self.prefill_seconds(node), self.slot(self.decode)
        return max(before_s, wait_s) + step_s

    # -- the rule

    def compared(self, local: Node, remote: Node | None) -> int:
        uncached = self.request.prompt_tokens - self.joint(local)
        if not self.params.abundant or remote is None or self.joint(remote) <= self.joint(local):
            return uncached
        if remote.region == local.region or not remote.can_push_to(local):
            return uncached
        rate = self.rate(remote.region, local.region)
        if not self.params.cache_pulls or local.hardware not in self.params.profiles or rate is None:
            return uncached
        profile, pair = self.params.profiles[local.hardware], (remote.region, local.region)
        nbytes = profile.kv_bytes(self.joint(remote), self.joint(local)) + self.params.links[pair].queued_bytes
        pull_s = (nbytes / rate if rate > 0 else math.inf) + self.params.rtt_s.get(pair, 0.0)
        share = max(LEAST_SHARE, local.share) if local.role is Role.MIXED else 1.0
        compute_s = profile.prefill_s(self.joint(remote), self.joint(local)) / share
        return self.request.prompt_tokens - self.joint(remote) if pull_s < compute_s else uncached

    def by_length(self, own: Node, local: Node | None, remote: Node | None, compared: int) -> tuple[Node, Reason]:
        params = self.params
        threshold = min(params.threshold_tokens, math.inf if params.t_force is None else params.t_force)
        short = compared <= max(params.t_min, threshold)
        if params.mode is Mode.NEVER:
            return local or own, Reason.MODE_NEVER
        if params.mode is Mode.ALWAYS and remote:
            return remote, Reason.MODE_ALWAYS
        short = short and params.mode is Mode.AUTO
        if short and local:
            return local, Reason.SHORT_PROMPT
        if short and self.request.prompt_tokens - self.joint(own) <= OWN_PREFILL_TOKENS:
            return own, Reason.SHORT_PROMPT
        if remote:
            return remote, Reason.NO_LOCAL_PREFILL if short else Reason.LONG_PROMPT
        return local or own, Reason.NO_REMOTE_PREFILL

    def or_the_other_class(
        self, chosen: Node, reason: Reason, local: Node | None, remote: Node | None, compared: int
    ) -> tuple[Node, Reason]:
        params = self.params
        force = math.inf if params.t_force is None else max(params.t_min, params.t_force)
        if reason is Reason.SHORT_PROMPT and compared > params.t_min:
            other, spilled = remote, Reason.SPILLED_REMOTE
        elif reason is Reason.LONG_PROMPT and compared <= force:
            other, spilled = local, Reason.SPILLED_LOCAL
        else:
            return chosen, reason
        if params.ttft_slo_s is None or other is None:
            return chosen, reason
        if other.region != self.decode.region and self.rate(other.region, self.decode.region) is None:
            return chosen, reason
        expected, elsewhere = self.ttft_s(chosen), self.ttft_s(other)
        if expected is None or elsewhere is None or expected <= params.ttft_slo_s:
            return chosen, reason
        return (other, spilled) if elsewhere <= params.spill_share * params.ttft_slo_s else (chosen, reason)


class Scene:
    """A random cluster, and requests to it. Few distinct loads and prefixes, so that many nodes are equal."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.rare = self.chance.choice((0.0, 0.0, 0.1))
        self.nodes = [self.node(index) for index in range(self.chance.choice((1, 3, 8, 40, 120)))]
        self.params = self.settings()

    def odd(self) -> bool:
        return self.chance.random() < self.rare

    def node(self, index: int) -> Node:
        pick, far = self.chance.choice, self.chance.random() < 0.35
        return Node(
            id=NodeId(f"n{index}"),
            region=pick((FAR, FAR, FARTHER)) if far else NEAR,
            kind=NodeKind.PREFILL_WORKER if far else NodeKind.PD,
            role=Role.PREFILL if far else pick((Role.PREFILL, Role.DECODE, Role.DECODE, Role.MIXED)),
            prefill_share=pick((None, 0.25, 0.0, math.nan)),
            incarnation=Incarnation(index),
            namespace=Namespace("other" if self.odd() else "ns"),
            wire=WireRange(2, 3) if self.odd() else WireRange(1, 1),
            model="other" if self.odd() else "m",
            rpc_address="",
            max_context_tokens=1 << 20,
            hardware="?" if self.odd() else pick(("h200", "h20") if far else ("h20", "h20", "h200")),
            load=self.load(),
        )

    def load(self) -> NodeLoad:
        pick = self.chance.choice
        return NodeLoad(
            queued_prefill_tokens=pick((0, 0, 5_000, 60_000, 400_000)),
            active_sequences=pick((0, 3, 19, 30)),
            committed_tokens=pick((0, 9_000, 100_000)),
            draining=self.odd(),
            decoding=pick((0, 5)),
            waiting_decodes=pick((0, 0, 40)),
            max_batch=pick((0, 20, 20)),
        )

    def settings(self) -> RoutingParams:
        pick = self.chance.choice
        figures = (None, math.nan, math.inf, -1.0, 10_000.0)
        pairs = [(FAR, NEAR), (FARTHER, NEAR), (NEAR, FAR)]
        rates = (100 * GBPS, 100 * GBPS, 0.5 * GBPS, 0.0, None, math.nan)
        return RoutingParams(
            threshold_tokens=pick((0, 1_000, 19_400, 60_000)),
            abundant=pick((False, True)),
            mode=pick((Mode.AUTO, Mode.AUTO, Mode.AUTO, Mode.AUTO, Mode.ALWAYS, Mode.NEVER)),
            t_min=pick((0, 0, 3_000)),
            t_force=pick((None, None, 30_000)),
            ttft_slo_s=pick((None, 2.0, 8.0)),
            profiles=pick((PROFILES, PROFILES, PROFILES, {})),
            links={
                pair: LinkState(*pair, capacity_bytes_per_s=pick(rates), queued_bytes=pick((0, 1 << 30)))
                for pair in pairs
                if self.chance.random() < 0.85
            },
            rtt_s={pair: 0.02 for pair in pairs if pick((True, False))},
            short_tokens=pick(figures),
            long_tokens=pick(figures),
            output_tokens=pick(figures),
            cache_pulls=pick((False, True)),
        )

    def view(self) -> ClusterView:
        serving = [node for node in self.nodes if not node.load.draining]
        self.chance.shuffle(serving)
        better = {node.id: self.load() for node in self.nodes if self.chance.random() < 0.2}
        return ClusterView(
            nodes={node.id: node for node in self.nodes},
            remote_prefill=tuple(node.id for node in serving if node.region != NEAR),
            local_prefill=tuple(node.id for node in serving if node.region == NEAR and node.role is not Role.DECODE),
            decode=tuple(node.id for node in serving if node.region == NEAR and node.role is not Role.PREFILL),
            loads=better,
        )

    def asked(self, number: int) -> tuple[Request, Matches, frozenset[NodeId]]:
        pick = self.chance.choice
        tokens = pick((1, 64, 500, 1_000, 4_000, 18_000, 30_000, 90_000))
        names = [NodeId("gone"), *(node.id for node in self.nodes)]
        held = self.chance.sample(names, min(len(names), pick((0, 1, 4, 30))))
        matches = {name: Match(pick((0, 512, tokens // 2, tokens)), pick((0, tokens // 2, tokens))) for name in held}
        avoid = frozenset(self.chance.sample(names, min(len(names), pick((0, 0, 0, 2)))))
        sampling = Sampling(max_tokens=pick((1, 900)))
        return (
            Request(id=RequestId(f"r{number}"), model="m", prompt=bytes(4 * tokens), sampling=sampling),
            matches,
            avoid,
        )


@pytest.mark.parametrize("part", range(8))
def test_the_route_is_that_of_the_plain_formulation(part):
    """Whatever is loaded, cached, avoided, unknown, equal, scarce, late or not there."""
    reasons: dict[Reason, int] = {}
    for seed in range(60 * part, 60 * (part + 1)):
        scene = Scene(seed)
        for number in range(10):
            (request, matches, avoid), view = scene.asked(number), scene.view()
            view.check()
            try:
                expected = Plainly(request, matches, view, scene.params, avoid).route()
            except PeerUnavailable:
                with pytest.raises(PeerUnavailable):
                    choose(request, matches, view, scene.params, avoid)
                continue
            route = choose(request, matches, view, scene.params, avoid)
            assert (route.prefill, route.decode, route.reason, route.uncached_tokens) == expected, (seed, number)
            scene.params.lanes.check()
            reasons[route.reason] = reasons.get(route.reason, 0) + 1
    assert len(reasons) >= 6, "the scenes are too much alike"
