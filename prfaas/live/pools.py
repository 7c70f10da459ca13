"""What the caches of all regions hold of a prompt, and what engines hold by themselves, out of a router's own copies of
their indexes.

The way of a request asks nobody: it reads the copies.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import islice

import grpc

from prfaas.cluster import ClusterView, Namespace, NodeId, Pool, RegionId
from prfaas.kvcache.feed import Copy
from prfaas.kvcache.hashing import unit_keys
from prfaas.kvcache.region_index import RegionIndex
from prfaas.live.engine_caches import EngineCaches
from prfaas.live.index_follower import Followed as Followed
from prfaas.live.index_follower import IndexFollower
from prfaas.live.link_grpc import ChannelFactory, ChannelOptions
from prfaas.request import NO_MATCHES, Match, Matches, Request
from prfaas.rpc.v1.cache_pb2_grpc import CachePoolStub
from prfaas.scheduling.own_matches import OwnMatches
from prfaas.scheduling.region_matches import RegionMatches

#: Longer prompts are keyed in a thread: hashing takes about a millisecond for each hundred thousand tokens.
LONG_PROMPT_TOKENS = 1 << 15
#: Nodes that are asked which namespaces a model has. As a rule it is one; while weights are exchanged there are two.
_ASKED = 64


class CachePools:
    """`run` in a task of its own. `bound_bytes`: of memory for all copies together, and as much again for those of
    `engines`. `stale_s`: a shard that was silent for longer is not counted on."""

    def __init__(
        self,
        router: str,
        view: Callable[[], ClusterView],
        channel: ChannelFactory,
        *,
        bound_bytes: int,
        stale_s: float,
        now: Callable[[], float] = time.monotonic,
        engines: EngineCaches | None = None,
    ) -> None:
        def connect(pool: Pool, options: ChannelOptions) -> grpc.aio.Channel:
            return channel(pool.rpc_address, options)

        self._view, self.engines = view, engines
        self.shards = IndexFollower(
            router,
            lambda: view().pools,
            connect,
            lambda channel: CachePoolStub(channel).Watch,
            bound_bytes=bound_bytes,
            stale_s=stale_s,
            now=now,
        )
        self._seen: Mapping[NodeId, Pool] | None = None
        self._shards: dict[Namespace, dict[RegionId, list[NodeId]]] = {}

    async def run(self) -> None:
        """Until it is cancelled; begun again it learns everything anew."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.shards.run(), name="shards of the cache")
            if self.engines is not None:
                tasks.create_task(self.engines.run(), name="caches of engines")

    @property
    def index(self) -> RegionIndex:
        """Of all shards."""
        return self.shards.index

    @property
    def updates(self) -> Counter[RegionId]:
        return self.shards.updates

    @property
    def update_bytes(self) -> Counter[RegionId]:
        return self.shards.update_bytes

    @property
    def stale(self) -> Counter[str]:
        return self.shards.stale

    def followed(self) -> tuple[Followed, ...]:
        """Shards, in the order of their ids."""
        return self.shards.followed()

    def age_s(self, followed: Followed) -> float:
        return self.shards.age_s(followed)

    def state(self, followed: Followed) -> Copy:
        return self.shards.state(followed)

    async def matches(self, request: Request) -> Matches:
        """What there is of the prompt. Never waits for anybody."""
        view = self._view()
        shards, engines = bool(view.pools) and self.shards.any_current, self.engines
        if not shards and (engines is None or not engines.any_current):
            return NO_MATCHES
        by_region: dict[RegionId, dict[Namespace, Match]] = {}
        own: dict[NodeId, Match] = {}
        for namespace in _namespaces(view, request.model):
            regions = self._by_namespace(view).get(namespace, {}) if shards else {}
            told = engines is not None and engines.keeps(namespace)
            if not regions and not told:
                continue
            keys = await _keys(request, namespace)
            for region, names in regions.items():
                match = self._match(view, names, keys, request.handoff_tokens)
                if match.kv:
                    by_region.setdefault(region, {})[namespace] = match
            if told and engines is not None:
                own |= engines.holders(keys, request.handoff_tokens)
        found = RegionMatches(view, by_region) if by_region else NO_MATCHES
        return OwnMatches(found, own) if own else found

    def _match(self, view: ClusterView, shards: list[NodeId], keys: bytes, limit_tokens: int) -> Match:
        match = self.index.match(shards, keys, limit_tokens, self.shards.heard_since)
        stateless = all((pool := view.pools.get(shard)) is not None and pool.resumes_anywhere for shard in shards)
        return Match(joint=match.kv, kv=match.kv) if stateless else match

    def _by_namespace(self, view: ClusterView) -> dict[Namespace, dict[RegionId, list[NodeId]]]:
        """The shards by what they hold and where, worked out when they change."""
        if view.pools is not self._seen:
            self._seen, self._shards = view.pools, {}
            for name in sorted(view.pools):
                pool = view.pools[name]
                self._shards.setdefault(pool.namespace, {}).setdefault(pool.region, []).append(name)
        return self._shards


def _namespaces(view: ClusterView, model: str) -> tuple[Namespace, ...]:
    """Of the nodes that decode a model; each has keys of its own."""
    nodes = (view.nodes[name] for name in islice(view.decode, _ASKED))
    return tuple(dict.fromkeys(node.namespace for node in nodes if node.model == model))


async def _keys(request: Request, namespace: Namespace) -> bytes:
    if request.prompt_tokens <= LONG_PROMPT_TOKENS:
        return unit_keys(request.prompt, namespace, request.salt)
    return await asyncio.to_thread(unit_keys, request.prompt, namespace, request.salt)
