"""Routers that follow an index over gRPC, and how a call of ours answers and refuses."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import grpc

from prfaas.errors import Overloaded, PrfaasError
from prfaas.node.pool_feed import Feed
from prfaas.rpc import cache_translate as wire
from prfaas.rpc.cache_failures import status_of
from prfaas.rpc.cache_updates import pack_update
from prfaas.rpc.v1 import cache_pb2 as pb
from prfaas.rpc.v1 import cache_pb2_grpc
from prfaas.security import PeerRole

#: A router that takes no message for so long is cut off.
STALLED_S = 10.0

A = TypeVar("A")
Context = grpc.aio.ServicerContext[Any, Any]


async def watch(feed: Feed, request: pb.WatchRequest, context: Context) -> None:
    """Every update, until the router leaves or is cut off."""

    async def answer() -> None:
        async with aclosing(feed.watch(wire.unpack_watch(request))) as updates:
            async for update in updates:
                try:
                    async with asyncio.timeout(STALLED_S):
                        await context.write(pack_update(update))
                except TimeoutError:
                    raise Overloaded("the router does not read its updates") from None

    await answered(context, answer)


async def answered(context: Context, answer: Callable[[], Awaitable[A]]) -> A:
    try:
        return await answer()
    except PrfaasError as error:
        await context.abort(*status_of(error))
        raise AssertionError("abort raises") from error


class EngineCacheServicer(cache_pb2_grpc.EngineCacheServicer):
    """What the engine of a worker has in a cache of its own."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    # A coroutine that writes, not a generator: its `finally` runs when the stream ends, not when it is collected.
    async def Watch(self, request: pb.WatchRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        await watch(self._feed, request, context)


def engine_cache_callers(_own: PeerRole) -> dict[str, frozenset[PeerRole]]:
    return {"Watch": frozenset({PeerRole.ROUTER})}
