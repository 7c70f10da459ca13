"""A function known at a few points: measured costs against lengths.

The points are joined by a smooth curve that rises where they do. A threshold found by balancing two stages must not
stick to a bend, and more tokens must never seem to cost less.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

#: A piece of a curve: from x on, y + d * (c1 + d * (c2 + d * c3)) with d the distance from x.
_Piece = tuple[float, float, float, float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """A smooth curve through points of rising x, monotone between each two of them (cubic, Fritsch-Carlson).

    Beyond the last point it goes on straight. Before the first it does too, or with `from_zero` comes from (0, 0).
    """

    xs: tuple[float, ...]
    ys: tuple[float, ...]
    from_zero: bool = False
    _pieces: tuple[_Piece, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.xs) < 2 or len(self.xs) != len(self.ys):
            raise ValueError("a curve needs two points or more")
        if not all(map(math.isfinite, (*self.xs, *self.ys))) or any(a >= b for a, b in itertools.pairwise(self.xs)):
            raise ValueError("the points of a curve are finite and rise in x")
        if self.from_zero and self.xs[0] <= 0:
            raise ValueError("a curve that comes from 0 has its points above 0")
        object.__setattr__(self, "_pieces", tuple(_pieces(self.xs, self.ys, self.from_zero)))

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]], *, from_zero: bool = False) -> "Curve":
        xs, ys = zip(*points, strict=True)
        return cls(tuple(map(float, xs)), tuple(map(float, ys)), from_zero)

    def __call__(self, x: float) -> float:
        start, y, c1, c2, c3 = self._pieces[bisect_right(self.xs, x)]
        d = x - start
        return y + d * (c1 + d * (c2 + d * c3))

    @property
    def rises(self) -> bool:
        """Nowhere falls, so that more tokens never cost less."""
        lowest = 0.0 if self.from_zero else -math.inf
        return self.ys[0] >= lowest and all(a <= b for a, b in itertools.pairwise(self.ys))


def _pieces(xs: tuple[float, ...], ys: tuple[float, ...], from_zero: bool) -> Iterator[_Piece]:
    tangents = _tangents(xs, ys)
    yield xs[0], ys[0], ys[0] / xs[0] if from_zero else tangents[0], 0.0, 0.0
    for (x0, y0, m0), (x1, y1, m1) in itertools.pairwise(zip(xs, ys, tangents, strict=True)):
        h, slope = x1 - x0, (y1 - y0) / (x1 - x0)
        yield x0, y0, m0, (3 * slope - 2 * m0 - m1) / h, (m0 + m1 - 2 * slope) / h**2
    yield xs[-1], ys[-1], tangents[-1], 0.0, 0.0


def _tangents(xs: tuple[float, ...], ys: tuple[float, ...]) -> list[float]:
    """At each point that of the parabola through it and its neighbours, made small enough not to overshoot."""
    widths = [b - a for a, b in itertools.pairwise(xs)]
    slopes = [(b - a) / width for (a, b), width in zip(itertools.pairwise(ys), widths, strict=True)]
    if len(slopes) == 1:
        return [slopes[0], slopes[0]]
    pieces = list(zip(widths, slopes, strict=True))
    inner = [
        _limited((slope0 * h1 + slope1 * h0) / (h0 + h1), slope0, slope1)
        for (h0, slope0), (h1, slope1) in itertools.pairwise(pieces)
    ]

    def end(piece: tuple[float, float], beside: tuple[float, float]) -> float:
        (h0, slope0), (h1, slope1) = piece, beside
        return _limited(slope0 + h0 * (slope0 - slope1) / (h0 + h1), slope0, slope0)

    return [end(pieces[0], pieces[1]), *inner, end(pieces[-1], pieces[-2])]


def _limited(tangent: float, before: float, after: float) -> float:
    """0 at a turning point; otherwise in the direction of both slopes and at most three times the flatter one."""
    if before * after <= 0:
        return 0.0
    steepest = 3 * min(before, after, key=abs)
    return sorted((0.0, tangent, steepest))[1]
