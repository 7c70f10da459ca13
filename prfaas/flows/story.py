"""What happened to one request so far. The flow writes it; receipts, metrics and logs read it, also after a failure."""

from dataclasses import dataclass, field
from enum import Enum

from prfaas.flows.ports import PrefillReport
from prfaas.request import NO_MATCH, TOKEN_BYTES, AttemptId, FinishReason, Match, Path, Route


class Ending(Enum):
    """How an attempt ended."""

    RUNNING = "running"
    DONE = "done"
    REFUSED = "refused"
    PREFILL_LOST = "prefill_lost"
    DECODE_LOST = "decode_lost"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class Attempt:
    """`replayed_tokens`: with so many tokens of the answer behind the prompt, which the client had before."""

    id: AttemptId
    route: Route
    ending: Ending = Ending.RUNNING
    detail: str = ""
    replayed_tokens: int = 0


class Moved(Enum):
    """What became of a stream that had lost its decode node. MOVED: it went on elsewhere. COMPLETE: all its tokens were
    there. INEXACT: nobody could have gone on with the same tokens. EXHAUSTED: nobody did within the limits. LEFT: its
    client did not wait."""

    MOVED = "moved"
    COMPLETE = "complete"
    INEXACT = "inexact"
    EXHAUSTED = "exhausted"
    LEFT = "left"


@dataclass(slots=True)
class Migration:
    """A stream lost its decode node after so many tokens; its client has had none since `since_s`. By which path it has
    gone on, and what prefill reported of that, is known when it has."""

    after_tokens: int
    since_s: float
    outcome: Moved = Moved.LEFT
    gap_s: float | None = None
    path: Path | None = None
    prefill: PrefillReport | None = None


@dataclass(slots=True)
class Story:
    """All durations in seconds. `terms` holds the TTFT account's terms that the flow measured (see
    request.TTFT_TERMS): from `arrived_s`, when the request was handed over, to `first_s`, when its first tokens came,
    both on the ports' clock. `match` is what was known to be cached where the first route prefills. `prefill` is what
    the first token was made from; what comes after that is told by `migrations`."""

    attempts: list[Attempt] = field(default_factory=list)
    terms: dict[str, float] = field(default_factory=dict)
    #: None: when its flow begins.
    arrived_s: float | None = None
    first_s: float | None = None
    #: When the latest tokens came.
    last_s: float | None = None
    match: Match = NO_MATCH
    prefill: PrefillReport | None = None
    recomputed_tokens: int = 0
    output_tokens: int = 0
    #: These tokens, packed, as long as the stream may have to go on elsewhere.
    generated: bytearray = field(default_factory=bytearray, repr=False)
    finish: FinishReason | None = None
    #: The attempt that the first token came from.
    opening: Attempt | None = None
    migrations: list[Migration] = field(default_factory=list)

    @property
    def route(self) -> Route | None:
        """The route that led to the first token; until there is one, that of the latest attempt."""
        if self.opening is not None:
            return self.opening.route
        return self.attempts[-1].route if self.attempts else None

    @property
    def moves(self) -> int:
        """How often the stream has gone on elsewhere."""
        return sum(move.outcome is Moved.MOVED for move in self.migrations)

    def handed_out(self, tokens: bytes) -> None:
        """The client gets these now: they are its own from here on, whatever happens to whoever made them."""
        self.output_tokens += len(tokens) // TOKEN_BYTES
        self.generated += tokens
