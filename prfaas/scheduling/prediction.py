"""What a way would take until the first token: queue, prefill, what of the transfer shows, the wait for a batch slot.

Seconds come from profiles and link estimates; without a profile of every node that is compared there are none, and the
caller goes by tokens. Transfers overlap with the prefill that they belong to, layer by layer, so that only two parts of
them show: what the link cannot carry while the prefill runs, and the state, which exists at the very end.

A decision weighs dozens of nodes of a few kinds, so whatever depends on the kind only is computed once.
"""

import math
from dataclasses import dataclass, field

from prfaas.cluster import Node, NodeLoad, RegionId, Role
from prfaas.profile import Profile
from prfaas.request import Predicted, Request
from prfaas.scheduling.readings import known
from prfaas.scheduling.rule import RoutingParams

#: Looking up a member of an Enum costs more than comparing with it.
MIXED = Role.MIXED
#: A mixed node gives at least this part of its time to work that it has accepted, whatever its share says.
LEAST_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class _Kind:
    """Nodes of one hardware in one region, as sources of a transfer to one decode node. `stream_s` is what the link
    needs for the KV and for what is queued before it, `tail_s` for the state and the way there and back."""

    profile: Profile
    transfer_bytes: float
    queue_s_per_token: float
    stream_s: float
    tail_s: float
    whole_prefill_s: float
    #: By cached prefix.
    prefill_s: dict[int, float] = field(default_factory=dict)


class Prediction:
    """The costs of one request."""

    __slots__ = ("_handoff_tokens", "_into", "_params", "_request")

    def __init__(self, request: Request, params: RoutingParams) -> None:
        self._request, self._params = request, params
        self._handoff_tokens = request.handoff_tokens
        self._into: dict[RegionId, float] = {}

    def toward(self, decode: Node, load: NodeLoad, kv_tokens: int) -> "Toward":
        """Ways that end at a decode node which has the KV of the first `kv_tokens`."""
        return Toward(self, self._request, self._params, decode, load, kv_tokens)

    def decode_s(self, nodes: list[Node], loads: list[NodeLoad], kv_tokens: list[int]) -> list[float] | None:
        """For each node all that depends on decoding there: the wait for a slot, the step, and the link's time for what
        is missing there, overlapped or not, because others wait for the link. None without a profile of each."""
        profiles, costs = self._params.profiles, []
        missing: dict[tuple[str, int], float] = {}
        for node, load, held in zip(nodes, loads, kv_tokens, strict=True):
            profile = profiles.get(node.hardware)
            if profile is None:
                return None
            wait_s, step_s = self.decode_terms(node, load)
            link_s = missing.get((node.hardware, held))
            if link_s is None:
                s_per_byte = self._s_per_byte_into(node.region)
                link_s = profile.kv_bytes(self._handoff_tokens, held) * s_per_byte if s_per_byte else 0.0
                missing[node.hardware, held] = link_s
            costs.append(wait_s + step_s + link_s)
        return costs

    def decode_terms(self, node: Node, load: NodeLoad) -> tuple[float, float]:
        """The wait for a batch slot if this request were handed over now, and its first step."""
        decode = self._params.profiles[node.hardware].decode
        if decode is None:
            return 0.0, 0.0
        left = max(LEAST_SHARE, 1 - node.share) if node.role is MIXED else 1.0
        batch = 1 + max(load.active_sequences, load.decoding + load.waiting_decodes)
        if not load.max_batch or batch <= load.max_batch:
            return 0.0, decode.step_s(batch) / left
        step_s = decode.step_s(load.max_batch) / left
        usual = known(self._params.output_tokens)
        output_tokens = self._request.sampling.max_tokens if usual is None else usual
        return (batch - load.max_batch) * output_tokens * step_s / load.max_batch, step_s

    def link_bytes_per_s(self, source: RegionId, target: RegionId) -> float | None:
        link = self._params.links.get((source, target))
        return None if link is None else known(link.capacity_bytes_per_s)

    def pull(self, source: Node, target: Node, cached_tokens: int, held_tokens: int) -> tuple[int, float, float] | None:
        """Bytes and seconds of fetching a prefix of `held_tokens` to a node that has `cached_tokens` of it, and the
        seconds of computing the difference there."""
        profile, rate = self._params.profiles.get(target.hardware), self.link_bytes_per_s(source.region, target.region)
        if profile is None or rate is None:
            return None
        nbytes = profile.kv_bytes(held_tokens, cached_tokens)
        queued_bytes = self._params.links[source.region, target.region].queued_bytes
        transfer_s = (nbytes + queued_bytes) / rate if rate > 0 else math.inf
        transfer_s += self._params.rtt_s.get((source.region, target.region), 0.0)
        return round(nbytes), transfer_s, profile.prefill_s(held_tokens, cached_tokens) / prefill_share(target)

    def _s_per_byte_into(self, region: RegionId) -> float:
        """Of the slowest link that is known."""
        if (slowest := self._into.get(region)) is None:
            into = (link for link in self._params.links.values() if link.target == region)
            rates = [rate for link in into if (rate := known(link.capacity_bytes_per_s)) is not None]
            slowest = self._into[region] = 1 / max(min(rates), 1.0) if rates else 0.0
        return slowest


