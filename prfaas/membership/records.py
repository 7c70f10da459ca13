"""What a node writes into the store: JSON that `etcdctl get` shows readably, and that old and new versions both read.

Unknown fields are ignored and new ones have defaults. Two keys per node, both under its lease: what it *is*, written
when that changes, and what it *measures*, about once a second.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Annotated, Self

import msgspec

from prfaas.cluster import Incarnation, Namespace, Node, NodeId, NodeKind, NodeLoad, RegionId, Role, WireRange


class Kind(Enum):
    """What a key of a node holds; the value is the part of the key that says so."""

    NODE = "nodes"
    TELEMETRY = "telemetry"


def cluster_prefix(cluster: str) -> str:
    """Every key of the cluster begins with this."""
    return f"/prfaas/{cluster}/"


def key_of(cluster: str, kind: Kind, node: str) -> str:
    return f"/prfaas/{cluster}/{kind.value}/{node}"


def parse_key(cluster: str, key: str) -> tuple[Kind, NodeId] | None:
    """None for a key of another kind or cluster."""
    for kind in Kind:
        start = key_of(cluster, kind, "")
        if key.startswith(start):
            return kind, NodeId(key[len(start) :])
    return None


#: As text, because readers of JSON round integers of 64 bits.
IncarnationHex = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A registered worker. Its role here is the one that counts."""

    id: str
    region: str
    kind: NodeKind
    role: Role
    incarnation: IncarnationHex
    namespace: str
    model: str
    rpc_address: str
    kv_addresses: dict[str, str] = {}
    oldest_wire: int = 1
    newest_wire: int = 1
    max_context_tokens: int

    @classmethod
    def of(cls, node: Node) -> Self:
        return cls(
            id=node.id,
            region=node.region,
            kind=node.kind,
            role=node.role,
            incarnation=f"{node.incarnation:016x}",
            namespace=node.namespace,
            model=node.model,
            rpc_address=node.rpc_address,
            kv_addresses=dict(node.kv_addresses),
            oldest_wire=node.wire.oldest,
            newest_wire=node.wire.newest,
            max_context_tokens=node.max_context_tokens,
        )

    def to_node(self, load: NodeLoad) -> Node:
        return Node(
            id=NodeId(self.id),
            region=RegionId(self.region),
            kind=self.kind,
            role=self.role,
            incarnation=Incarnation(int(self.incarnation, 16)),
            namespace=Namespace(self.namespace),
            model=self.model,
            rpc_address=self.rpc_address,
            kv_addresses=MappingProxyType(self.kv_addresses),
            wire=WireRange(self.oldest_wire, self.newest_wire),
            max_context_tokens=self.max_context_tokens,
            load=load,
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """What a worker says about itself when asked. Counters only grow while an incarnation lives."""

    load: NodeLoad
    counters: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


class TelemetryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a node last measured, and as whom: the incarnation, the role it had, and the how-many-th report it is."""

    incarnation: IncarnationHex
    role: Role
    seq: int
    queued_prefill_tokens: int = 0
    active_sequences: int = 0
    committed_tokens: int = 0
    kv_free_bytes: int = 0
    kv_total_bytes: int = 0
    draining: bool = False
    counters: dict[str, int] = {}

    @classmethod
    def of(cls, measured: Measured, node: NodeRecord, seq: int) -> Self:
        load = measured.load
        return cls(
            incarnation=node.incarnation,
            role=node.role,
            seq=seq,
            queued_prefill_tokens=load.queued_prefill_tokens,
            active_sequences=load.active_sequences,
            committed_tokens=load.committed_tokens,
            kv_free_bytes=load.kv_free_bytes,
            kv_total_bytes=load.kv_total_bytes,
            draining=load.draining,
            counters=dict(measured.counters),
        )

    def load(self) -> NodeLoad:
        return NodeLoad(
            queued_prefill_tokens=self.queued_prefill_tokens,
            active_sequences=self.active_sequences,
            committed_tokens=self.committed_tokens,
            kv_free_bytes=self.kv_free_bytes,
            kv_total_bytes=self.kv_total_bytes,
            draining=self.draining,
        )


encode = msgspec.json.Encoder().encode
_decode_node = msgspec.json.Decoder(NodeRecord).decode
_decode_telemetry = msgspec.json.Decoder(TelemetryRecord).decode
#: Nesting without end raises RecursionError.
_UNREADABLE = (msgspec.MsgspecError, RecursionError)


def read_node(node: NodeId, value: bytes) -> NodeRecord | None:
    """None for what is not a record of this node."""
    try:
        record = _decode_node(value)
    except _UNREADABLE:
        return None
    return record if record.id == node else None


def read_telemetry(value: bytes) -> TelemetryRecord | None:
    """None for what is not telemetry."""
    try:
        return _decode_telemetry(value)
    except _UNREADABLE:
        return None
