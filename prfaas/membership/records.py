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

from prfaas.cluster import (
    Egress,
    Incarnation,
    Namespace,
    Node,
    NodeId,
    NodeKind,
    NodeLoad,
    Pool,
    RegionId,
    Role,
    WireRange,
)


class Kind(Enum):
    """What a key of a node or of a shard of the cache holds; the value is the part of the key that says so."""

    NODE = "nodes"
    TELEMETRY = "telemetry"
    POOL = "pools"


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
    """A registered worker. Its role here is the one that counts; while it changes it is what the node still takes, and
    `accepting` is false when that is nothing.

    `epoch` is the highest of the plans that it has seen, `phase` where it stands in carrying one out.
    """

    id: str
    region: str
    kind: NodeKind
    role: Role
    incarnation: IncarnationHex
    namespace: str
    model: str
    rpc_address: str
    link_address: str = ""
    kv_addresses: dict[str, str] = {}
    oldest_wire: int = 1
    newest_wire: int = 1
    max_context_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    hardware: str = ""
    prefill_share: float | None = None
    capabilities: tuple[str, ...] = ()
    tokenizer: str = ""
    max_sequences: int = 0
    epoch: int = 0
    phase: str = "serving"
    accepting: bool = True

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
            link_address=node.link_address,
            kv_addresses=dict(node.kv_addresses),
            oldest_wire=node.wire.oldest,
            newest_wire=node.wire.newest,
            max_context_tokens=node.max_context_tokens,
            eos_token_ids=node.eos_token_ids,
            hardware=node.hardware,
            prefill_share=node.prefill_share,
            capabilities=node.capabilities,
            tokenizer=node.tokenizer,
            max_sequences=node.max_sequences,
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
            link_address=self.link_address,
            kv_addresses=MappingProxyType(self.kv_addresses),
            wire=WireRange(self.oldest_wire, self.newest_wire),
            max_context_tokens=self.max_context_tokens,
            eos_token_ids=self.eos_token_ids,
            hardware=self.hardware,
            prefill_share=self.prefill_share,
            capabilities=self.capabilities,
            tokenizer=self.tokenizer,
            max_sequences=self.max_sequences,
            load=load,
        )


class PoolRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A registered shard of a region's prefix cache."""

    id: str
    region: str
    incarnation: IncarnationHex
    namespace: str
    rpc_address: str
    kv_addresses: dict[str, str] = {}
    capacity_bytes: int = 0
    resumes_anywhere: bool = False

    @classmethod
    def of(cls, pool: Pool) -> Self:
        return cls(
            id=pool.id,
            region=pool.region,
            incarnation=f"{pool.incarnation:016x}",
            namespace=pool.namespace,
            rpc_address=pool.rpc_address,
            kv_addresses=dict(pool.kv_addresses),
            capacity_bytes=pool.capacity_bytes,
            resumes_anywhere=pool.resumes_anywhere,
        )

    def to_pool(self) -> Pool:
        return Pool(
            id=NodeId(self.id),
            region=RegionId(self.region),
            incarnation=Incarnation(int(self.incarnation, 16)),
            namespace=Namespace(self.namespace),
            rpc_address=self.rpc_address,
            kv_addresses=MappingProxyType(self.kv_addresses),
            capacity_bytes=self.capacity_bytes,
            resumes_anywhere=self.resumes_anywhere,
        )


class EgressRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a node sends to one other region. Who writes no round trip and no retransmissions does not know them."""

    region: str
    queued_bytes: int = 0
    sent_bytes_per_s: float = 0.0
    backlogged_bytes_per_s: float | None = None
    rtt_s: float | None = None
    retransmitted_bytes_per_s: float | None = None
    queue_age_s: float = 0.0
    unsent_bytes: int = 0
    lanes: int = 0
    congestion: str = ""
    stalled_s: float | None = None

    @classmethod
    def of(cls, egress: Egress) -> Self:
        return cls(
            region=egress.region,
            queued_bytes=egress.queued_bytes,
            sent_bytes_per_s=round(egress.sent_bytes_per_s, 1),
            backlogged_bytes_per_s=egress.backlogged_bytes_per_s and round(egress.backlogged_bytes_per_s, 1),
            rtt_s=egress.rtt_s and round(egress.rtt_s, 6),
            retransmitted_bytes_per_s=egress.retransmitted_bytes_per_s and round(egress.retransmitted_bytes_per_s, 1),
            queue_age_s=round(egress.queue_age_s, 3),
            unsent_bytes=egress.unsent_bytes,
            lanes=egress.lanes,
            congestion=egress.congestion,
            stalled_s=egress.stalled_s and round(egress.stalled_s, 3),
        )

    def to_egress(self) -> Egress:
        return Egress(
            region=RegionId(self.region),
            queued_bytes=self.queued_bytes,
            sent_bytes_per_s=self.sent_bytes_per_s,
            backlogged_bytes_per_s=self.backlogged_bytes_per_s,
            rtt_s=self.rtt_s,
            retransmitted_bytes_per_s=self.retransmitted_bytes_per_s,
            queue_age_s=self.queue_age_s,
            unsent_bytes=self.unsent_bytes,
            lanes=self.lanes,
            congestion=self.congestion,
            stalled_s=self.stalled_s,
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """What a worker says about itself when asked. Counters only grow while an incarnation lives."""

    load: NodeLoad
    counters: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


class TelemetryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a node or a shard last measured, and as whom: the incarnation, the role it had (of a shard without meaning),
    and the how-many-th report it is."""

    incarnation: IncarnationHex
    role: Role
    seq: int
    queued_prefill_tokens: int = 0
    active_sequences: int = 0
    committed_tokens: int = 0
    kv_free_bytes: int = 0
    kv_total_bytes: int = 0
    draining: bool = False
    decoding: int = 0
    waiting_decodes: int = 0
    max_batch: int = 0
    egress: tuple[EgressRecord, ...] = ()
    prefill_busy_ratio: float | None = None
    decode_busy_ratio: float | None = None
    engine_kv_ratio: float | None = None
    counters: dict[str, int] = {}

    @classmethod
    def of(cls, measured: Measured, node: NodeRecord | PoolRecord, seq: int) -> Self:
        load = measured.load
        return cls(
            incarnation=node.incarnation,
            role=node.role if isinstance(node, NodeRecord) else Role.MIXED,
            seq=seq,
            queued_prefill_tokens=load.queued_prefill_tokens,
            active_sequences=load.active_sequences,
            committed_tokens=load.committed_tokens,
            kv_free_bytes=load.kv_free_bytes,
            kv_total_bytes=load.kv_total_bytes,
            draining=load.draining,
            decoding=load.decoding,
            waiting_decodes=load.waiting_decodes,
            max_batch=load.max_batch,
            egress=tuple(EgressRecord.of(egress) for egress in load.egress),
            prefill_busy_ratio=load.prefill_busy_ratio,
            decode_busy_ratio=load.decode_busy_ratio,
            engine_kv_ratio=load.engine_kv_ratio and round(load.engine_kv_ratio, 4),
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
            decoding=self.decoding,
            waiting_decodes=self.waiting_decodes,
            max_batch=self.max_batch,
            egress=tuple(record.to_egress() for record in self.egress),
            prefill_busy_ratio=self.prefill_busy_ratio,
            decode_busy_ratio=self.decode_busy_ratio,
            engine_kv_ratio=self.engine_kv_ratio,
        )


encode = msgspec.json.Encoder().encode
_decode_node = msgspec.json.Decoder(NodeRecord).decode
_decode_pool = msgspec.json.Decoder(PoolRecord).decode
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


def read_pool(pool: NodeId, value: bytes) -> PoolRecord | None:
    """None for what is not a record of this shard."""
    try:
        record = _decode_pool(value)
    except _UNREADABLE:
        return None
    return record if record.id == pool else None


def read_telemetry(value: bytes) -> TelemetryRecord | None:
    """None for what is not telemetry."""
    try:
        return _decode_telemetry(value)
    except _UNREADABLE:
        return None
