"""What a way would take until the first token: queue, prefill, what of the transfer shows, the wait for a batch slot.

Seconds come from profiles and link estimates; without a profile of a node there are none. Transfers overlap with the
prefill that they belong to, layer by layer, so that only two parts of them show: what the link cannot carry while the
prefill runs, and the state, which exists at the very end.

A decision weighs dozens of nodes of a few traits, so whatever follows from traits and from the tokens cached is worked
out once per request.
"""

import math
from collections.abc import Mapping
from functools import partial

from prfaas.cluster import Busy, Node, NodeId, RegionId, Role, Traits
from prfaas.remembered import Remembered
from prfaas.request import Matches, Predicted, Request
from prfaas.scheduling.lanes import Landing, Lane, Lanes, queue_s_per_token
from prfaas.scheduling.readings import known
from prfaas.scheduling.rule import RoutingParams

#: Looking up a member of an Enum costs more than comparing with it.
MIXED = Role.MIXED
#: A mixed node gives at least this part of its time to work that it has accepted, whatever its share says.
LEAST_SHARE = 0.05


#: Hardware, region and share of time for prefill: what makes nodes alike as sources.
_Alike = tuple[str, RegionId, float]


class _Lands(dict[int, float]):
    """One request on decode nodes of equal traits: by the tokens cached there the link's time for what is missing."""

    __slots__ = ("_decode", "_landing", "_left", "_output_tokens", "_tokens")

    def __init__(self, traits: Traits, landing: Landing, tokens: int, output_tokens: float) -> None:
        self._landing, self._decode = landing, landing.decode
        self._tokens, self._output_tokens = tokens, output_tokens
        self._left = max(LEAST_SHARE, 1 - traits.share) if traits.role is MIXED else 1.0

    def __missing__(self, cached_tokens: int) -> float:
        found = self[cached_tokens] = self._landing.link_s(self._tokens, min(cached_tokens, self._tokens))
        return found

    def slot(self, busy: Busy) -> tuple[float, float]:
        decode = self._decode
        if decode is None:
            return 0.0, 0.0
        _, _, _, running, limit = busy
        if running < limit or not limit:
            return 0.0, (decode.base_s + decode.per_sequence_s * (running + 1)) / self._left
        step_s = decode.step_s(limit) / self._left
        return (running + 1 - limit) * self._output_tokens * step_s / limit, step_s


class Decoding:
    """One request on the decode nodes that are compared."""

    __slots__ = ("_lands", "_matches")

    def __init__(self, request: Request, matches: Matches, params: RoutingParams) -> None:
        usual = known(params.output_tokens)
        output_tokens = request.sampling.max_tokens if usual is None else usual
        self._matches = matches
        self._lands = Remembered(partial(_landing, params.lanes, request.handoff_tokens, output_tokens))

    def cheapest(self, nodes: list[Node], busy: Mapping[NodeId, Busy]) -> list[Node] | None:
        """Those with the least of all that depends on decoding there: the wait for a slot, the step, and the link's
        time for what is missing, overlapped or not, because others wait for the link. None without a profile of
        each."""
        lands, matches, lowest_s, found = self._lands, self._matches, math.inf, list[Node]()
        for node in nodes:
            there = lands[node.traits]
            if there is None:
                return None
            name = node.id
            wait_s, step_s = there.slot(busy.get(name) or node.busy)
            match = matches.get(name)
            seconds = wait_s + step_s + there[0 if match is None else match.kept(node)]
            if seconds < lowest_s:
                lowest_s, found = seconds, [node]
            elif seconds == lowest_s:
                found.append(node)
        return found

    def slot(self, node: Node, busy: Busy) -> tuple[float, float] | None:
        """The wait for a batch slot if this request were handed over now, and its first step. None without a
        profile."""
        there = self._lands[node.traits]
        return None if there is None else there.slot(busy)


def _landing(lanes: Lanes, tokens: int, output_tokens: float, traits: Traits) -> _Lands | None:
    landing = lanes.landing(traits.hardware, traits.region)
    return None if landing is None else _Lands(traits, landing, tokens, output_tokens)


class _Source(dict[int, tuple[float, float]]):
    """Nodes that are alike, as sources of one request's transfer to one decode node: by the tokens cached there the
    seconds of the prefill, and of the transfer what shows. `stream_s` is what the link needs for the KV and for what is
    queued before it, `tail_s` for the state and the way there and back."""

    __slots__ = (
        "_lane",
        "_share",
        "_stream_s",
        "_tail_s",
        "_tokens",
        "_whole_s",
        "queue_s_per_token",
        "transfer_bytes",
    )

    def __init__(self, lane: Lane, share: float, tokens: int, kv_tokens: int, usual_tokens: int) -> None:
        profile, state_bytes, rate, queued_bytes, tail_s, queue_s, *_ = lane
        self._share = share
        self.transfer_bytes = lane.kv_bytes(tokens, kv_tokens)
        # Where nothing is known of the link, as inside a region, it is taken as fast: all nodes that are compared are
        # behind it alike.
        self._stream_s = 0.0
        if rate is not None:
            rate = max(rate, 1.0)
            self._stream_s = (self.transfer_bytes - state_bytes + queued_bytes) / rate
            tail_s += state_bytes / rate
        if queue_s is None:
            queue_s = queue_s_per_token(profile, usual_tokens)
        self._lane, self._tokens, self._tail_s = lane, tokens, tail_s
        self._whole_s = profile.prefill(tokens)
        self.queue_s_per_token = queue_s / self._share

    def __missing__(self, cached_tokens: int) -> tuple[float, float]:
        prefill_s = (self._whole_s - self._lane.prefill_s[min(cached_tokens, self._tokens)]) / self._share
        late_s = self._stream_s - prefill_s
        found = self[cached_tokens] = prefill_s, late_s + self._tail_s if late_s > 0 else self._tail_s
        return found


