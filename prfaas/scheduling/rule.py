"""What a route is chosen by: the length rule's settings, and what is known of hardware, links and demand."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from prfaas.cluster import LinkState
from prfaas.request import Mode
from prfaas.scheduling.lanes import Lanes, Pair, Profiles
from prfaas.scheduling.shut import OPEN_TO_ALL, Shut

__all__ = ["Pair", "Profiles", "RoutingParams"]


@dataclass(frozen=True, slots=True)
class RoutingParams:
    """`abundant`: the link has room to spare, so that a prefix cached on either side counts.

    Without profiles costs are tokens, and nothing is known of seconds: then nobody spills over.
    """

    threshold_tokens: int
    abundant: bool = False
    mode: Mode = Mode.AUTO
    #: Prompts with no more uncached tokens than this stay here, and such with more than `t_force` never do while the
    #: other region has a node for them. Both bound the threshold and the spill-over.
    t_min: int = 0
    t_force: int | None = None
    #: A class that would miss it hands over to the other class if that keeps within `spill_share` of it. The gap keeps
    #: two loaded classes from passing requests back and forth.
    ttft_slo_s: float | None = None
    spill_share: float = 0.8
    profiles: Profiles = field(default_factory=lambda: MappingProxyType({}))
    links: Mapping[Pair, LinkState] = field(default_factory=lambda: MappingProxyType({}))
    #: There and back between two regions, as configured. Where none is named the link's own counts.
    rtt_s: Mapping[Pair, float] = field(default_factory=lambda: MappingProxyType({}))
    #: E[L | L <= t], E[L | L > t] and the mean output: what others in a queue are like. None: like this request.
    short_tokens: float | None = None
    long_tokens: float | None = None
    output_tokens: float | None = None
    #: A worker can fetch a cached prefix from another region.
    cache_pulls: bool = False
    #: Ways that have failed too often lately.
    shut: Shut = OPEN_TO_ALL
    #: What follows from the above for each kind of hardware.
    lanes: Lanes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lanes = Lanes(self.profiles, self.links, self.rtt_s, self.short_tokens, self.long_tokens)
        object.__setattr__(self, "lanes", lanes)

    def with_shut(self, shut: Shut) -> "RoutingParams":
        """The same but for that. Nothing that follows from the rest is worked out again."""
        if shut is self.shut:
            return self
        same = copy.copy(self)
        object.__setattr__(same, "shut", shut)
        return same

    @property
    def bounded_threshold_tokens(self) -> int:
        """`t_min` wins where the two bounds contradict each other."""
        force = self.threshold_tokens if self.t_force is None else min(self.threshold_tokens, self.t_force)
        return max(self.t_min, force)

    def is_short(self, uncached_tokens: int) -> bool:
        return uncached_tokens <= self.bounded_threshold_tokens

    def may_spill_local(self, uncached_tokens: int) -> bool:
        return self.t_force is None or uncached_tokens <= max(self.t_min, self.t_force)

    def may_spill_remote(self, uncached_tokens: int) -> bool:
        return uncached_tokens > self.t_min
