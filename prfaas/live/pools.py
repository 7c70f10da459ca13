"""A router's copy of the indexes of all cache-pool shards, and what they hold of a prompt.

Each shard in the view is followed over a stream of its own. A shard that cannot be heard, or whose copy has missed
something, finds nothing until that is mended; how fresh each copy is can be seen. The way of a request asks nobody: it
reads the copies.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice

import grpc
import structlog

from prfaas.cluster import ClusterView, Namespace, NodeId, Pool, RegionId
from prfaas.errors import InvalidRequest, PeerUnavailable, PrfaasError
from prfaas.kvcache.feed import Copy, ShardFeed
from prfaas.kvcache.hashing import unit_keys
from prfaas.kvcache.region_index import RegionIndex
from prfaas.live.link_grpc import ChannelFactory, ChannelOptions
from prfaas.request import NO_MATCHES, Match, Matches, Request
from prfaas.rpc.cache import Watch
from prfaas.rpc.cache_failures import error_of
from prfaas.rpc.cache_translate import pack_watch
from prfaas.rpc.cache_updates import MAX_UPDATE_BYTES, unpack_update
from prfaas.rpc.v1 import cache_pb2 as pb
from prfaas.rpc.v1.cache_pb2_grpc import CachePoolStub
from prfaas.scheduling.region_matches import RegionMatches

#: How often the view is looked at for shards that have come or gone.
LOOK_S = 0.25
#: Pause before a stream is opened again, doubled while that fails.
BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0
#: Longer prompts are keyed in a thread: hashing takes about a millisecond for each hundred thousand tokens.
LONG_PROMPT_TOKENS = 1 << 15
#: Nodes that are asked which namespaces a model has. As a rule it is one; while weights are exchanged there are two.
_ASKED = 64

log = structlog.get_logger()


@dataclass(slots=True)
class Followed:
    """One shard as the router knows it. `heard_at` is the time of its last message, `behind` why it had to begin anew
    last."""

    pool: Pool
    feed: ShardFeed
    heard_at: float | None = None
    updates: int = 0
    behind: str = ""
    task: "asyncio.Task[None] | None" = None


class CachePools:
    """`run` in a task of its own. `bound_bytes`: of memory for all copies together. `stale_s`: a shard that was silent
    for longer is not counted on."""

    def __init__(
        self,
        router: str,
        view: Callable[[], ClusterView],
        channel: ChannelFactory,
        *,
        bound_bytes: int,
        stale_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router, self._view, self._channel = router, view, channel
        self._stale_s, self._now = stale_s, now
        self.index = RegionIndex(bound_bytes)
        self._followed: dict[NodeId, Followed] = {}
        self._seen: Mapping[NodeId, Pool] | None = None
        self._shards: dict[Namespace, dict[RegionId, list[NodeId]]] = {}
        #: Messages and their bytes by region, and by why a copy was not current any more.
        self.updates, self.update_bytes = Counter[RegionId](), Counter[RegionId]()
        self.stale: Counter[str] = Counter()

    async def run(self) -> None:
        """Until it is cancelled; begun again it learns everything anew."""
        for name, followed in tuple(self._followed.items()):
            self._leave(name, followed)
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._look(tasks)
                await asyncio.sleep(LOOK_S)

    def followed(self) -> tuple[Followed, ...]:
        """In the order of their ids."""
        return tuple(self._followed[name] for name in sorted(self._followed))

    def age_s(self, followed: Followed) -> float:
        return float("inf") if followed.heard_at is None else self._now() - followed.heard_at

    def state(self, followed: Followed) -> Copy:
        """As far as a match that is made now counts on it."""
        silent = followed.feed.copy is Copy.CURRENT and self.age_s(followed) >= self._stale_s
        return Copy.HELD if silent else followed.feed.copy

    async def matches(self, request: Request) -> Matches:
        """What the caches of all regions hold of the prompt. Never waits for anybody."""
        view = self._view()
        if not view.pools or not any(each.feed.copy is Copy.CURRENT for each in self._followed.values()):
            return NO_MATCHES
        by_region: dict[RegionId, dict[Namespace, Match]] = {}
        for namespace in _namespaces(view, request.model):
            regions = self._by_namespace(view).get(namespace)
            if regions:
                keys = await _keys(request, namespace)
                for region, shards in regions.items():
                    match = self._match(view, shards, keys, request.handoff_tokens)
                    if match.kv:
                        by_region.setdefault(region, {})[namespace] = match
        return RegionMatches(view, by_region) if by_region else NO_MATCHES

    def _match(self, view: ClusterView, shards: list[NodeId], keys: bytes, limit_tokens: int) -> Match:
        match = self.index.match(shards, keys, limit_tokens, self._now() - self._stale_s)
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

    def _look(self, tasks: asyncio.TaskGroup) -> None:
        """Follow the lives of shards that are there, and no others."""
        pools = self._view().pools
        for name, followed in tuple(self._followed.items()):
            if pools.get(name) != followed.pool:
                self._leave(name, followed)
        for name, pool in pools.items():
            if name not in self._followed:
                followed = self._followed[name] = Followed(pool, ShardFeed(self.index, pool))
                followed.task = tasks.create_task(self._follow(followed), name=f"cache index {name}")

    def _leave(self, name: NodeId, followed: Followed) -> None:
        del self._followed[name]
        if followed.task is not None:
            followed.task.cancel()
        followed.feed.forget()

    async def _follow(self, followed: Followed) -> None:
        pause_s = BACKOFF_S
        while True:
            before = followed.updates
            try:
                why = await self._watch(followed)
            except PrfaasError as error:
                why = "disconnected"
                log.warning("cannot connect to a cache pool", shard=followed.pool.id, detail=str(error))
            followed.feed.hold()
            if why != followed.behind or followed.updates > before:
                log.info("cache index is behind", shard=followed.pool.id, why=why)
            followed.behind = why
            self.stale[why] += 1
            pause_s = BACKOFF_S if followed.updates > before else min(2 * pause_s, MAX_BACKOFF_S)
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))

    async def _watch(self, followed: Followed) -> str:
        """Follow one stream to its end; why it ended."""
        pool, feed = followed.pool, followed.feed
        known_seq = feed.known_seq()
        known = Watch(self._router, pool.incarnation, known_seq) if known_seq is not None else Watch(self._router)
        async with self._channel(pool.rpc_address, _options(self._stale_s)) as channel:
            call = CachePoolStub(channel).Watch(pack_watch(known))
            try:
                while True:
                    async with asyncio.timeout(self._stale_s):
                        message = await call.read()
                    if not isinstance(message, pb.Update):
                        return "disconnected"
                    followed.updates += 1
                    self.updates[pool.region] += 1
                    self.update_bytes[pool.region] += message.ByteSize()
                    followed.heard_at = self._now()
                    if (stale := feed.apply(unpack_update(message), followed.heard_at)) is not None:
                        return stale.value
            except TimeoutError:
                return "silent"
            except InvalidRequest:
                feed.forget()
                return "malformed"
            except grpc.aio.AioRpcError as error:
                too_long = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                if too_long and isinstance(error_of(error, pool.id), PeerUnavailable):
                    feed.forget()
                    return "malformed"
                return "disconnected"
            finally:
                call.cancel()


def _options(stale_s: float) -> ChannelOptions:
    return (
        ("grpc.max_receive_message_length", MAX_UPDATE_BYTES),
        ("grpc.keepalive_time_ms", round(stale_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(stale_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
    )


def _namespaces(view: ClusterView, model: str) -> tuple[Namespace, ...]:
    """Of the nodes that decode a model; each has keys of its own."""
    nodes = (view.nodes[name] for name in islice(view.decode, _ASKED))
    return tuple(dict.fromkeys(node.namespace for node in nodes if node.model == model))


async def _keys(request: Request, namespace: Namespace) -> bytes:
    if request.prompt_tokens <= LONG_PROMPT_TOKENS:
        return unit_keys(request.prompt, namespace, request.salt)
    return await asyncio.to_thread(unit_keys, request.prompt, namespace, request.salt)
