"""What the flows may await. `prfaas.live` implements these on asyncio and sockets, `prfaas.sim` in virtual time."""

from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from prfaas.cluster import ClusterView, NodeId
from prfaas.errors import PrfaasError
from prfaas.request import NO_PERMIT, AttemptId, FinishReason, Matches, Permit, Request, Route, Score
from prfaas.scheduling.hedging import Hedging
from prfaas.scheduling.routing import RoutingParams

T = TypeVar("T")


class Clock(Protocol):
    """Time and concurrency. Seconds everywhere; `now` is monotonic and has no epoch."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...

    async def within(self, seconds: float, stage: str, awaitable: Awaitable[T]) -> T:
        """The awaitable's result, or DeadlineExceeded(stage, seconds) with the awaitable cancelled."""
        ...

    async def race(self, contenders: Mapping[str, Awaitable[Any]]) -> tuple[str, Any]:
        """Name and result of the first to finish (ties in the mapping's order); an error of the first is raised. The
        losers are cancelled and have finished their clean-up when this returns."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Room on the decode node for one attempt: KV bytes and a place in its admission, held until it is released. The KV
    of the first `held_tokens` is there already. `took_s`: how long the node had the command, by its own clock; None
    when it does not say."""

    decode: NodeId
    attempt: AttemptId
    kv_address: str
    generation: int
    incarnation: int
    permit: Permit = NO_PERMIT
    held_tokens: int = 0
    took_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillReport:
    """What the prefill side measured. `queue_s`: from the command to the first chunk, what comes from a cache included;
    `exposed_s`: from the last part being computed to the receiver's acknowledgement. `cached_tokens` were not computed
    but came from a cache, `pulled_bytes` of them from another region's. `took_s` as in Reservation."""

    queue_s: float
    compute_s: float
    exposed_s: float
    prefill_tokens: int
    kv_bytes: int
    cached_tokens: int = 0
    pulled_bytes: int = 0
    took_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Tokens in order, packed uint32, with what the request's `top_logits` asks for. The first has how long its
    sequence waited on the node, its step, and how long the node had the command (as in Reservation). The last batch has
    `finish`; only it carries the counts of the whole attempt."""

    tokens: bytes
    top_logits: tuple[tuple[tuple[int, float], ...], ...] = ()
    scores: tuple[Score, ...] = ()
    first_queue_s: float | None = None
    first_step_s: float | None = None
    first_took_s: float | None = None
    finish: FinishReason | None = None
    recomputed_tokens: int = 0


class ServePorts(Clock, Protocol):
    """The world as `flows.serve` sees it. Calls raise PeerUnavailable, Overloaded, TransferFailed, EngineFailed."""

    def view(self) -> ClusterView: ...

    def routing(self) -> RoutingParams:
        """The rule as the fast loop has set it by now."""
        ...

    def routed(self, request: Request, route: Route) -> None:
        """A request has got its first route: what demand is counted by. Retries are not told."""
        ...

    async def matches(self, request: Request) -> Matches:
        """What is cached of the request's prompt by now."""
        ...

    def new_attempt(self) -> AttemptId: ...

    async def reserve(self, attempt: AttemptId, request: Request, route: Route) -> Reservation:
        """Take room for the request on the decode node, for KV that will come from where it is prefilled (which may be
        the decode node itself)."""
        ...

    async def prefill(
        self, route: Route, attempt: AttemptId, request: Request, reservation: Reservation
    ) -> PrefillReport:
        """Compute the prompt up to N-1 where the route says; returns when the KV is complete and checked at the
        reservation."""
        ...

    def prefill_lost(self, attempt: AttemptId, error: PrfaasError) -> None:
        """Its prefill elsewhere came to nothing: what breakers learn from."""
        ...

    def due_at(self, attempt: AttemptId) -> float | None:
        """When its prefill elsewhere will be overdue; None: that is not known."""
        ...

    def is_hopeless(self, attempt: AttemptId) -> bool:
        """Its prefill elsewhere is overdue, and nothing speaks for it any more."""
        ...

    def hedging(self) -> Hedging | None:
        """None: prefills are not hedged."""
        ...

    def decode(self, reservation: Reservation, request: Request) -> AsyncIterator[TokenBatch]:
        """Take the hand-off and stream tokens."""
        ...

    def release(self, node: NodeId, attempt: AttemptId) -> None:
        """End whatever `node` still does or holds for the attempt. Idempotent, never waits, never fails."""
        ...
