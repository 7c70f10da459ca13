"""The shard over gRPC: messages in, its answers and refusals out.

Workers read and write, and routers follow the index. The shard itself asks at its own address which life of it this is.
"""

from functools import partial

from prfaas.node.feed_calls import Context, answered, watch
from prfaas.node.pool_shard import PoolShard
from prfaas.node.rpc_server import RpcServer, Service, serve_rpc
from prfaas.rpc import cache_translate as wire
from prfaas.rpc.gate import FIRST_CALL_S
from prfaas.rpc.identity import Identity
from prfaas.rpc.v1 import cache_pb2 as pb
from prfaas.rpc.v1 import cache_pb2_grpc
from prfaas.security import PeerRole

WORKERS = frozenset({PeerRole.PREFILL_WORKER, PeerRole.DECODE_WORKER})
FOLLOWERS = frozenset({PeerRole.ROUTER, PeerRole.CACHE_POOL})


class CachePoolServicer(cache_pb2_grpc.CachePoolServicer):
    def __init__(self, shard: PoolShard) -> None:
        self._shard = shard

    async def Lease(self, request: pb.LeaseRequest, context: Context) -> pb.LeaseResponse:  # noqa: N802
        async def answer() -> pb.LeaseResponse:
            return wire.pack_leased(self._shard.lease(wire.unpack_lease(request)))

        return await answered(context, answer)

    async def Get(self, request: pb.GetRequest, context: Context) -> pb.GetResponse:  # noqa: N802
        async def answer() -> pb.GetResponse:
            return wire.pack_got(await self._shard.get(wire.unpack_get(request)))

        return await answered(context, answer)

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:  # noqa: N802
        async def answer() -> pb.RenewResponse:
            return pb.RenewResponse(valid=self._shard.renew(wire.unpack_renew(request)))

        return await answered(context, answer)

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:  # noqa: N802
        async def answer() -> pb.ReleaseResponse:
            return pb.ReleaseResponse(valid=self._shard.release(wire.unpack_release(request)))

        return await answered(context, answer)

    async def Put(self, request: pb.PutRequest, context: Context) -> pb.PutResponse:  # noqa: N802
        async def answer() -> pb.PutResponse:
            return wire.pack_wanted(await self._shard.put(wire.unpack_put(request)))

        return await answered(context, answer)

    async def Abandon(self, request: pb.AbandonRequest, context: Context) -> pb.AbandonResponse:  # noqa: N802
        async def answer() -> pb.AbandonResponse:
            self._shard.abandon(wire.unpack_abandon(request))
            return pb.AbandonResponse()

        return await answered(context, answer)

    async def Await(self, request: pb.AwaitRequest, context: Context) -> pb.AwaitResponse:  # noqa: N802
        async def answer() -> pb.AwaitResponse:
            return pb.AwaitResponse(published=await self._shard.awaited(wire.unpack_await(request)))

        return await answered(context, answer)

    # A coroutine that writes, not a generator: its `finally` runs when the stream ends, not when it is collected.
    async def Watch(self, request: pb.WatchRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        await watch(self._shard.feed, request, context)


async def serve_pool(
    shard: PoolShard, host: str, port: int, identity: Identity | None = None, *, first_call_s: float = FIRST_CALL_S
) -> RpcServer:
    """As `serve_rpc`. Raises OSError when it cannot listen."""
    service = Service(
        str(pb.DESCRIPTOR.services_by_name["CachePool"].full_name),
        partial(cache_pb2_grpc.add_CachePoolServicer_to_server, CachePoolServicer(shard)),
        _callers,
    )
    return await serve_rpc((service,), host, port, identity, first_call_s=first_call_s)


def _callers(_own: PeerRole) -> dict[str, frozenset[PeerRole]]:
    asked = dict.fromkeys(("Lease", "Get", "Renew", "Release", "Put", "Abandon", "Await"), WORKERS)
    return {**asked, "Watch": FOLLOWERS}
