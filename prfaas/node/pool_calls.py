"""Calls of the cache pool's shards: a channel per shard that is there, and a pause for one that fails.

A shard that cannot be reached, or that does not answer what costs it no time, is left alone for a while: others must
not wait for it in turn.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import structlog

from prfaas.cluster import Incarnation, NodeId, Pool
from prfaas.errors import DeadlineExceeded
from prfaas.rpc.cache_failures import error_of
from prfaas.rpc.identity import Identity, dial
from prfaas.rpc.v1.cache_pb2_grpc import CachePoolStub
from prfaas.security import PeerRole

#: How long a shard that failed is not asked.
PAUSE_S = 5.0
#: Beyond the deadline that the shard itself keeps, where it has one.
GRACE_S = 1.0

OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    # A shard that was started again is found again at once, and not after the minutes that gRPC would wait.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

log = structlog.get_logger()


class ShardCalls:
    """Belongs to one event loop. `now` is its clock."""

    def __init__(self, identity: Identity | None, now: Callable[[], float]) -> None:
        self._identity, self._now = identity, now
        #: By shard, with the address that it leads to.
        self._channels: dict[NodeId, tuple[str, grpc.aio.Channel]] = {}
        self._left: set[asyncio.Future[None]] = set()
        #: By shard: the life of it that failed, and until when that one is left alone.
        self._paused: dict[NodeId, tuple[Incarnation, float]] = {}

    def reachable(self, shards: Mapping[NodeId, Pool]) -> Mapping[NodeId, Pool]:
        return {shard: pool for shard, pool in shards.items() if not self._is_paused(pool)}

    async def call(
        self, pool: Pool, method: str, request: Any, deadline_s: float, *, at_once: bool = True, attempt: str = ""
    ) -> Any:
        """The shard's answer. `at_once`: it need not wait for anything to give it. Raises PrfaasError."""
        try:
            ask = getattr(CachePoolStub(self._channel(pool)), method)
            return await ask(request, timeout=deadline_s + (0.0 if at_once else GRACE_S))
        except grpc.aio.AioRpcError as error:
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if error.code() is grpc.StatusCode.UNAVAILABLE or (late and at_once):
                self._pause(pool)
            if late:
                raise DeadlineExceeded("cache", deadline_s) from error
            raise error_of(error, pool.id, attempt) from error

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close() for _, channel in channels.values()))

    def _channel(self, pool: Pool) -> grpc.aio.Channel:
        known = self._channels.get(pool.id)
        if known is not None and known[0] == pool.rpc_address:
            return known[1]
        if known is not None:
            self._left.add(task := asyncio.ensure_future(known[1].close()))
            task.add_done_callback(self._left.discard)
        channel = dial(self._identity, PeerRole.CACHE_POOL, pool.rpc_address, OPTIONS)
        self._channels[pool.id] = pool.rpc_address, channel
        return channel

    def _is_paused(self, pool: Pool) -> bool:
        incarnation, until = self._paused.get(pool.id, (None, 0.0))
        return incarnation == pool.incarnation and self._now() < until

    def _pause(self, pool: Pool) -> None:
        if not self._is_paused(pool):
            log.warning("shard of the cache is left alone", shard=pool.id, seconds=PAUSE_S)
        self._paused[pool.id] = pool.incarnation, self._now() + PAUSE_S
