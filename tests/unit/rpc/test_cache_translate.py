"""Opposite `prfaas/rpc/cache_translate.py` and `prfaas/rpc/cache_failures.py`."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from prfaas.cluster import Incarnation, Namespace, NodeId, RegionId
from prfaas.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    NamespaceMismatch,
    Overloaded,
    PeerUnavailable,
    PrfaasError,
    TransferFailed,
)
from prfaas.request import AttemptId, Permit
from prfaas.rpc import cache_translate as wire
from prfaas.rpc.cache import Abandon, Await, Get, Got, Lease, Leased, LeaseId, Put, Release, Renew, Wanted, Watch
from prfaas.rpc.cache_failures import error_of, status_of
from prfaas.rpc.commands import Destination, Reserved
from prfaas.rpc.v1 import cache_pb2 as pb
from prfaas.rpc.v1 import worker_pb2

ATTEMPT = AttemptId("0123456789abcdef" * 2)
KEYS = bytes(range(256)) * 8
PERMIT = Permit(ticket=b"ticket", key_out=bytes(16), key_back=bytes(16))
TO = Destination(
    node=NodeId("p0"),
    incarnation=Incarnation(2**63),
    kv_address="h:1",
    generation=3,
    region=RegionId("far"),
    permit=PERMIT,
    held_tokens=64,
)
PUT = Put(
    put=ATTEMPT,
    namespace=Namespace("ns"),
    tenant="t",
    keys=KEYS[:64],
    stop_tokens=256,
    states=(64, 256),
    source_node=NodeId("p0"),
    source_region=RegionId("far"),
    ttl_s=2.5,
    unproven=(64,),
    unit_checksums=(1, 2, 3, 2**32 - 1),
    state_checksums=(5, 6),
)
GET = Get(
    lease=LeaseId("l"),
    first_tokens=64,
    stop_tokens=8192,
    state=True,
    attempt=ATTEMPT,
    destination=TO,
    deadline_s=1.5,
    urgency=1,
)
LEASE = Lease(namespace=Namespace("ns"), keys=KEYS, tenant="t", limit_tokens=8000, joint=True, holder="p0", ttl_s=10.0)
ROOM = Reserved(kv_address="h:2", generation=1, incarnation=Incarnation(7), permit=PERMIT)


@pytest.mark.parametrize(
    ("said", "pack", "unpack", "kind"),
    [
        (LEASE, wire.pack_lease, wire.unpack_lease, pb.LeaseRequest),
        (Leased(LeaseId("l"), 8128, 8128, 8192), wire.pack_leased, wire.unpack_leased, pb.LeaseResponse),
        (Leased(LeaseId("l"), 128, 0, 128), wire.pack_leased, wire.unpack_leased, pb.LeaseResponse),
        (Leased(matched_tokens=64), wire.pack_leased, wire.unpack_leased, pb.LeaseResponse),
        (Leased(), wire.pack_leased, wire.unpack_leased, pb.LeaseResponse),
        (GET, wire.pack_get, wire.unpack_get, pb.GetRequest),
        (Got(2**40), wire.pack_got, wire.unpack_got, pb.GetResponse),
        (Renew(LeaseId("l"), 0.25), wire.pack_renew, wire.unpack_renew, pb.RenewRequest),
        (Release(LeaseId("l")), wire.pack_release, wire.unpack_release, pb.ReleaseRequest),
        (PUT, wire.pack_put, wire.unpack_put, pb.PutRequest),
        (Wanted(64, 256, (128, 256), ROOM), wire.pack_wanted, wire.unpack_wanted, pb.PutResponse),
        (Wanted(), wire.pack_wanted, wire.unpack_wanted, pb.PutResponse),
        (Abandon(ATTEMPT), wire.pack_abandon, wire.unpack_abandon, pb.AbandonRequest),
        (Await(ATTEMPT, 3.0), wire.pack_await, wire.unpack_await, pb.AwaitRequest),
        (Watch("r0"), wire.pack_watch, wire.unpack_watch, pb.WatchRequest),
        (Watch("r0", Incarnation(2**64 - 1), 2**40), wire.pack_watch, wire.unpack_watch, pb.WatchRequest),
    ],
)
def test_what_is_said_arrives(said: Any, pack: Callable[..., Message], unpack: Callable[..., Any], kind: type[Message]):
    """Through bytes and back every command and answer is the same."""
    assert unpack(kind.FromString(pack(said).SerializeToString())) == said


def changed(message: Message, **fields: Any) -> Any:
    for name, value in fields.items():
        if isinstance(value, list):
            message.ClearField(name)
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    return message


@pytest.mark.parametrize(
    ("unpack", "message"),
    [
        (wire.unpack_lease, changed(wire.pack_lease(LEASE), keys=b"")),
        (wire.unpack_lease, changed(wire.pack_lease(LEASE), keys=KEYS[:17])),
        (wire.unpack_lease, changed(wire.pack_lease(LEASE), keys=KEYS * 128 + KEYS[:16])),
        (wire.unpack_lease, changed(wire.pack_lease(LEASE), tenant="t" * 513)),
        (wire.unpack_get, changed(wire.pack_get(GET), first_tokens=65)),
        (wire.unpack_get, changed(wire.pack_get(GET), stop_tokens=8320)),
        (wire.unpack_get, changed(wire.pack_get(GET), stop_tokens=0)),
        (wire.unpack_get, changed(wire.pack_get(GET), stop_tokens=64, state=False)),
        (wire.unpack_wanted, changed(wire.pack_wanted(Wanted(0, 8192, (), ROOM)), stop_tokens=8256)),
        (wire.unpack_get, changed(wire.pack_get(GET), urgency=3)),
        (wire.unpack_get, changed(wire.pack_get(GET), attempt=b"short")),
        (wire.unpack_put, changed(wire.pack_put(PUT), stop_tokens=320)),
        (wire.unpack_put, changed(wire.pack_put(PUT), states=[128, 64])),
        (wire.unpack_put, changed(wire.pack_put(PUT), states=[64, 64])),
        (wire.unpack_put, changed(wire.pack_put(PUT), states=[0, 64])),
        (wire.unpack_put, changed(wire.pack_put(PUT), states=[64, 512])),
        (wire.unpack_put, changed(wire.pack_put(PUT), unit_checksums=bytes(12))),
        (wire.unpack_put, changed(wire.pack_put(PUT), state_checksums=bytes(3))),
        (wire.unpack_wanted, changed(wire.pack_wanted(Wanted(64, 128, (), ROOM)), first_tokens=192)),
        (wire.unpack_wanted, changed(wire.pack_wanted(Wanted(64, 128, (), ROOM)), states=[0])),
        (wire.unpack_leased, changed(wire.pack_leased(Leased(LeaseId("l"), 128, 0, 128)), state_tokens=64)),
        (wire.unpack_leased, changed(wire.pack_leased(Leased(LeaseId("l"), 128, 0, 128)), matched_tokens=64)),
        (wire.unpack_abandon, pb.AbandonRequest(put=b"short")),
    ],
)
def test_what_makes_no_sense_is_refused(unpack: Callable[..., Any], message: Message):
    """Before it reaches the shard, or whoever asked."""
    with pytest.raises(InvalidRequest):
        unpack(message)


def test_keys_checksums_and_secrets_do_not_show_themselves():
    """A command may be logged whole."""
    for said in (LEASE, PUT, GET):
        assert repr(KEYS[:8]) not in repr(said)
        assert "ticket" not in repr(said) and "4294967295" not in repr(said)


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("bad", param="keys"),
        Overloaded("memory", retry_after_s=0.5),
        PeerUnavailable("p0", "gone"),
        TransferFailed(ATTEMPT, "no_progress", "slow"),
        EngineFailed("s0", "broken"),
        DeadlineExceeded("get", 1.5),
        NamespaceMismatch("ours", "theirs"),
    ],
)
def test_a_refusal_arrives_with_its_facts(error: PrfaasError):
    """As the error that the shard raised."""
    code, detail, trailing = status_of(error)
    metadata = grpc.aio.Metadata(*trailing)
    failed = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, detail)
    again = error_of(failed, NodeId("s0"), ATTEMPT)
    assert (type(again), vars(again)) == (type(error), vars(error))


def test_a_shard_that_is_not_there_is_unavailable():
    """Also one that says what nobody can read."""
    for trailing in ((), (("prfaas-failure-bin", b"\xff"),)):
        error = grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), "connection refused"
        )
        again = error_of(error, NodeId("s0"))
        assert isinstance(again, PeerUnavailable)
        assert (again.peer, again.detail) == ("s0", "connection refused")
    assert worker_pb2.Failed.FromString(status_of(Overloaded("x"))[2][0][1]).code == "overloaded"
