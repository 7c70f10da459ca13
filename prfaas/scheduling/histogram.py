"""The lengths that arrive, counted as they come: log-spaced buckets whose counts fade with time.

Each router keeps a `LengthHistogram`; what it reports is a frozen `LengthCounts`, and the slow loop adds up those of
all routers. Counts are effective: an arrival of one half-life ago counts as half.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from prfaas.scheduling.evidence import InsufficientData
from prfaas.scheduling.lengths import Lengths

BUCKETS_PER_OCTAVE = 16
OCTAVES = 21
#: 1, 1.04, 1.09, ... 2**21 tokens. What is shorter or longer goes to the first or the last bucket.
EDGES = tuple(2.0 ** (step / BUCKETS_PER_OCTAVE) for step in range(BUCKETS_PER_OCTAVE * OCTAVES + 1))
BUCKETS = len(EDGES) - 1
#: Beyond so many half-lives the counts are rescaled, long before they leave the range of a float.
RESCALE_HALF_LIVES = 40.0


@dataclass(frozen=True, slots=True)
class LengthCounts:
    """Effective counts per bucket, at the moment they were asked for."""

    counts: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.counts) != BUCKETS:
            raise ValueError(f"counts of {len(self.counts)} buckets, not {BUCKETS}")

    @classmethod
    def merged(cls, reports: Iterable["LengthCounts"]) -> "LengthCounts":
        """The counts of several routers as one. A sum of nothing is empty."""
        empty = (0.0,) * BUCKETS
        return cls(tuple(map(sum, zip(empty, *(report.counts for report in reports), strict=True))))

    @property
    def total(self) -> float:
        return sum(self.counts)

    def lengths(self, needed: float) -> Lengths | InsufficientData:
        """The distribution, once it rests on `needed` effective requests."""
        total = self.total
        # Written so that a count that is not a number is insufficient too.
        if not (total > 0 and total >= needed):
            return InsufficientData("requests", total if total >= 0 else 0.0, needed)
        cells = zip(EDGES, EDGES[1:], self.counts, strict=False)
        return Lengths.weighted(cells)


class LengthHistogram:
    """Counts arrivals. Times come from the caller and may be a little out of order.

    An arrival at time u weighs 2 ** ((u - origin) / half_life) and everything is divided by the weight of now: adding
    one costs one bucket, never a walk over all of them.
    """

    def __init__(self, half_life_s: float) -> None:
        if not half_life_s > 0:
            raise ValueError("a half-life is above 0 seconds")
        self._half_life_s = half_life_s
        self._origin_s: float | None = None
        self._weights = [0.0] * BUCKETS

    def observe(self, uncached_tokens: int, now_s: float) -> None:
        bucket = min(max(bisect_left(EDGES, uncached_tokens) - 1, 0), BUCKETS - 1)
        self._weights[bucket] += 2.0 ** self._half_lives(now_s)

    def counts(self, now_s: float) -> LengthCounts:
        scale = 2.0 ** -self._half_lives(now_s)
        return LengthCounts(tuple(weight * scale for weight in self._weights))

    def check(self) -> None:
        """Weights are never negative, and small enough to go on adding."""
        assert all(0 <= weight < float("inf") for weight in self._weights)
        assert self._origin_s is not None or not any(self._weights)

    def _half_lives(self, now_s: float) -> float:
        """Since the origin, which moves up when it has become too old. A report from far in the past counts nothing."""
        if self._origin_s is None:
            self._origin_s = now_s
        age = (now_s - self._origin_s) / self._half_life_s
        if age > RESCALE_HALF_LIVES:
            fade = 2.0**-age
            self._weights = [weight * fade for weight in self._weights]
            self._origin_s, age = now_s, 0.0
        return max(age, -RESCALE_HALF_LIVES)
