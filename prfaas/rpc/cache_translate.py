"""Commands to a shard of the cache and its answers as protobuf messages and back.

What comes from the wire is checked here: what cannot be read is an InvalidRequest, and so is a prompt that is too long
or a transfer of more than one moves.
"""

import struct
from collections.abc import Sequence

from prfaas.cluster import Incarnation, Namespace, NodeId, RegionId
from prfaas.errors import InvalidRequest
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS, KEY_BYTES
from prfaas.kvcache.placement import PROMPT_UNITS, TRANSFER_TOKENS
from prfaas.rpc.cache import Abandon, Await, Get, Got, Lease, Leased, LeaseId, Put, Release, Renew, Wanted, Watch
from prfaas.rpc.failures import milliseconds
from prfaas.rpc.translate import (
    pack_attempt,
    pack_destination,
    pack_reserved,
    unpack_attempt,
    unpack_destination,
    unpack_reserved,
)
from prfaas.rpc.v1 import cache_pb2 as pb

#: Of a tenant, a holder, a lease.
MAX_NAME_BYTES = 512
#: Kinds of urgency that the data plane knows.
MAX_URGENCY = 2


def pack_lease(command: Lease) -> pb.LeaseRequest:
    return pb.LeaseRequest(
        namespace=command.namespace,
        keys=command.keys,
        tenant=command.tenant,
        limit_tokens=command.limit_tokens,
        joint=command.joint,
        holder=command.holder,
        ttl_ms=milliseconds(command.ttl_s),
    )


def unpack_lease(message: pb.LeaseRequest) -> Lease:
    return Lease(
        namespace=Namespace(message.namespace),
        keys=_keys(message.keys),
        tenant=_name(message.tenant, "tenant"),
        limit_tokens=message.limit_tokens,
        joint=message.joint,
        holder=_name(message.holder, "holder"),
        ttl_s=message.ttl_ms / 1000,
    )


def pack_leased(answer: Leased) -> pb.LeaseResponse:
    return pb.LeaseResponse(
        lease=answer.lease or "",
        kv_tokens=answer.kv_tokens,
        state_tokens=answer.state_tokens,
        matched_tokens=answer.matched_tokens,
    )


def unpack_leased(message: pb.LeaseResponse) -> Leased:
    matched_tokens = _boundary(message.matched_tokens)
    if not message.lease:
        return Leased(matched_tokens=matched_tokens)
    kv_tokens, state_tokens = _boundary(message.kv_tokens), _boundary(message.state_tokens)
    if state_tokens not in {0, kv_tokens}:
        raise InvalidRequest(f"a state at {state_tokens} tokens with KV up to {kv_tokens}", param="state_tokens")
    if matched_tokens < kv_tokens:
        raise InvalidRequest(f"KV up to {kv_tokens} of {matched_tokens} tokens", param="matched_tokens")
    return Leased(LeaseId(_name(message.lease, "lease")), kv_tokens, state_tokens, matched_tokens)


def pack_get(command: Get) -> pb.GetRequest:
    return pb.GetRequest(
        lease=command.lease,
        first_tokens=command.first_tokens,
        stop_tokens=command.stop_tokens,
        state=command.state,
        attempt=pack_attempt(command.attempt),
        destination=pack_destination(command.destination),
        urgency=command.urgency,
        deadline_ms=milliseconds(command.deadline_s),
    )


def unpack_get(message: pb.GetRequest) -> Get:
    first, stop = _boundary(message.first_tokens), _boundary(message.stop_tokens)
    if first > stop or (first == stop and not message.state):
        raise InvalidRequest(f"nothing is between {first} and {stop} tokens", param="stop_tokens")
    _moved(first, stop)
    if message.urgency > MAX_URGENCY:
        raise InvalidRequest(f"urgency {message.urgency}", param="urgency")
    return Get(
        lease=LeaseId(_name(message.lease, "lease")),
        first_tokens=first,
        stop_tokens=stop,
        state=message.state,
        attempt=unpack_attempt(message.attempt),
        destination=unpack_destination(message.destination),
        urgency=message.urgency,
        deadline_s=message.deadline_ms / 1000,
    )


def pack_got(answer: Got) -> pb.GetResponse:
    return pb.GetResponse(payload_bytes=answer.payload_bytes)


def unpack_got(message: pb.GetResponse) -> Got:
    return Got(message.payload_bytes)


def pack_renew(command: Renew) -> pb.RenewRequest:
    return pb.RenewRequest(lease=command.lease, ttl_ms=milliseconds(command.ttl_s))


def unpack_renew(message: pb.RenewRequest) -> Renew:
    return Renew(LeaseId(_name(message.lease, "lease")), message.ttl_ms / 1000)


def pack_release(command: Release) -> pb.ReleaseRequest:
    return pb.ReleaseRequest(lease=command.lease)


def unpack_release(message: pb.ReleaseRequest) -> Release:
    return Release(LeaseId(_name(message.lease, "lease")))


