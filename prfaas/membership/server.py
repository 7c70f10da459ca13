"""Serves a `MemoryStore` over the part of etcd's v3 interface that we use, for clusters that run without etcd.

`EtcdStore` and `etcdctl get|put|del|watch` speak to it as to etcd. It is one process without a copy of its data: when
it dies the cluster serves on, and workers register again with the next one.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from prfaas.errors import PrfaasError
from prfaas.membership.etcd_watch import decoded
from prfaas.membership.memory import MemoryStore
from prfaas.membership.revisions import HistoryGone
from prfaas.membership.server_watch import WatchStream, covering, to_kv
from prfaas.membership.store import Lease, LeaseExpired
from prfaas.rpc.v1 import etcd_pb2 as pb

Context = grpc.aio.ServicerContext[Any, Any]
Request = TypeVar("Request", bound=Message)

_OPTIONS: list[tuple[str, Any]] = [
    # Clients ping every 10 s; gRPC's own limit of one in 5 minutes would hang up on them.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    # A second server on the same port would get a part of the clients, and tell them of another cluster.
    ("grpc.so_reuseport", 0),
]


class EmbeddedStoreServer:
    """Port 0 takes a free one; `port` says which after `start`. Without credentials it speaks in plain."""

    def __init__(
        self, store: MemoryStore, host: str, port: int, credentials: grpc.ServerCredentials | None = None
    ) -> None:
        self._store, self._credentials = store, credentials
        self._host = host
        self.port = port
        self._server: grpc.aio.Server | None = None

    @property
    def endpoint(self) -> str:
        return f"{self._host}:{self.port}"

    async def start(self) -> None:
        """Raises RuntimeError when the address cannot be had."""
        self._server = grpc.aio.server(options=_OPTIONS)
        self._server.add_generic_rpc_handlers((self._kv(), self._lease(), self._watch()))
        if self._credentials is None:
            self.port = self._server.add_insecure_port(self.endpoint)
        else:
            self.port = self._server.add_secure_port(self.endpoint, self._credentials)
        await self._server.start()

    async def stop(self) -> None:
        """End all calls at once; the store keeps its data."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def _kv(self) -> grpc.GenericRpcHandler:
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Range": _unary(self._range, pb.RangeRequest),
            "Put": _unary(self._put, pb.PutRequest),
            "DeleteRange": _unary(self._delete_range, pb.DeleteRangeRequest),
            "Txn": _unary(self._txn, pb.TxnRequest),
        }
        return grpc.method_handlers_generic_handler("etcdserverpb.KV", methods)

    def _lease(self) -> grpc.GenericRpcHandler:
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "LeaseGrant": _unary(self._grant, pb.LeaseGrantRequest),
            "LeaseRevoke": _unary(self._revoke, pb.LeaseRevokeRequest),
            "LeaseKeepAlive": grpc.stream_stream_rpc_method_handler(
                self._keep_alive, pb.LeaseKeepAliveRequest.FromString, _serialized
            ),
        }
        return grpc.method_handlers_generic_handler("etcdserverpb.Lease", methods)

    def _watch(self) -> grpc.GenericRpcHandler:
        async def serve(requests: AsyncIterator[pb.WatchRequest], context: Context) -> None:
            await WatchStream(self._store, context.write).serve(requests)

        handler = grpc.stream_stream_rpc_method_handler(serve, pb.WatchRequest.FromString, _serialized)
        return grpc.method_handlers_generic_handler("etcdserverpb.Watch", {"Watch": handler})

    async def _range(self, request: pb.RangeRequest) -> pb.RangeResponse:
        with self._store.open() as data:
            entries = data.select(covering(request.key, request.range_end), request.revision or None)
            shown = entries[: request.limit] if request.limit else entries
            return pb.RangeResponse(
                header=pb.ResponseHeader(revision=data.revision),
                kvs=[] if request.count_only else [to_kv(entry, keys_only=request.keys_only) for entry in shown],
                more=len(shown) < len(entries),
                count=len(entries),
            )

    async def _put(self, request: pb.PutRequest) -> pb.PutResponse:
        with self._store.open() as data:
            revision = data.put(decoded(request.key), request.value, _lease_of(request))
            return pb.PutResponse(header=pb.ResponseHeader(revision=revision))

    async def _delete_range(self, request: pb.DeleteRangeRequest) -> pb.DeleteRangeResponse:
        with self._store.open() as data:
            deleted = data.delete(covering(request.key, request.range_end))
            return pb.DeleteRangeResponse(header=pb.ResponseHeader(revision=data.revision), deleted=deleted)

    async def _txn(self, request: pb.TxnRequest) -> pb.TxnResponse:
        """The one transaction we use: put a key if its mod_revision is the expected one."""
        match list(request.compare), list(request.success), list(request.failure):
            case [compare], [then], [] if _compares_mod_revision(compare) and then.HasField("request_put"):
                expected, put = compare.mod_revision, then.request_put
            case _:
                raise _Unsupported
        with self._store.open() as data:
            entry = data.get(decoded(compare.key))
            succeeded = (entry.mod_revision if entry else 0) == expected
            if succeeded:
                data.put(decoded(put.key), put.value, _lease_of(put))
            header = pb.ResponseHeader(revision=data.revision)
            responses = [pb.ResponseOp(response_put=pb.PutResponse(header=header))] if succeeded else []
            return pb.TxnResponse(header=header, succeeded=succeeded, responses=responses)

    async def _grant(self, request: pb.LeaseGrantRequest) -> pb.LeaseGrantResponse:
        lease = await self._store.grant(request.TTL)
        return pb.LeaseGrantResponse(header=self._header(), ID=lease, TTL=request.TTL)

    async def _revoke(self, request: pb.LeaseRevokeRequest) -> pb.LeaseRevokeResponse:
        with self._store.open() as data:
            data.revoke(Lease(request.ID))
        return pb.LeaseRevokeResponse(header=self._header())

    async def _keep_alive(
        self, requests: AsyncIterator[pb.LeaseKeepAliveRequest], context: Context
    ) -> AsyncIterator[pb.LeaseKeepAliveResponse]:
        async for request in requests:
            try:
                ttl_s = await self._store.keep_alive(Lease(request.ID))
            except LeaseExpired:
                ttl_s = 0
            yield pb.LeaseKeepAliveResponse(header=self._header(), ID=request.ID, TTL=ttl_s)

    def _header(self) -> pb.ResponseHeader:
        with self._store.open() as data:
            return pb.ResponseHeader(revision=data.revision)


class _Unsupported(PrfaasError):
    """A transaction of a form that only etcd itself carries out."""


def _unary(
    handle: Callable[[Request], Awaitable[Message]], request_type: type[Request]
) -> "grpc.RpcMethodHandler[Request, Message]":
    """The handler with our errors as etcd's codes and words, by which clients know them."""

    async def serve(request: Request, context: Context) -> Message:
        try:
            return await handle(request)
        except LeaseExpired:
            await context.abort(grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found")
        except HistoryGone as error:
            which = "has been compacted" if error.revision < error.compacted else "is a future revision"
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, f"etcdserver: mvcc: required revision {which}")
        except _Unsupported:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this transaction needs a real etcd")

    return grpc.unary_unary_rpc_method_handler(serve, request_type.FromString, _serialized)


def _compares_mod_revision(compare: pb.Compare) -> bool:
    return compare.target == pb.Compare.MOD and compare.result == pb.Compare.EQUAL


def _lease_of(request: pb.PutRequest) -> Lease | None:
    return Lease(request.lease) if request.lease else None


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()
