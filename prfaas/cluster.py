"""Nodes, regions, roles and the view of a cluster that decisions are made from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NewType

NodeId = NewType("NodeId", str)
RegionId = NewType("RegionId", str)
#: 64 random bits, new whenever a worker starts; compared for equality only.
Incarnation = NewType("Incarnation", int)
#: Digest of weights, tokenizer, dtypes and geometry. Nodes exchange KV only when their namespaces are equal.
Namespace = NewType("Namespace", str)


class Role(Enum):
    """What a node spends its time on. PD nodes move between roles; nodes of a prefill region keep PREFILL."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


class NodeKind(Enum):
    """PREFILL_WORKER never decodes (the PrfaaS cluster); PD can take any role."""

    PREFILL_WORKER = "prefill_worker"
    PD = "pd"


@dataclass(frozen=True, slots=True)
class WireRange:
    """The wire versions a node speaks, both ends included. Two nodes may exchange KV when their ranges meet."""

    oldest: int
    newest: int

    def meets(self, other: "WireRange") -> bool:
        return self.oldest <= other.newest and other.oldest <= self.newest


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """What a node last reported about itself. Times are seconds, sizes bytes."""

    queued_prefill_tokens: int = 0
    active_sequences: int = 0
    committed_tokens: int = 0
    kv_free_bytes: int = 0
    kv_total_bytes: int = 0
    draining: bool = False


def address_for(addresses: Mapping[str, str], region: RegionId) -> str:
    """The address meant for peers in `region`."""
    return addresses.get(region) or addresses[""]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One worker as the cluster knows it: what it registered and the load it last reported.

    `kv_addresses` maps a peer's region to the `host:port` at which that peer reaches this node's KV plane; the key `""`
    is the address for every region not named.
    """

    id: NodeId
    region: RegionId
    kind: NodeKind
    role: Role
    incarnation: Incarnation
    namespace: Namespace
    model: str
    rpc_address: str
    kv_addresses: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    wire: WireRange = WireRange(1, 1)
    max_context_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    load: NodeLoad = NodeLoad()

    def kv_address_for(self, region: RegionId) -> str:
        """Where a node in `region` connects to push KV into this one."""
        return address_for(self.kv_addresses, region)

    def can_push_to(self, other: "Node") -> bool:
        return self.namespace == other.namespace and self.wire.meets(other.wire)


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All live nodes, with each class already ordered by load so that a decision never sorts the cluster.

    `remote_prefill`: prefill workers outside the PD region. `local_prefill`: PD nodes whose role prefills.
    `decode`: PD nodes whose role decodes. All lists go from least to most loaded and leave out draining nodes.
    """

    nodes: Mapping[NodeId, Node] = field(default_factory=lambda: MappingProxyType({}))
    remote_prefill: tuple[NodeId, ...] = ()
    local_prefill: tuple[NodeId, ...] = ()
    decode: tuple[NodeId, ...] = ()

    def models(self) -> tuple[str, ...]:
        """Models that some live node can decode, in name order."""
        return tuple(sorted({self.nodes[node].model for node in self.decode}))
