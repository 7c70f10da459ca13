"""What a router asks of a worker and what the worker answers, as values: the vocabulary of the token link.

A command or an event always belongs to one attempt, which travels beside it. After Done or Failed the worker holds
nothing of the attempt any more; whatever is cancelled before that is not answered.
"""

from dataclasses import dataclass, field

from prfaas.cluster import Incarnation, Namespace, NodeId, RegionId, WireRange
from prfaas.errors import PrfaasError
from prfaas.request import NO_PERMIT, FinishReason, Permit, RequestId, Sampling, Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Take room for the attempt, for KV that will come from `source_node` (which may be this worker itself). `salt`
    keys the prefixes of the tenant; with `use_cache` cached ones may be used, and new ones given to the cache. With a
    `network`, one of the engines' own, it comes over that and needs no room."""

    request_id: RequestId
    prompt: bytes
    sampling: Sampling
    source_node: NodeId
    source_region: RegionId
    source_namespace: Namespace
    deadline_s: float
    salt: bytes = field(default=b"", repr=False)
    tenant: str = ""
    use_cache: bool = False
    #: W3C trace context; empty: none.
    traceparent: str = ""
    network: str = ""


NO_REGION = RegionId("")


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where the KV of a prefill goes: one reservation on one life of a node, which has the KV of `held_tokens` already.
    A router of an older version does not say the region. `network`: as in Reserve."""

    node: NodeId
    incarnation: Incarnation
    kv_address: str
    generation: int
    region: RegionId = NO_REGION
    permit: Permit = NO_PERMIT
    held_tokens: int = 0
    network: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Compute the prompt up to its last token. Without a destination the KV stays for a Decode of the same attempt.
    `pull_region`: what its cache has more than the own region's is to be brought from there. `weight`: what the tenant
    gets of a line that is short, against others."""

    request_id: RequestId
    prompt: bytes
    destination: Destination | None
    deadline_s: float
    salt: bytes = field(default=b"", repr=False)
    tenant: str = ""
    use_cache: bool = False
    pull_region: RegionId | None = None
    weight: float = 1.0
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Decode:
    """Take the hand-off and stream tokens, each with its `top_logits` highest logits and, if the engine can, its
    score. `handover`: as the PrefillDone of the attempt gave it."""

    top_logits: int = 0
    handover: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Cancel:
    """End whatever the attempt does or holds. Idempotent, not answered."""


Command = Reserve | Prefill | Decode | Cancel


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """The KV of the first `held_tokens` is here already. `took_s`: from the command's arrival to this answer; None from
    a worker of an older version."""

    kv_address: str
    generation: int
    incarnation: Incarnation
    permit: Permit = NO_PERMIT
    held_tokens: int = 0
    took_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDone:
    """The KV is complete and checked at the destination, with the fields of `flows.ports.PrefillReport`; or, with
    `handover`, ready for the engine there to fetch it."""

    queue_s: float
    compute_s: float
    exposed_s: float
    prefill_tokens: int
    kv_bytes: int
    cached_tokens: int = 0
    pulled_bytes: int = 0
    took_s: float | None = None
    handover: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """New tokens in order, packed uint32. The durations come with the first."""

    tokens: bytes
    top_logits: tuple[tuple[tuple[int, float], ...], ...] = ()
    scores: tuple[Score, ...] = ()
    first_queue_s: float | None = None
    first_step_s: float | None = None
    first_took_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    reason: FinishReason
    recomputed_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    error: PrfaasError


Event = Reserved | PrefillDone | Tokens | Done | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDescription:
    """Who answers at an address."""

    node: NodeId
    incarnation: Incarnation
    namespace: Namespace
    wire: WireRange
