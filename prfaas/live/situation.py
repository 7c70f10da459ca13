"""What a request is routed under, besides the view: the fast loop's latest decision, what it knew of the links, and
what breakers had shut.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from prfaas.cluster import LinkState
from prfaas.scheduling.rule import Pair
from prfaas.scheduling.shut import OPEN_TO_ALL, Shut
from prfaas.scheduling.threshold import ThresholdDecision


@dataclass(frozen=True, slots=True)
class Situation:
    """`decision` is None until the fast loop has made its first."""

    decision: ThresholdDecision | None = None
    links: Mapping[Pair, LinkState] = field(default_factory=lambda: MappingProxyType({}))
    shut: Shut = OPEN_TO_ALL
