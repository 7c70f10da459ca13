"""What a worker or a router asks of a shard of the cache, and its answers, as values.

Keys are those of a prompt from its start, and tokens count from there. `prfaas.rpc.cache_translate` puts them on the
wire.
"""

from dataclasses import dataclass, field

from prfaas.cluster import Incarnation, Namespace, NodeId, RegionId
from prfaas.kvcache.objects import LeaseId as LeaseId
from prfaas.request import AttemptId
from prfaas.rpc.commands import Destination, Reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Look up, and pin what was found for `ttl_s`. `joint`: KV up to the last state at `limit_tokens` or before, and
    that state; else KV alone."""

    namespace: Namespace
    keys: bytes = field(repr=False)
    tenant: str
    limit_tokens: int
    joint: bool
    holder: str
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Leased:
    """`lease` is None when nothing was pinned. `state_tokens`: where the state is that was pinned, 0 without one.
    `matched_tokens`: how far KV reaches, pinned or not."""

    lease: LeaseId | None = None
    kv_tokens: int = 0
    state_tokens: int = 0
    matched_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Get:
    """Send the KV `first_tokens:stop_tokens`, and with `state` the state at the stop. Answered when all of it has
    arrived and been checked."""

    lease: LeaseId
    first_tokens: int
    stop_tokens: int
    state: bool
    attempt: AttemptId
    destination: Destination
    deadline_s: float
    urgency: int = 2


@dataclass(frozen=True, slots=True)
class Got:
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Renew:
    lease: LeaseId
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Release:
    """Answered by whether the lease has held until now (R17)."""

    lease: LeaseId


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """Offer KV up to `stop_tokens` and the states at `states`, of which `unproven` are periodic ones. Checksums, CRC32C
    of each unit and of each state, only where the same tokens have the same bytes."""

    put: AttemptId
    namespace: Namespace
    tenant: str
    keys: bytes = field(repr=False)
    stop_tokens: int
    states: tuple[int, ...]
    source_node: NodeId
    source_region: RegionId
    ttl_s: float
    unproven: tuple[int, ...] = ()
    unit_checksums: tuple[int, ...] = field(default=(), repr=False)
    state_checksums: tuple[int, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the pool lacks of a Put and has made room for: KV `first_tokens:stop_tokens` and these states. Without
    `room` it has all of it."""

    first_tokens: int = 0
    stop_tokens: int = 0
    states: tuple[int, ...] = ()
    room: Reserved | None = None


@dataclass(frozen=True, slots=True)
class Abandon:
    """Nothing will be sent for the put: its room is free, and its keys may be put by others. Idempotent."""

    put: AttemptId


@dataclass(frozen=True, slots=True)
class Await:
    """Answered by whether what was put has been published."""

    put: AttemptId
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Watch:
    """Follow the index. `known_incarnation` None: nothing is known of it."""

    router: str
    known_incarnation: Incarnation | None = None
    known_seq: int = 0
