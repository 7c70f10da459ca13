"""A curve goes through its points, rises where they rise, and does not overshoot."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.curve import Curve


@st.composite
def rising_curves(draw: st.DrawFn) -> Curve:
    steps = st.lists(
        st.tuples(st.floats(0.1, 1e5), st.floats(0.0, 1e3)),
        min_size=1,
        max_size=8,
    )
    points = itertools.accumulate(draw(steps), lambda a, b: (a[0] + b[0], a[1] + b[1]), initial=(1.0, 1.0))
    return Curve.through(points, from_zero=draw(st.booleans()))


@given(rising_curves(), st.floats(-1e5, 1e6), st.floats(-1e5, 1e6))
def test_a_curve_through_rising_points_never_falls(curve: Curve, a: float, b: float) -> None:
    """Neither between its points nor beyond them."""
    low, high = sorted((a, b))
    assert curve.rises
    assert curve(low) <= curve(high) + 1e-6 * max(1.0, abs(curve(low)), abs(curve(high)))


@given(rising_curves(), st.integers(0, 7), st.floats(0, 1))
def test_a_curve_stays_between_the_points_it_joins(curve: Curve, piece: int, fraction: float) -> None:
    """Smoothness is not bought with overshoot."""
    piece %= len(curve.xs) - 1
    x = curve.xs[piece] + fraction * (curve.xs[piece + 1] - curve.xs[piece])
    slack = 1e-9 * curve.ys[-1]
    assert curve.ys[piece] - slack <= curve(x) <= curve.ys[piece + 1] + slack


@given(rising_curves())
def test_a_curve_goes_through_its_points(curve: Curve) -> None:
    """What was measured is what is answered."""
    for x, y in zip(curve.xs, curve.ys, strict=True):
        assert curve(x) == pytest.approx(y, abs=1e-6)


@pytest.mark.parametrize(
    "points",
    [[(0, 1)], [(0, 1), (0, 2)], [(2, 0), (1, 1)], [(0, 1), (1, math.nan)], [(0, 1), (math.inf, 2)]],
)
def test_points_that_make_no_curve_are_refused(points: list[tuple[float, float]]) -> None:
    """Two finite points of rising x are the least."""
    with pytest.raises(ValueError, match="curve"):
        Curve.through(points)


def test_before_its_first_point_a_curve_comes_from_zero_or_goes_on_straight() -> None:
    """Time starts at 0; bytes may not, for a state of fixed size is there from the first token."""
    points = [(1.0, 1.0), (2.0, 3.0)]
    assert Curve.through(points, from_zero=True)(0.5) == 0.5
    assert Curve.through(points)(0) == -1
    assert Curve.through(points)(4) == 7


def test_a_turning_point_is_the_top() -> None:
    """A published Phi that rises and falls is nowhere above its highest point."""
    bump = Curve.through([(0, 0), (1, 5), (2, 1), (3, 0.5)])
    assert not bump.rises
    assert max(bump(step / 100) for step in range(301)) == 5
