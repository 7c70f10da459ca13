"""What breakers keep from being tried: the value that a decision is given."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from prfaas.cluster import NodeId, RegionId
from prfaas.scheduling.lanes import Pair

NOBODY: frozenset[NodeId] = frozenset()
NOWHERE: frozenset[RegionId] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shut:
    """What must not be tried now, and when the first of the breakers lets a probe through. `full` of the sources are
    only kept from having more under way."""

    sources: frozenset[NodeId] = NOBODY
    pairs: Mapping[NodeId, frozenset[NodeId]] = field(default_factory=lambda: MappingProxyType({}))
    links: frozenset[Pair] = frozenset()
    full: frozenset[NodeId] = NOBODY
    half_opens_at: float = math.inf

    def __bool__(self) -> bool:
        return bool(self.sources or self.pairs or self.links)

    def toward(self, decode: NodeId) -> frozenset[NodeId]:
        """Sources that must not push to it."""
        pairs = self.pairs.get(decode)
        return self.sources if pairs is None else self.sources | pairs

    def into(self, target: RegionId) -> frozenset[RegionId]:
        """Regions that must not push into it."""
        return frozenset(source for source, region in self.links if region == target) if self.links else NOWHERE


OPEN_TO_ALL = Shut()
