"""The lengths that arrive, counted as they come: log-spaced buckets whose counts fade with time.

Each router keeps a `LengthHistogram`; what it reports is a frozen `LengthCounts`, and the slow loop adds up those of
all routers. Counts are effective: an arrival of one half-life ago counts as half, and one from before lengths changed
not at all.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from prfaas.scheduling.drift import difference
from prfaas.scheduling.evidence import InsufficientData
from prfaas.scheduling.lengths import Lengths

BUCKETS_PER_OCTAVE = 16
OCTAVES = 21
#: 1, 1.04, 1.09, ... 2**21 tokens. What is shorter or longer goes to the first or the last bucket.
EDGES = tuple(2.0 ** (step / BUCKETS_PER_OCTAVE) for step in range(BUCKETS_PER_OCTAVE * OCTAVES + 1))
BUCKETS = len(EDGES) - 1
#: Beyond so many half-lives the counts are rescaled, long before they leave the range of a float.
RESCALE_HALF_LIVES = 40.0
#: The latest arrivals are kept apart in up to so many slices, each of so many of them and of so long at least: lengths
#: may have changed between any two slices.
SLICES, SLICE_REQUESTS, SLICE_S = 16, 32, 15.0


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
    one costs two buckets; only the last one of a slice makes the histogram look whether lengths have changed.
    """

    def __init__(self, half_life_s: float) -> None:
        if not half_life_s > 0:
            raise ValueError("a half-life is above 0 seconds")
        self._half_life_s = half_life_s
        self._origin_s: float | None = None
        self._weights = [0.0] * BUCKETS
        #: The parts of the weights that are of each slice, the last of which is still open.
        self._slices: deque[list[float]] = deque(([0.0] * BUCKETS,), maxlen=SLICES + 1)
        self._opened_s, self._in_slice = 0.0, 0

    def observe(self, uncached_tokens: int, now_s: float) -> None:
        bucket = min(max(bisect_left(EDGES, uncached_tokens) - 1, 0), BUCKETS - 1)
        weight = 2.0 ** self._half_lives(now_s)
        self._weights[bucket] += weight
        if self._in_slice == 0:
            self._opened_s = now_s
        self._slices[-1][bucket] += weight
        self._in_slice += 1
        if self._in_slice >= SLICE_REQUESTS and now_s - self._opened_s >= SLICE_S:
            self._forget_what_was_different(now_s)
            self._slices.append([0.0] * BUCKETS)
            self._in_slice = 0

    def counts(self, now_s: float) -> LengthCounts:
        scale = 2.0 ** -self._half_lives(now_s)
        return LengthCounts(tuple(weight * scale for weight in self._weights))

    def check(self) -> None:
        """Weights are never negative, and small enough to go on adding."""
        assert all(0 <= weight < float("inf") for weight in self._weights)
        assert self._origin_s is not None or not any(self._weights)

    def _forget_what_was_different(self, now_s: float) -> None:
        """All before the place among the latest slices where lengths differ most, if they do."""
        scale = 2.0 ** -self._half_lives(now_s)
        most, kept = 1.0, self._weights
        after = [0.0] * BUCKETS
        for each in reversed(self._slices):
            after = list(map(sum, zip(after, each, strict=True)))
            before = (max(0.0, weight - late) * scale for weight, late in zip(self._weights, after, strict=True))
            apart = difference(list(before), [weight * scale for weight in after])
            if apart > most:
                most, kept = apart, after
        self._weights = list(kept)

    def _half_lives(self, now_s: float) -> float:
        """Since the origin, which moves up when it has become too old. A report from far in the past counts nothing."""
        if self._origin_s is None:
            self._origin_s = now_s
        age = (now_s - self._origin_s) / self._half_life_s
        if age > RESCALE_HALF_LIVES:
            fade = 2.0**-age
            self._weights = [weight * fade for weight in self._weights]
            faded = [[weight * fade for weight in each] for each in self._slices]
            self._slices = deque(faded, maxlen=SLICES + 1)
            self._origin_s, age = now_s, 0.0
        return max(age, -RESCALE_HALF_LIVES)
