"""What happened to one request so far. The flow writes it; receipts, metrics and logs read it, also after a failure."""

from dataclasses import dataclass, field
from enum import Enum

from prfaas.flows.ports import PrefillReport
from prfaas.request import NO_MATCH, AttemptId, FinishReason, Match, Route


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
    id: AttemptId
    route: Route
    ending: Ending = Ending.RUNNING
    detail: str = ""


@dataclass(slots=True)
class Story:
    """All durations in seconds. `terms` holds the TTFT account's terms that the flow measured (see
    request.TTFT_TERMS): from `arrived_s`, when the request was handed over, to `first_s`, when its first tokens came,
    both on the ports' clock. `match` is what was known to be cached where the first route prefills."""

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
    finish: FinishReason | None = None

    @property
    def route(self) -> Route | None:
        """The route of the latest attempt."""
        return self.attempts[-1].route if self.attempts else None