class Toward:
    """The costs of prefilling one request here or there, for one decode node."""

    __slots__ = ("_decode", "_decode_terms", "_kinds", "_kv_tokens", "_load", "_params", "_prediction", "_request")

    def __init__(
        self,
        prediction: Prediction,
        request: Request,
        params: RoutingParams,
        decode: Node,
        load: NodeLoad,
        kv_tokens: int,
    ) -> None:
        self._prediction, self._request, self._params = prediction, request, params
        self._decode, self._load, self._kv_tokens = decode, load, kv_tokens
        self._decode_terms: tuple[float, float] | None = None
        self._kinds: dict[tuple[str, RegionId], _Kind] = {}

    def prefill_s(self, nodes: list[Node], loads: list[NodeLoad], cached_tokens: list[int]) -> list[float] | None:
        """For each node all that depends on prefilling there. None without a profile of each."""
        costs = []
        for node, load, cached in zip(nodes, loads, cached_tokens, strict=True):
            kind = self._kinds.get((node.hardware, node.region)) or self._kind(node)
            if kind is None:
                return None
            queue_s, prefill_s, exposed_s = self._terms(kind, node, load, cached)
            costs.append(queue_s + prefill_s + exposed_s)
        return costs

    def predicted(self, node: Node, load: NodeLoad, cached_tokens: int) -> Predicted | None:
        """None without a profile of both nodes."""
        kind = self._kinds.get((node.hardware, node.region)) or self._kind(node)
        if kind is None or self._decode.hardware not in self._params.profiles:
            return None
        queue_s, prefill_s, exposed_s = self._terms(kind, node, load, cached_tokens)
        if self._decode_terms is None:
            self._decode_terms = self._prediction.decode_terms(self._decode, self._load)
        wait_s, step_s = self._decode_terms
        return Predicted(
            prefill_queue_s=queue_s,
            prefill_s=prefill_s,
            transfer_exposed_s=exposed_s,
            # Those ahead move up while this one is prefilled.
            decode_queue_s=max(0.0, wait_s - queue_s - prefill_s - exposed_s),
            first_decode_step_s=step_s,
        )

    def transfer_bytes(self, node: Node) -> int | None:
        """What of the KV has to cross."""
        if node.id == self._decode.id:
            return 0
        kind = self._kinds.get((node.hardware, node.region)) or self._kind(node)
        return None if kind is None else round(kind.transfer_bytes)

    def link_is_known(self, node: Node) -> bool:
        source, target = node.region, self._decode.region
        return source == target or self._prediction.link_bytes_per_s(source, target) is not None

    def _terms(self, kind: _Kind, node: Node, load: NodeLoad, cached_tokens: int) -> tuple[float, float, float]:
        prefill_s = kind.prefill_s.get(cached_tokens)
        if prefill_s is None:
            prefill_s = kind.whole_prefill_s - kind.profile.prefill_s(cached_tokens)
            kind.prefill_s[cached_tokens] = prefill_s
        queue_s = load.queued_prefill_tokens * kind.queue_s_per_token
        if node.role is MIXED:
            share = prefill_share(node)
            queue_s, prefill_s = queue_s / share, prefill_s / share
        if node.id == self._decode.id:
            return queue_s, prefill_s, 0.0
        late_s = kind.stream_s - prefill_s
        return queue_s, prefill_s, (late_s if late_s > 0 else 0.0) + kind.tail_s

    def _kind(self, node: Node) -> _Kind | None:
        profile = self._params.profiles.get(node.hardware)
        if profile is None:
            return None
        pair = (node.region, self._decode.region)
        rate, rtt_s = self._prediction.link_bytes_per_s(*pair), self._params.rtt_s.get(pair, 0.0)
        tokens, state_bytes = self._request.handoff_tokens, profile.kv(0)
        transfer_bytes = profile.kv_bytes(tokens, self._kv_tokens)
        # Where nothing is known of the link, as inside a region, it is taken as fast: all nodes that are compared are
        # behind it alike.
        stream_s, tail_s = 0.0, rtt_s
        if rate is not None:
            rate = max(rate, 1.0)
            stream_s = (transfer_bytes - state_bytes + self._params.links[pair].queued_bytes) / rate
            tail_s += state_bytes / rate
        queue_s_per_token = self._queue_s_per_token(profile, pair[0] != pair[1])
        kind = _Kind(profile, transfer_bytes, queue_s_per_token, stream_s, tail_s, profile.prefill_s(tokens))
        self._kinds[node.hardware, node.region] = kind
        return kind

    def _queue_s_per_token(self, profile: Profile, remote: bool) -> float:
        """What a waiting token takes, if those who wait are like the others of that class."""
        usual = known(self._params.long_tokens if remote else self._params.short_tokens)
        tokens = max(1.0, self._request.prompt_tokens if usual is None else usual)
        return profile.prefill_s(tokens) / tokens


def prefill_share(node: Node) -> float:
    """A decode node that prefills after all does so between its steps, at nearly full speed."""
    return max(LEAST_SHARE, node.share) if node.role is MIXED else 1.0
