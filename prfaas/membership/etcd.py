"""The store on etcd v3. `etcd_calls` has the rules for calling it, `etcd_watch` those for following it."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import grpc

from prfaas.membership.etcd_calls import EtcdCalls, Login, Refused, Tls
from prfaas.membership.etcd_watch import encoded, snapshot_of, to_entry, watch
from prfaas.membership.store import Batch, Entry, Lease, LeaseExpired, Snapshot
from prfaas.rpc.v1 import etcd_pb2 as pb


class EtcdStore:
    """`endpoints` are `host:port`. Use it in one event loop."""

    def __init__(self, endpoints: Sequence[str], *, tls: Tls | None = None, login: Login | None = None) -> None:
        self._calls = EtcdCalls(endpoints, tls, login)

    async def get(self, key: str) -> Entry | None:
        reply = await self._calls.call("/etcdserverpb.KV/Range", pb.RangeRequest(key=encoded(key)), pb.RangeResponse)
        return to_entry(reply.kvs[0]) if reply.kvs else None

    async def list(self, prefix: str) -> Snapshot:
        return await snapshot_of(self._calls, prefix)

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        request = pb.PutRequest(key=encoded(key), value=value, lease=lease or 0)
        try:
            reply = await self._calls.call("/etcdserverpb.KV/Put", request, pb.PutResponse)
        except Refused as refusal:
            raise _as_lease_expired(refusal, lease) from refusal
        return reply.header.revision

    async def compare_and_put(
        self, key: str, value: bytes, expected_mod_revision: int, lease: Lease | None = None
    ) -> int | None:
        request = pb.TxnRequest(
            compare=[pb.Compare(target=pb.Compare.MOD, key=encoded(key), mod_revision=expected_mod_revision)],
            success=[pb.RequestOp(request_put=pb.PutRequest(key=encoded(key), value=value, lease=lease or 0))],
        )
        try:
            reply, attempts = await self._calls.attempts(
                lambda: self._calls.unary("/etcdserverpb.KV/Txn", request, pb.TxnResponse)
            )
        except Refused as refusal:
            raise _as_lease_expired(refusal, lease) from refusal
        if reply.succeeded:
            return reply.header.revision
        if attempts == 1:
            return None
        # An earlier attempt may have been carried out and its answer lost. The comparison made it safe to repeat.
        entry = await self.get(key)
        return entry.mod_revision if entry and (entry.value, entry.lease) == (value, lease) else None

    async def delete(self, key: str) -> None:
        request = pb.DeleteRangeRequest(key=encoded(key))
        await self._calls.call("/etcdserverpb.KV/DeleteRange", request, pb.DeleteRangeResponse)

    def watch(self, prefix: str) -> AsyncGenerator[Batch, None]:
        return watch(self._calls, prefix)

    async def grant(self, ttl_s: int) -> Lease:
        # Repeated without harm: a lease whose answer was lost holds no keys and expires by itself.
        request = pb.LeaseGrantRequest(TTL=ttl_s)
        reply = await self._calls.call("/etcdserverpb.Lease/LeaseGrant", request, pb.LeaseGrantResponse)
        return Lease(reply.ID)

    async def keep_alive(self, lease: Lease) -> int:
        ttl_s, _ = await self._calls.attempts(lambda: self._renewed(lease))
        if ttl_s <= 0:
            raise LeaseExpired(lease)
        return ttl_s

    async def _renewed(self, lease: Lease) -> int:
        request = pb.LeaseKeepAliveRequest(ID=lease)
        path = "/etcdserverpb.Lease/LeaseKeepAlive"
        async with aclosing(self._calls.stream(path, request, pb.LeaseKeepAliveResponse)) as replies:
            return (await anext(replies)).TTL

    async def revoke(self, lease: Lease) -> None:
        request = pb.LeaseRevokeRequest(ID=lease)
        try:
            await self._calls.call("/etcdserverpb.Lease/LeaseRevoke", request, pb.LeaseRevokeResponse)
        except Refused as refusal:
            if refusal.code is not grpc.StatusCode.NOT_FOUND:
                raise

    async def close(self) -> None:
        await self._calls.close()


def _as_lease_expired(refusal: Refused, lease: Lease | None) -> Exception:
    return LeaseExpired(lease) if lease and refusal.code is grpc.StatusCode.NOT_FOUND else refusal
