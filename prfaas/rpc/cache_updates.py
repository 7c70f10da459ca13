"""What a shard tells of its index, as protobuf messages and back.

The keys of a change begin, as a rule, as those of the change before it: within a message only the rest is sent, so that
a block costs its 16 bytes once, however deep it stands. No message is longer than MAX_UPDATE_BYTES: what comes longer,
or cannot be read, is refused.
"""

from collections.abc import Iterable

from prfaas.cluster import Incarnation, Namespace
from prfaas.errors import InvalidRequest
from prfaas.kvcache.feed import Changes, Heartbeat, SnapshotBegin, SnapshotChunk, SnapshotEnd, Update
from prfaas.kvcache.hashing import KEY_BYTES
from prfaas.kvcache.placement import PROMPT_UNITS
from prfaas.kvcache.prefix import Change, ChangeKind
from prfaas.rpc.v1 import cache_pb2 as pb

#: The keys of the longest prompt are 256 KiB.
MAX_UPDATE_BYTES = 320 << 10

_KINDS = {
    ChangeKind.KV_ADDED: pb.INDEX_CHANGE_KIND_KV_ADDED,
    ChangeKind.KV_REMOVED: pb.INDEX_CHANGE_KIND_KV_REMOVED,
    ChangeKind.STATE_ADDED: pb.INDEX_CHANGE_KIND_STATE_ADDED,
    ChangeKind.STATE_REMOVED: pb.INDEX_CHANGE_KIND_STATE_REMOVED,
}
_FROM_WIRE = {wire: kind for kind, wire in _KINDS.items()}


def pack_update(update: Update) -> pb.Update:
    message = pb.Update(incarnation=update.incarnation, seq=update.seq, snapshot=update.snapshot)
    match update.kind:
        case SnapshotBegin(namespace):
            message.snapshot_begin.namespace = namespace
        case SnapshotChunk(number, changes):
            message.snapshot_chunk.CopyFrom(pb.SnapshotChunk(number=number, changes=_pack_changes(changes)))
        case SnapshotEnd(chunks):
            message.snapshot_end.CopyFrom(pb.SnapshotEnd(chunks=chunks))
        case Changes(changes):
            message.changes.CopyFrom(pb.IndexChanges(changes=_pack_changes(changes)))
        case Heartbeat():
            message.heartbeat.SetInParent()
    size = message.ByteSize()
    assert size <= MAX_UPDATE_BYTES, f"an update of {size} bytes"
    return message


def unpack_update(message: pb.Update) -> Update:
    """Raises InvalidRequest for what is none, or is too long."""
    if (size := message.ByteSize()) > MAX_UPDATE_BYTES:
        raise InvalidRequest(f"an update of {size} bytes; at most {MAX_UPDATE_BYTES} are accepted", param="update")
    kind: SnapshotBegin | SnapshotChunk | SnapshotEnd | Changes | Heartbeat
    match message.WhichOneof("kind"):
        case "snapshot_begin":
            kind = SnapshotBegin(Namespace(message.snapshot_begin.namespace))
        case "snapshot_chunk":
            kind = SnapshotChunk(message.snapshot_chunk.number, _unpack_changes(message.snapshot_chunk.changes))
        case "snapshot_end":
            kind = SnapshotEnd(message.snapshot_end.chunks)
        case "changes":
            kind = Changes(_unpack_changes(message.changes.changes))
        case "heartbeat":
            kind = Heartbeat()
        case _:
            raise InvalidRequest("an update of an unknown kind", param="kind")
    return Update(Incarnation(message.incarnation), message.seq, kind, message.snapshot)


def _pack_changes(changes: Iterable[Change]) -> list[pb.IndexChange]:
    packed, before = list[pb.IndexChange](), b""
    for change in changes:
        shared = _shared(before, change.keys)
        rest = change.keys[shared * KEY_BYTES :]
        packed.append(pb.IndexChange(kind=_KINDS[change.kind], shared_units=shared, keys=rest))
        before = change.keys
    return packed


def _unpack_changes(messages: Iterable[pb.IndexChange]) -> tuple[Change, ...]:
    changes, before = list[Change](), b""
    for message in messages:
        kind = _FROM_WIRE.get(message.kind)
        keys = before[: message.shared_units * KEY_BYTES] + message.keys
        if kind is None or not keys or len(keys) % KEY_BYTES or len(keys) > PROMPT_UNITS * KEY_BYTES:
            raise InvalidRequest("an update with a change that is none", param="changes")
        if message.shared_units * KEY_BYTES > len(before):
            raise InvalidRequest("an update that shares more than there is", param="changes")
        changes.append(Change(kind, keys))
        before = keys
    return tuple(changes)


def _shared(before: bytes, keys: bytes) -> int:
    """How many units both begin with, searched by halves."""
    low, high = 0, min(len(before), len(keys)) // KEY_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if before[: middle * KEY_BYTES] == keys[: middle * KEY_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
