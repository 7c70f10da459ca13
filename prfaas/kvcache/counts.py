"""What a shard has counted since its start."""

from collections import Counter
from dataclasses import dataclass, field

from prfaas.kvcache.objects import Dropped, Missed, Refused


@dataclass(slots=True)
class Counts:
    """Of what was looked up for a prefill (`joint`), tokens whose KV was there and could not be
    resumed from: behind the last whole unit within the limit, or for want of a state."""

    looked_up_tokens: int = 0
    kv_hit_tokens: int = 0
    joint_hit_tokens: int = 0
    unaligned_tokens: int = 0
    stateless_tokens: int = 0
    expired_leases: int = 0
    broken_leases: int = 0
    misses: Counter[Missed] = field(default_factory=Counter)
    refused: Counter[Refused] = field(default_factory=Counter)
    discarded: Counter[Dropped] = field(default_factory=Counter)
    published: int = 0
    alarms: int = 0
