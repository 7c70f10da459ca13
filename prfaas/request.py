"""A request, the route chosen for it, and what came of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple, NewType

from prfaas.cluster import Node, NodeId

#: Server-made, 128 bits as 32 hex digits.
RequestId = NewType("RequestId", str)
#: One try at a request, 128 bits as 32 hex digits. A retry has a new one.
AttemptId = NewType("AttemptId", str)

TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 is greedy; `seed` keys a counter-based generator with the position.
    `constraint` is what the answer has to follow, as JSON in the words of the OpenAI API (`tools`, `tool_choice`,
    `response_format`); empty for engines that do not declare that they can."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    constraint: str = ""


class Score(NamedTuple):
    """What the model said of a token that was drawn: its logit, and the logarithm of the sum over the exponentials of
    all logits. Temperature and top_p play no part."""

    logit: float
    log_normaliser: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to be completed. `prompt` holds token ids, packed as little-endian uint32, as they cross the wire.
    `salt` keeps the cached prefixes of the tenant apart from all others': the router makes it, and no client sees
    it. With `top_logits` each token comes with its score and so many of the highest logits. Tenants share lines that
    are short by `weight`. `traceparent` is its W3C trace context, empty without one."""

    id: RequestId
    model: str
    prompt: bytes
    sampling: Sampling
    tenant: str = ""
    salt: bytes = field(default=b"", repr=False)
    top_logits: int = 0
    weight: float = 1.0
    traceparent: str = ""

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES

    @property
    def handoff_tokens(self) -> int:
        """Tokens that prefill computes: all but the last, which decode computes itself (the N-1 rule)."""
        return self.prompt_tokens - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    """What the receiver of an attempt's KV gives its sender: the ticket that it asks for, and the keys of what goes out
    to it and of what comes back. A secret of the two: it does not show itself, and belongs into no log or receipt."""

    ticket: bytes = field(default=b"", repr=False)
    key_out: bytes = field(default=b"", repr=False)
    key_back: bytes = field(default=b"", repr=False)


#: Of a reservation that nothing is sent to.
NO_PERMIT = Permit()


@dataclass(frozen=True, slots=True)
class Match:
    """Cached prefix of one prompt on one node, in tokens. `joint` has KV and a state, `kv` only needs KV. `own` is in
    its engine's own cache: a prefill there goes on from it, and nobody else can have it."""

    joint: int = 0
    kv: int = 0
    own: int = 0

    @property
    def resumed(self) -> int:
        """Where a prefill on the node goes on."""
        return self.own if self.own > self.joint else self.joint

    def kept(self, decode: Node) -> int:
        """What need not come to this node from elsewhere, if it prefills by itself what it can."""
        return self.own if self.own > self.kv and decode.role.prefills else self.kv


NO_MATCH = Match()
Matches = Mapping[NodeId, Match]
NO_MATCHES: Matches = MappingProxyType({})


class Path(Enum):
    """REMOTE: prefilled in another region. LOCAL: prefilled in the PD region, on the decode node itself or beside
    it."""

    LOCAL = "local"
    REMOTE = "remote"


class Mode(Enum):
    """AUTO: the length rule decides. ALWAYS: whatever can be prefilled in another region is. NEVER: nothing is."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Reason(Enum):
    """Why a route is what it is."""

    SHORT_PROMPT = "short_prompt"
    LONG_PROMPT = "long_prompt"
    #: The rule said otherwise, but would have missed the TTFT objective where the other class keeps it.
    SPILLED_LOCAL = "spilled_local"
    SPILLED_REMOTE = "spilled_remote"
    #: The mode left no choice.
    MODE_ALWAYS = "mode_always"
    MODE_NEVER = "mode_never"
    NO_REMOTE_PREFILL = "no_remote_prefill"
    NO_LOCAL_PREFILL = "no_local_prefill"
    #: There are nodes for it in the other region, but a breaker is open around each.
    BREAKER_OPEN = "breaker_open"
    FALLBACK = "fallback"
    #: Begun beside a prefill in the other region that took too long.
    HEDGE = "hedge"


class Predicted(NamedTuple):
    """Expected time to the first token, by the terms of the TTFT account. None of them is below 0."""

    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_exposed_s: float = 0.0
    decode_queue_s: float = 0.0
    first_decode_step_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return (
            self.prefill_queue_s
            + self.prefill_s
            + self.transfer_exposed_s
            + self.decode_queue_s
            + self.first_decode_step_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """What it costs to bring a longer cached prefix from another region to where the prompt is computed, against what
    computing those tokens costs. None: not known. `chosen` says whether the route counts on it."""

    source: NodeId
    tokens: int
    nbytes: int | None = None
    transfer_s: float | None = None
    recompute_s: float | None = None
    chosen: bool = False

    @property
    def pays(self) -> bool:
        return self.transfer_s is not None and self.recompute_s is not None and self.transfer_s < self.recompute_s


class Alternative(NamedTuple):
    """A way that was weighed: what it would have had to compute and to move. Without a profile of the hardware neither
    bytes nor seconds are known."""

    path: Path
    prefill: NodeId
    decode: NodeId
    uncached_tokens: int
    transfer_tokens: int
    transfer_bytes: int | None = None
    predicted: Predicted | None = None

    @property
    def predicted_ttft_s(self) -> float | None:
        return None if self.predicted is None else self.predicted.ttft_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where a request is prefilled and decoded, and why. `prefill == decode` means that no KV moves.

    `uncached_tokens` is what the rule compared with `threshold_tokens`; `prefill_tokens` is what the chosen node has to
    compute; `transfer_tokens` is the KV that has to cross. Without `use_cache` nothing is taken from a cache, whatever
    it holds.
    """

    prefill: NodeId
    decode: NodeId
    path: Path
    reason: Reason
    uncached_tokens: int
    transfer_tokens: int
    threshold_tokens: int
    alternatives: tuple[Alternative, ...] = ()
    prefill_tokens: int = 0
    transfer_bytes: int | None = None
    predicted: Predicted | None = None
    pull: Pull | None = None
    use_cache: bool = True

    @property
    def moves_kv(self) -> bool:
        return self.prefill != self.decode

    @property
    def predicted_ttft_s(self) -> float | None:
        return None if self.predicted is None else self.predicted.ttft_s


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


#: Terms of the account in the order they happen, all in seconds. What is left over is `unaccounted`.
TTFT_TERMS = (
    "queue",
    "tokenize",
    "route",
    "network",
    "prefill_queue",
    "prefill",
    "transfer_exposed",
    "decode_queue",
    "first_decode_step",
)


@dataclass(frozen=True, slots=True)
class TtftAccount:
    """Where the time to the first token went. Each term was measured by itself, as a duration, where it happened."""

    seconds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    total_s: float = 0.0

    @property
    def unaccounted_s(self) -> float:
        return self.total_s - sum(self.seconds.values())

    def shown(self) -> dict[str, float]:
        """The terms and what is left: together the whole time."""
        return {**self.seconds, "unaccounted": self.unaccounted_s}
