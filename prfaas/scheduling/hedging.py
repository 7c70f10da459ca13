"""When a prefill far away has taken so long that it is worth to begin the same here, and how often that may be done.

What is usual is learned: how many times what was predicted prefills take, 95 of 100 of them. What must hold: of all
prefills no more than `share`, and `burst` on top, are hedged, so that hedges cannot bury the nodes that they run on.
"""

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

USUAL = 0.95
#: How many of the latest count, and how few say nothing: until then they are taken to be as slow as this.
MOST, FEWEST = 128, 20
UNKNOWN_RATIO = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HedgeParams:
    """Begun after `factor` times what is usual, but not before `least_s`."""

    factor: float = 1.5
    share: float = 0.05
    burst: float = 2.0
    least_s: float = 0.05


class Hedging:
    """One per router process."""

    def __init__(self, params: HedgeParams) -> None:
        self._params = params
        self._room = params.burst
        self._latest: deque[float] = deque()
        self._ordered: list[float] = []
        self.prefills = self.started = self.won = 0

    def after_s(self, predicted_s: float) -> float:
        """A prefill begins that should take so long: when to begin another, counted from now."""
        self.prefills += 1
        self._room = min(self._params.burst, self._room + self._params.share)
        ordered = self._ordered
        ratio = ordered[int(USUAL * len(ordered))] if len(ordered) >= FEWEST else UNKNOWN_RATIO
        return max(self._params.least_s, self._params.factor * ratio * predicted_s)

    def took(self, predicted_s: float, seconds: float) -> None:
        """A prefill that should have taken `predicted_s` is done."""
        if predicted_s <= 0:
            return
        ratio = seconds / predicted_s
        self._latest.append(ratio)
        insort(self._ordered, ratio)
        if len(self._latest) > MOST:
            del self._ordered[bisect_left(self._ordered, self._latest.popleft())]

    def take(self) -> bool:
        """Whether another may be begun; then it is."""
        if self._room < 1.0:
            return False
        self._room -= 1.0
        self.started += 1
        return True

    def check(self) -> None:
        assert self._ordered == sorted(self._latest)
        assert self.won <= self.started <= self._params.burst + self._params.share * self.prefills + 1e-9
