"""What is asked of the cluster lately: how often, how much is left to compute, how much is put out.

Each router counts its own requests; the leader adds up what all of them report. Everything fades with time, so that
what is known follows what changes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prfaas.scheduling.evidence import InsufficientData
from prfaas.scheduling.histogram import LengthCounts, LengthHistogram
from prfaas.scheduling.lengths import Lengths
from prfaas.scheduling.readings import known


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandParams:
    """Half-lives. Lengths change slowly and take many requests to know; the rate of arrivals must follow a burst."""

    lengths_half_life_s: float = 300.0
    rate_half_life_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandSnapshot:
    """What one router, or all of them together, saw. `output_tokens` is a mean, None before a request has finished."""

    counts: LengthCounts
    arrivals_per_s: float
    output_tokens: float | None = None

    def lengths(self, needed: float) -> Lengths | InsufficientData:
        """The distribution of uncached lengths, once it rests on `needed` effective requests."""
        return self.counts.lengths(needed)

    @classmethod
    def merged(cls, reports: Iterable["DemandSnapshot"]) -> "DemandSnapshot":
        """Of several routers as one. Outputs count by how often they occur; a rate that is not a number is left out."""
        seen: Sequence[DemandSnapshot] = [report for report in reports if known(report.arrivals_per_s) is not None]
        weighed = [
            (report.arrivals_per_s, report.output_tokens)
            for report in seen
            if known(report.output_tokens) is not None and report.output_tokens is not None
        ]
        weight = math.fsum(rate for rate, _ in weighed)
        return cls(
            counts=LengthCounts.merged(report.counts for report in seen),
            arrivals_per_s=math.fsum(report.arrivals_per_s for report in seen),
            output_tokens=math.fsum(rate * tokens for rate, tokens in weighed) / weight if weight > 0 else None,
        )


class Fading:
    """A sum in which what was added one half-life ago counts half."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._sum, self._at = 0.0, -math.inf

    def add(self, amount: float, now: float) -> None:
        self._sum, self._at = self.at(now) + amount, max(now, self._at)

    def at(self, now: float) -> float:
        if self._at == -math.inf:
            return 0.0
        return self._sum * math.exp2(-max(0.0, now - self._at) / self._half_life_s)


class Demand:
    """Counts as requests are routed and as they finish."""

    def __init__(self, params: DemandParams, now: float) -> None:
        self._params = params
        self._since = now
        self._lengths = LengthHistogram(params.lengths_half_life_s)
        self._arrivals = Fading(params.rate_half_life_s)
        self._finished, self._output = Fading(params.lengths_half_life_s), Fading(params.lengths_half_life_s)

    def routed(self, uncached_tokens: int, now: float) -> None:
        """A request got its first route. What was left to compute is what the rule compares with t."""
        self._lengths.observe(uncached_tokens, now)
        self._arrivals.add(1.0, now)

    def finished(self, output_tokens: int, now: float) -> None:
        self._finished.add(1.0, now)
        self._output.add(float(output_tokens), now)

    def snapshot(self, now: float) -> DemandSnapshot:
        finished = self._finished.at(now)
        return DemandSnapshot(
            counts=self._lengths.counts(now),
            arrivals_per_s=self._arrivals.at(now) / self._window_s(now),
            output_tokens=self._output.at(now) / finished if finished > 0 else None,
        )

    def check(self) -> None:
        self._lengths.check()

    def _window_s(self, now: float) -> float:
        """Over how long the fading count of arrivals counts, less in the beginning, when nothing could arrive yet."""
        half_life_s = self._params.rate_half_life_s
        watched = max(now - self._since, half_life_s / 8)
        return half_life_s / math.log(2) * (1 - math.exp2(-watched / half_life_s))
