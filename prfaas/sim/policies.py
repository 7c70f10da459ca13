"""Who decides: the product's own `choose`, at any of its settings, and others to compare it with.

Those that are compared have the signature of `choose`.
"""

from collections.abc import Iterable
from enum import Enum
from typing import Annotated

from msgspec import Meta

from prfaas.cluster import ClusterView, NodeId, NodeKind
from prfaas.errors import PeerUnavailable
from prfaas.request import Match, Matches, Mode, Path, Reason, Request, Route
from prfaas.scheduling.routing import Choose, choose
from prfaas.scheduling.rule import RoutingParams
from prfaas.sim.structs import Section


class Rule(Enum):
    """CHOOSE: the product's. ROUND_ROBIN: prefill and decode nodes in turn, whatever the prompt."""

    CHOOSE = "choose"
    ROUND_ROBIN = "round_robin"


class Policy(Section, frozen=True):
    """`mode` always and never make `choose` remote-only and local-only; `threshold_tokens` is t, or where it starts."""

    rule: Rule = Rule.CHOOSE
    mode: Mode = Mode.AUTO
    threshold_tokens: Annotated[int, Meta(ge=0)] = 0
    abundant: bool = False
    t_min: Annotated[int, Meta(ge=0)] = 0
    t_force: Annotated[int, Meta(ge=0)] | None = None
    ttft_slo_s: Annotated[float, Meta(gt=0)] | None = None

    def __post_init__(self) -> None:
        if self.t_force is not None and self.t_min > self.t_force:
            raise ValueError(f"t_min: {self.t_min} is above t_force, {self.t_force}")

    def decide(self) -> Choose:
        """A function of its own for each router, as round robin counts."""
        match self.rule:
            case Rule.CHOOSE:
                return choose
            case Rule.ROUND_ROBIN:
                return RoundRobin()


class RoundRobin:
    """All prefill nodes in turn, here or there, and all decode nodes in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def __call__(
        self,
        request: Request,
        matches: Matches,
        view: ClusterView,
        params: RoutingParams,
        avoid: frozenset[NodeId] = frozenset(),
    ) -> Route:
        prefills = _usable((*view.remote_prefill, *view.local_prefill), avoid)
        decodes = _usable(view.decode, avoid)
        if not decodes:
            raise PeerUnavailable("cluster", "no decode node is left for this request")
        decode = decodes[self._turn % len(decodes)]
        prefill = prefills[self._turn % len(prefills)] if prefills else decode
        self._turn += 1
        remote = view.nodes[prefill].kind is NodeKind.PREFILL_WORKER
        resumed = min(matches.get(prefill, Match()).joint, request.handoff_tokens)
        there = min(matches.get(decode, Match()).kv, request.handoff_tokens)
        return Route(
            prefill=prefill,
            decode=decode,
            path=Path.REMOTE if remote else Path.LOCAL,
            reason=Reason.LONG_PROMPT if remote else Reason.SHORT_PROMPT,
            uncached_tokens=request.prompt_tokens - resumed,
            transfer_tokens=0 if prefill == decode else request.handoff_tokens - there,
            threshold_tokens=params.threshold_tokens,
            prefill_tokens=request.prompt_tokens - resumed,
        )


def _usable(names: Iterable[NodeId], avoid: frozenset[NodeId]) -> list[NodeId]:
    """By name, so that turns do not depend on load."""
    return sorted(name for name in names if name not in avoid)
