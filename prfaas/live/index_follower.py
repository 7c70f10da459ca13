"""A router's copies of indexes: each is followed over a stream of its own, from whoever has it.

One that cannot be heard, or whose copy has missed something, finds nothing until that is mended; how fresh each copy is
can be seen.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from prfaas.cluster import NodeId, Pool, RegionId
from prfaas.errors import InvalidRequest, PeerUnavailable, PrfaasError
from prfaas.kvcache.feed import Copy, ShardFeed
from prfaas.kvcache.region_index import RegionIndex
from prfaas.live.link_grpc import ChannelOptions
from prfaas.rpc.cache import Watch
from prfaas.rpc.cache_failures import error_of
from prfaas.rpc.cache_translate import pack_watch
from prfaas.rpc.cache_updates import MAX_UPDATE_BYTES, unpack_update
from prfaas.rpc.v1 import cache_pb2 as pb

#: How often the view is looked at for what has come or gone.
LOOK_S = 0.25
#: Pause before a stream is opened again, doubled while that fails.
BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0

#: A channel to whoever has the index, and its call `Watch` there.
Connect = Callable[[Pool, ChannelOptions], grpc.aio.Channel]
Call = Callable[[grpc.aio.Channel], Callable[[pb.WatchRequest], Any]]

log = structlog.get_logger()


@dataclass(slots=True)
class Followed:
    """One index as the router knows it. `heard_at` is the time of its last message, `behind` why it had to begin anew
    last."""

    pool: Pool
    feed: ShardFeed
    heard_at: float | None = None
    updates: int = 0
    behind: str = ""
    task: "asyncio.Task[None] | None" = None


class IndexFollower:
    """`run` in a task of its own. `wanted`: those that there are, by their ids. `bound_bytes`: of memory for all copies
    together. `stale_s`: what was silent for longer is not counted on."""

    def __init__(
        self,
        router: str,
        wanted: Callable[[], Mapping[NodeId, Pool]],
        connect: Connect,
        call: Call,
        *,
        bound_bytes: int,
        stale_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router, self._wanted, self._connect, self._call = router, wanted, connect, call
        self._stale_s, self._now = stale_s, now
        self.index = RegionIndex(bound_bytes)
        self._followed: dict[NodeId, Followed] = {}
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

    def follow(self, pool: Pool) -> Followed:
        """From now on its copy is kept; whoever calls feeds it."""
        followed = self._followed[pool.id] = Followed(pool, ShardFeed(self.index, pool))
        return followed

    @property
    def any_current(self) -> bool:
        return any(each.feed.copy is Copy.CURRENT for each in self._followed.values())

    @property
    def heard_since(self) -> float:
        """What was heard later is counted on."""
        return self._now() - self._stale_s

    def age_s(self, followed: Followed) -> float:
        return float("inf") if followed.heard_at is None else self._now() - followed.heard_at

    def state(self, followed: Followed) -> Copy:
        """As far as a match that is made now counts on it."""
        silent = followed.feed.copy is Copy.CURRENT and self.age_s(followed) >= self._stale_s
        return Copy.HELD if silent else followed.feed.copy

    def _look(self, tasks: asyncio.TaskGroup) -> None:
        """Follow the lives that are there, and no others."""
        pools = self._wanted()
        for name, followed in tuple(self._followed.items()):
            if pools.get(name) != followed.pool:
                self._leave(name, followed)
        for name, pool in pools.items():
            if name not in self._followed:
                followed = self.follow(pool)
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
                log.warning("cannot connect to a cache", cache=followed.pool.id, detail=str(error))
            followed.feed.hold()
            if why != followed.behind or followed.updates > before:
                log.info("cache index is behind", cache=followed.pool.id, why=why)
            followed.behind = why
            self.stale[why] += 1
            pause_s = BACKOFF_S if followed.updates > before else min(2 * pause_s, MAX_BACKOFF_S)
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))

    async def _watch(self, followed: Followed) -> str:
        """Follow one stream to its end; why it ended."""
        pool, feed = followed.pool, followed.feed
        known_seq = feed.known_seq()
        known = Watch(self._router, pool.incarnation, known_seq) if known_seq is not None else Watch(self._router)
        async with self._connect(pool, _options(self._stale_s)) as channel:
            call = self._call(channel)(pack_watch(known))
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
