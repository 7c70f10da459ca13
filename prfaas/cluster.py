"""Nodes, regions, roles and the view of a cluster that decisions are made from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple, NewType

NodeId = NewType("NodeId", str)
RegionId = NewType("RegionId", str)
#: 64 random bits, new whenever a worker starts; compared for equality only.
Incarnation = NewType("Incarnation", int)
#: What engines may be able to do. LOGPROBS: true probabilities of tokens. TOOLS: calls of tools. RESPONSE_FORMAT:
#: answers that follow a schema. SEEDED_DRAWS: a token that is drawn depends on nothing but the tokens before it, the
#: sampling and the position, so that any engine of the namespace goes on with a sequence exactly. OWN_PREFIXES: it
#: keeps prefixes by itself, and its node tells which. RESUMES_ANYWHERE: it goes on wherever the KV of a prefix ends.
LOGPROBS, TOOLS, RESPONSE_FORMAT = "logprobs", "tools", "response_format"
SEEDED_DRAWS = "seeded_draws"
OWN_PREFIXES, RESUMES_ANYWHERE = "own_prefixes", "resumes_anywhere"
#: Begins a capability that names a network of the engines' own. Between engines of one region that have the same one it
#: carries KV, and ours does not.
NETWORK = "network:"
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
class Egress:
    """What a node sends to one other region. `backlogged_bytes_per_s` is the goodput while something was waiting to be
    sent, the only time at which a sender learns what the line can carry; None when that has not been the case
    lately. Of the `lanes` that are open there: the smallest round trip, the congestion control in use, and what the
    kernel holds of the bytes that wait. `queue_age_s`: how long the oldest byte that could leave has been waiting;
    `stalled_s`: for how long nothing has come back of what is owed from there; None when nothing is."""

    region: RegionId
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


@dataclass(frozen=True, slots=True)
class LinkState:
    """One ordered pair of regions, as estimated from its senders' reports. What is not known is None.

    `retransmitted_ratio`: of all that went out, what had been sent before. `queue_age_s`: of the oldest byte that waits
    at any sender. `stalled_s`: senders wait for answers, and for so long none has come.
    """

    source: RegionId
    target: RegionId
    capacity_bytes_per_s: float | None = None
    goodput_bytes_per_s: float | None = None
    utilization: float | None = None
    queued_bytes: int = 0
    age_s: float = 0.0
    rtt_s: float | None = None
    retransmitted_ratio: float | None = None
    queue_age_s: float = 0.0
    stalled_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """What a node last reported about itself. Times are seconds, sizes bytes.

    `decoding` of `max_batch` batch slots are taken (0: no limit known), `waiting_decodes` sequences wait for one. A
    busy ratio is the part of what the node has for a stage that was in use lately: of its time for prefill, of its
    batch slots for decode. `engine_kv_ratio` is the part of an engine's own KV memory that sequences hold. None where
    that is not measured.
    """

    queued_prefill_tokens: int = 0
    active_sequences: int = 0
    committed_tokens: int = 0
    kv_free_bytes: int = 0
    kv_total_bytes: int = 0
    draining: bool = False
    decoding: int = 0
    waiting_decodes: int = 0
    max_batch: int = 0
    egress: tuple[Egress, ...] = ()
    prefill_busy_ratio: float | None = None
    decode_busy_ratio: float | None = None
    engine_kv_ratio: float | None = None


class Busy(NamedTuple):
    """What decisions and class orders read of a load. Worked out when a load changes: for a node with each report, with
    unreported work on top by whoever adds that."""

    queued_prefill_tokens: int
    active_sequences: int
    committed_tokens: int
    #: Sequences that have or will need a batch slot, of so many.
    running: int
    max_batch: int

    @classmethod
    def of(cls, load: NodeLoad) -> "Busy":
        active = load.active_sequences
        running = max(active, load.decoding + load.waiting_decodes)
        return cls(load.queued_prefill_tokens, active, load.committed_tokens, running, load.max_batch)


def address_for(addresses: Mapping[str, str], region: RegionId) -> str:
    """The address meant for peers in `region`."""
    return addresses.get(region) or addresses[""]


@dataclass(frozen=True, slots=True, eq=False)
class Traits:
    """What a node is, apart from which one it is and how busy. A decision weighs dozens of nodes of a few traits, so
    it judges traits and not nodes. Nodes that are alike share one object, as a rule; it is compared by identity."""

    region: RegionId
    kind: NodeKind
    role: Role
    namespace: Namespace
    model: str
    wire: WireRange
    hardware: str
    prefill_share: float | None
    draining: bool

    @property
    def share(self) -> float:
        """Share of its time for prefill: 1 prefills only, 0 decodes only."""
        match self.role:
            case Role.PREFILL:
                return 1.0
            case Role.DECODE:
                return 0.0
            case Role.MIXED:
                return 0.5 if self.prefill_share is None else self.prefill_share

    def can_push_to(self, other: "Traits") -> bool:
        return self.namespace == other.namespace and self.wire.meets(other.wire)


_interned = lru_cache(maxsize=1024)(Traits)


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
    #: Names the profile that says how fast this node is.
    hardware: str = ""
    #: Share of its time that a MIXED node gives to prefill.
    prefill_share: float | None = None
    #: As in `EngineInfo`. Empty from a node that does not say.
    capabilities: tuple[str, ...] = ()
    tokenizer: str = ""
    #: Of the token link over plain TCP; empty where it is to be had over gRPC only.
    link_address: str = ""
    #: How many it takes on at once; 0 from a node that does not say.
    max_sequences: int = 0
    load: NodeLoad = NodeLoad()
    #: Both follow from the other fields.
    traits: Traits = field(init=False, repr=False, compare=False)
    busy: Busy = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        traits = _interned(
            self.region,
            self.kind,
            self.role,
            self.namespace,
            self.model,
            self.wire,
            self.hardware,
            self.prefill_share,
            self.load.draining,
        )
        object.__setattr__(self, "traits", traits)
        object.__setattr__(self, "busy", Busy.of(self.load))

    def check(self) -> None:
        assert self.busy == Busy.of(self.load)
        assert (self.region, self.kind, self.role) == (self.traits.region, self.traits.kind, self.traits.role)
        assert (self.namespace, self.model, self.wire) == (self.traits.namespace, self.traits.model, self.traits.wire)
        assert (self.hardware, self.load.draining) == (self.traits.hardware, self.traits.draining)

    @property
    def share(self) -> float:
        """Share of its time for prefill: 1 prefills only, 0 decodes only."""
        return self.traits.share

    def kv_address_for(self, region: RegionId) -> str:
        """Where a node in `region` connects to push KV into this one."""
        return address_for(self.kv_addresses, region)

    def can_push_to(self, other: "Node") -> bool:
        return self.traits.can_push_to(other.traits)


def own_network(one: Node, other: Node) -> str:
    """Over which of the engines' own networks KV goes from one to the other; empty: over ours, as it does between
    regions."""
    if one.id == other.id or one.region != other.region:
        return ""
    shared = sorted(each for each in one.capabilities if each.startswith(NETWORK) and each in other.capabilities)
    return shared[0].removeprefix(NETWORK) if shared else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One shard of a region's prefix cache, as it registered. `kv_addresses` as in `Node`. `resumes_anywhere`: the
    model has no recurrent state, so that a prefill can go on wherever the KV ends."""

    id: NodeId
    region: RegionId
    incarnation: Incarnation
    namespace: Namespace
    rpc_address: str
    kv_addresses: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    capacity_bytes: int = 0
    resumes_anywhere: bool = False

    def kv_address_for(self, region: RegionId) -> str:
        """Where a node in `region` connects to push KV into this one."""
        return address_for(self.kv_addresses, region)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the slow loop wants: the threshold and each PD node's share of time for prefill. A higher epoch wins."""

    epoch: int
    threshold_tokens: int
    shares: Mapping[NodeId, float] = field(default_factory=lambda: MappingProxyType({}))
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Budget:
    """How much KV may leave `source` for `target`: each of `nodes` may send so much, and any other node as much as all
    together."""

    source: RegionId
    target: RegionId
    bytes_per_s: float
    nodes: Mapping[NodeId, float] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All live nodes, with each class already ordered by load so that a decision never sorts the cluster.

    `remote_prefill`: prefill workers outside the PD region. `local_prefill`: PD nodes whose role prefills.
    `decode`: PD nodes whose role decodes. All lists go from least to most loaded and leave out draining nodes.
    `loads` holds the loads that are known better than by their nodes' last reports, and `busy` what follows from them.
    """

    nodes: Mapping[NodeId, Node] = field(default_factory=lambda: MappingProxyType({}))
    remote_prefill: Sequence[NodeId] = ()
    local_prefill: Sequence[NodeId] = ()
    decode: Sequence[NodeId] = ()
    plan: Plan | None = None
    #: The highest epoch in the store or reported by any worker: a store that came back empty must not freeze the
    #: cluster.
    highest_epoch: int = 0
    loads: Mapping[NodeId, NodeLoad] = field(default_factory=lambda: MappingProxyType({}))
    busy: Mapping[NodeId, Busy] = field(default_factory=dict)
    #: The shards of all regions' prefix caches, in the order of their ids.
    pools: Mapping[NodeId, Pool] = field(default_factory=lambda: MappingProxyType({}))
    #: What those shards send to other regions, as far as they have reported lately.
    pool_egress: Mapping[NodeId, Sequence[Egress]] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        if not self.busy and self.loads:
            object.__setattr__(self, "busy", {name: Busy.of(load) for name, load in self.loads.items()})

    def busy_of(self, node: Node) -> Busy:
        return self.busy.get(node.id, node.busy)

    def check(self) -> None:
        for node in self.nodes.values():
            node.check()
        busy = {name: Busy.of(load) for name, load in self.loads.items() if name in self.nodes}
        assert busy == {name: its for name, its in self.busy.items() if name in self.nodes}, "outdated"

    def models(self) -> tuple[str, ...]:
        """Models that some live node can decode, in name order."""
        return tuple(sorted({self.nodes[node].model for node in self.decode}))
