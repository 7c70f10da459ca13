"""How long prompts are: a distribution of *incremental* lengths, the tokens left to compute after prefix matching.

One representation serves a formula, a histogram and a list of samples: cells (low, high] that hold a share of the
requests, spread evenly inside the cell; a cell of no width is a single length. Cells rise and do not overlap.
Everything asked about "above t" means L > t, everything "below t" means L <= t, as in the paper.
"""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

#: So fine that spreading evenly inside a cell changes no result by more than 1e-5.
LOG_NORMAL_CELLS = 1024
#: Weights sum to 1 within this, and a smaller share of the requests is nobody.
ROUNDING = 1e-9

Function = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Share `weights[i]` of the requests is longer than `lows[i]` and at most `highs[i]` tokens long."""

    lows: tuple[float, ...]
    highs: tuple[float, ...]
    weights: tuple[float, ...]
    _cumulative: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        cells = tuple(zip(self.lows, self.highs, self.weights, strict=True))
        if not cells or not all(0 <= low <= high < math.inf and weight >= 0 for low, high, weight in cells):
            raise ValueError("a distribution of lengths has cells, none below 0 tokens or of negative weight")
        if any(high > next_low for (_, high, _), (next_low, _, _) in itertools.pairwise(cells)):
            raise ValueError("cells of lengths rise and do not overlap")
        if not abs(sum(self.weights) - 1) < ROUNDING:
            raise ValueError("the weights of a distribution sum to 1")
        object.__setattr__(self, "_cumulative", tuple(itertools.accumulate(self.weights, initial=0.0)))

    @classmethod
    def weighted(cls, cells: Iterable[tuple[float, float, float]]) -> "Lengths":
        """From (low, high, weight) in rising order; weights are made to sum to 1, and empty cells are left out."""
        kept = [cell for cell in cells if cell[2] > 0]
        total = math.fsum(weight for _, _, weight in kept)
        if not kept or not 0 < total < math.inf:
            raise ValueError("a distribution of lengths needs weight")
        return cls(*zip(*((low, high, weight / total) for low, high, weight in kept), strict=True))

    @classmethod
    def log_normal(cls, mu: float, sigma: float, low_tokens: float, high_tokens: float) -> "Lengths":
        """ln L is normal (mu, sigma), cut to [low, high]."""

        def probability(tokens: float) -> float:
            return math.erfc((mu - math.log(tokens)) / (sigma * math.sqrt(2))) / 2

        if not (0 < low_tokens < high_tokens and sigma > 0):
            raise ValueError("a truncated log-normal needs 0 < low < high and sigma > 0")
        ratio = high_tokens / low_tokens
        edges = [low_tokens * ratio ** (step / LOG_NORMAL_CELLS) for step in range(LOG_NORMAL_CELLS + 1)]
        return cls.weighted((a, b, probability(b) - probability(a)) for a, b in itertools.pairwise(edges))

    @property
    def shortest_tokens(self) -> float:
        return self.lows[0]

    @property
    def longest_tokens(self) -> float:
        return self.highs[-1]

    def tail(self, tokens: float) -> float:
        """P(L > t). A share that rounding alone can make is none, or all: means are divided by it."""
        cell, below = self._cut(tokens)
        inside = below * self.weights[cell] if cell < len(self.weights) else 0.0
        share = 1.0 - self._cumulative[cell] - inside
        return 0.0 if share < ROUNDING else 1.0 if share > 1 - ROUNDING else share

    def mean(self) -> float:
        return self.expect(_identity)

    def expect(self, function: Function) -> float:
        """E[f(L)]."""
        return self.integrated(function).whole

    def quantile(self, q: float) -> float:
        """The length that a share `q` of the requests does not exceed; with a uniform `q`, a draw."""
        cell = min(max(bisect_left(self._cumulative, q) - 1, 0), len(self.weights) - 1)
        inside = (q - self._cumulative[cell]) / self.weights[cell] if self.weights[cell] > 0 else 0.0
        return self.lows[cell] + min(1.0, max(0.0, inside)) * (self.highs[cell] - self.lows[cell])

    def integrated(self, function: Function) -> "Integral":
        """f weighed by this distribution, once, so that it can be cut at many t."""
        values = (
            weight * function((low + high) / 2)
            for low, high, weight in zip(self.lows, self.highs, self.weights, strict=True)
        )
        return Integral(self, function, tuple(itertools.accumulate(values, initial=0.0)))

    def _cut(self, tokens: float) -> tuple[int, float]:
        """The first cell that reaches above t, and the fraction of it that lies at or below t."""
        cell = bisect_right(self.highs, tokens)
        if cell == len(self.highs) or tokens <= self.lows[cell]:
            return cell, 0.0
        return cell, (tokens - self.lows[cell]) / (self.highs[cell] - self.lows[cell])


@dataclass(frozen=True, slots=True)
class Integral:
    """The sum of f(L) over the requests, per request: over all of them, or over those on one side of t."""

    lengths: Lengths
    function: Function
    _cumulative: tuple[float, ...]

    @property
    def whole(self) -> float:
        return self._cumulative[-1]

    def below(self, tokens: float) -> float:
        cell, fraction = self.lengths._cut(tokens)
        if fraction == 0:
            return self._cumulative[cell]
        middle = (self.lengths.lows[cell] + tokens) / 2
        return self._cumulative[cell] + fraction * self.lengths.weights[cell] * self.function(middle)

    def above(self, tokens: float) -> float:
        cell, fraction = self.lengths._cut(tokens)
        if fraction == 0:
            return self.whole - self._cumulative[cell]
        middle = (tokens + self.lengths.highs[cell]) / 2
        rest = self.whole - self._cumulative[cell + 1]
        return rest + (1 - fraction) * self.lengths.weights[cell] * self.function(middle)


def _identity(tokens: float) -> float:
    return tokens