class Toward:
    """Prefilling one request here or there, for a decode node which has the KV of the first `kv_tokens`."""

    __slots__ = ("_decode", "_matches", "_slot", "_sources")

    def __init__(
        self,
        request: Request,
        matches: Matches,
        params: RoutingParams,
        decode: Node,
        slot: tuple[float, float] | None,
        kv_tokens: int,
    ) -> None:
        """`slot`: the decode node's own terms."""
        self._matches, self._decode, self._slot = matches, decode, slot
        sources: Remembered[_Alike, _Source | None]
        sources = Remembered(partial(_source, params.lanes, request, decode.region, kv_tokens))
        self._sources: Remembered[Traits, _Source | None]
        self._sources = Remembered(lambda traits: sources[traits.hardware, traits.region, prefill_share(traits)])

    def cheapest(self, nodes: list[Node], busy: Mapping[NodeId, Busy]) -> list[Node] | None:
        """Those with the least of all that depends on prefilling there; none of them decodes this request. None without
        a profile of each."""
        sources, matches, lowest_s, found = self._sources, self._matches, math.inf, list[Node]()
        for node in nodes:
            source = sources[node.traits]
            if source is None:
                return None
            name = node.id
            queue_s = (busy.get(name) or node.busy)[0] * source.queue_s_per_token
            match = matches.get(name)
            prefill_s, exposed_s = source[0 if match is None else match.resumed]
            seconds = queue_s + prefill_s + exposed_s
            if seconds < lowest_s:
                lowest_s, found = seconds, [node]
            elif seconds == lowest_s:
                found.append(node)
        return found

    def seconds(self, node: Node, waiting_tokens: int, cached_tokens: int) -> float | None:
        """None without a profile."""
        source = self._sources[node.traits]
        if source is None:
            return None
        prefill_s, exposed_s = source[cached_tokens]
        seconds = waiting_tokens * source.queue_s_per_token + prefill_s
        return seconds if node is self._decode else seconds + exposed_s

    def predicted(self, node: Node, waiting_tokens: int, cached_tokens: int) -> Predicted | None:
        """None without a profile of both nodes."""
        source = self._sources[node.traits]
        if source is None or self._slot is None:
            return None
        prefill_s, exposed_s = source[cached_tokens]
        if node is self._decode:
            exposed_s = 0.0
        queue_s, (wait_s, step_s) = waiting_tokens * source.queue_s_per_token, self._slot
        # Those ahead move up while this one is prefilled.
        decode_queue_s = max(0.0, wait_s - queue_s - prefill_s - exposed_s)
        return Predicted(queue_s, prefill_s, exposed_s, decode_queue_s, step_s)

    def transfer_bytes(self, node: Node) -> int | None:
        """What of the KV has to cross. None without a profile."""
        if node is self._decode:
            return 0
        source = self._sources[node.traits]
        return None if source is None else round(source.transfer_bytes)


def _source(lanes: Lanes, request: Request, target: RegionId, kv_tokens: int, alike: _Alike) -> _Source | None:
    hardware, region, share = alike
    lane = lanes.lane(hardware, region, target)
    return None if lane is None else _Source(lane, share, request.handoff_tokens, kv_tokens, request.prompt_tokens)


def prefill_share(node: Node | Traits) -> float:
    """A decode node that prefills after all does so between its steps, at nearly full speed."""
    return max(LEAST_SHARE, node.share) if node.role is MIXED else 1.0


def pull_costs(
    source: Node, target: Node, cached_tokens: int, held_tokens: int, params: RoutingParams
) -> tuple[int, float, float] | None:
    """Bytes and seconds of fetching a prefix of `held_tokens` to a node that has `cached_tokens` of it, and the seconds
    of computing the difference there. None without a profile, or where nothing is known of the link."""
    lane = params.lanes.lane(target.hardware, source.region, target.region)
    if lane is None or lane.bytes_per_s is None:
        return None
    rate, prefill_s = lane.bytes_per_s, lane.prefill_s
    nbytes = lane.kv_bytes(held_tokens, cached_tokens)
    transfer_s = ((nbytes + lane.queued_bytes) / rate if rate > 0 else math.inf) + lane.rtt_s
    return round(nbytes), transfer_s, (prefill_s[held_tokens] - prefill_s[cached_tokens]) / prefill_share(target)
