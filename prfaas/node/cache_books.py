"""What a worker counts about its use of the cache pool, for its `/metrics`."""

from collections import Counter, deque
from dataclasses import dataclass, field

from prfaas.cluster import RegionId
from prfaas.node.cache_plan import alignment_tokens
from prfaas.request import Match

#: Durations that wait for the next look at the metrics.
MAX_WAITING = 4096


@dataclass(slots=True)
class CacheBooks:
    """The keys are values of the metrics' labels. `get_s` is emptied by whoever shows it."""

    lookups: Counter[str] = field(default_factory=Counter)
    looked_up_tokens: int = 0
    hit_tokens: Counter[str] = field(default_factory=Counter)
    wasted_tokens: Counter[str] = field(default_factory=Counter)
    skipped_tokens: int = 0
    held_tokens: int = 0
    gets: Counter[str] = field(default_factory=Counter)
    get_bytes: Counter[RegionId] = field(default_factory=Counter)
    get_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_WAITING))
    puts: Counter[str] = field(default_factory=Counter)
    put_bytes: int = 0
    pulls: Counter[str] = field(default_factory=Counter)
    pulled_bytes: int = 0

    def looked_up(self, handoff_tokens: int, match: Match) -> None:
        """A prefill has asked how much of its prompt it may skip."""
        self.lookups["hit" if match.kv else "miss"] += 1
        self.looked_up_tokens += handoff_tokens
        self.hit_tokens["kv"] += match.kv
        self.hit_tokens["joint"] += match.joint
        self.wasted_tokens["missing_state"] += match.kv - match.joint
        self.wasted_tokens["alignment"] += alignment_tokens(handoff_tokens, match)

    def not_looked_up(self) -> None:
        """It has asked, and had no answer: which is no miss."""
        self.lookups["failed"] += 1

    def brought(self, tokens: int, *, resume: bool) -> None:
        """Cached KV is here, for a prefill to resume from or for a decode that is sent the rest."""
        if resume:
            self.skipped_tokens += tokens
        else:
            self.held_tokens += tokens