def pack_put(command: Put) -> pb.PutRequest:
    return pb.PutRequest(
        put=pack_attempt(command.put),
        namespace=command.namespace,
        tenant=command.tenant,
        keys=command.keys,
        stop_tokens=command.stop_tokens,
        states=command.states,
        unit_checksums=_pack_checksums(command.unit_checksums),
        state_checksums=_pack_checksums(command.state_checksums),
        source_node=command.source_node,
        source_region=command.source_region,
        ttl_ms=milliseconds(command.ttl_s),
        unproven=command.unproven,
    )


def unpack_put(message: pb.PutRequest) -> Put:
    keys, stop = _keys(message.keys), _boundary(message.stop_tokens)
    if stop > len(keys) // KEY_BYTES * HASH_UNIT_TOKENS:
        raise InvalidRequest(f"no keys up to {stop} tokens", param="stop_tokens")
    states, unproven = _rising(message.states, stop), _rising(message.unproven, stop)
    units = _unpack_checksums(message.unit_checksums, stop // HASH_UNIT_TOKENS)
    return Put(
        put=unpack_attempt(message.put),
        namespace=Namespace(message.namespace),
        tenant=_name(message.tenant, "tenant"),
        keys=keys,
        stop_tokens=stop,
        states=states,
        unit_checksums=units,
        state_checksums=_unpack_checksums(message.state_checksums, len(states)),
        source_node=NodeId(_name(message.source_node, "source_node")),
        source_region=RegionId(_name(message.source_region, "source_region")),
        ttl_s=message.ttl_ms / 1000,
        unproven=unproven,
    )


def pack_wanted(answer: Wanted) -> pb.PutResponse:
    message = pb.PutResponse(first_tokens=answer.first_tokens, stop_tokens=answer.stop_tokens, states=answer.states)
    if answer.room is not None:
        message.room.CopyFrom(pack_reserved(answer.room))
    return message


def unpack_wanted(message: pb.PutResponse) -> Wanted:
    if not message.HasField("room"):
        return Wanted()
    first, stop = _boundary(message.first_tokens), _boundary(message.stop_tokens)
    states = _rising(message.states, stop)
    if first > stop or any(state < first for state in states):
        raise InvalidRequest(f"tokens {first}:{stop} with states at {states}", param="first_tokens")
    _moved(first, stop)
    return Wanted(first, stop, states, unpack_reserved(message.room))


def pack_abandon(command: Abandon) -> pb.AbandonRequest:
    return pb.AbandonRequest(put=pack_attempt(command.put))


def unpack_abandon(message: pb.AbandonRequest) -> Abandon:
    return Abandon(unpack_attempt(message.put))


def pack_await(command: Await) -> pb.AwaitRequest:
    return pb.AwaitRequest(put=pack_attempt(command.put), deadline_ms=milliseconds(command.deadline_s))


def unpack_await(message: pb.AwaitRequest) -> Await:
    return Await(unpack_attempt(message.put), message.deadline_ms / 1000)


def pack_watch(command: Watch) -> pb.WatchRequest:
    return pb.WatchRequest(
        router=command.router, known_incarnation=command.known_incarnation or 0, known_seq=command.known_seq
    )


def unpack_watch(message: pb.WatchRequest) -> Watch:
    known = Incarnation(message.known_incarnation) if message.known_incarnation else None
    return Watch(_name(message.router, "router"), known, message.known_seq)


def _keys(keys: bytes) -> bytes:
    if not keys or len(keys) % KEY_BYTES or len(keys) > PROMPT_UNITS * KEY_BYTES:
        raise InvalidRequest(f"{len(keys)} bytes are not the keys of a prompt", param="keys")
    return keys


def _name(name: str, param: str) -> str:
    if len(name.encode()) > MAX_NAME_BYTES:
        raise InvalidRequest(f"a {param} of more than {MAX_NAME_BYTES} bytes", param=param)
    return name


def _boundary(tokens: int) -> int:
    if tokens % HASH_UNIT_TOKENS or tokens > PROMPT_UNITS * HASH_UNIT_TOKENS:
        raise InvalidRequest(f"{tokens} tokens are no boundary of a prompt", param="tokens")
    return tokens


def _moved(first: int, stop: int) -> None:
    if stop - first > TRANSFER_TOKENS:
        raise InvalidRequest(f"tokens {first}:{stop} are more than one transfer moves", param="stop_tokens")


def _rising(boundaries: Sequence[int], stop: int) -> tuple[int, ...]:
    if len(boundaries) > PROMPT_UNITS or list(boundaries) != sorted({_boundary(each) for each in boundaries}):
        raise InvalidRequest("boundaries that do not rise", param="states")
    if boundaries and not 0 < boundaries[0] <= boundaries[-1] <= stop:
        raise InvalidRequest(f"a state outside of {stop} tokens", param="states")
    return tuple(boundaries)


def _pack_checksums(checksums: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(checksums)}I", *checksums)


def _unpack_checksums(packed: bytes, count: int) -> tuple[int, ...]:
    """All of them or none."""
    if packed and len(packed) != 4 * count:
        raise InvalidRequest(f"{len(packed)} bytes of checksums for {count} objects", param="checksums")
    return struct.unpack(f"<{len(packed) // 4}I", packed)
