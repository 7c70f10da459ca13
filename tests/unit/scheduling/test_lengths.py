"""Distributions of incremental lengths, held against plain sampling."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduling.lengths import Lengths
from tests.unit.scheduling.cut_lengths import expect_above, expect_below, lengths_of, mean_above, mean_below

CASE_STUDY = Lengths.log_normal(9.90, 1.00, 128, 131_072)


def convex(tokens: float) -> float:
    return 0.4 + 4e-5 * tokens + 1e-10 * tokens**2


def drawn(mu: float, sigma: float, low: float, high: float, count: int, seed: int) -> list[float]:
    """A truncated log-normal by rejection, which knows nothing of cells."""
    chance, kept = random.Random(seed), list[float]()
    while len(kept) < count:
        if low <= (tokens := math.exp(chance.gauss(mu, sigma))) <= high:
            kept.append(tokens)
    return kept


def test_the_case_study_has_the_lengths_the_paper_reports() -> None:
    """Mean about 27K; beyond 19.4K tokens 49.6 % of the requests, of 45,046 tokens against 10,224."""
    assert CASE_STUDY.mean() == pytest.approx(27_486, rel=1e-3)
    assert CASE_STUDY.tail(19_400) == pytest.approx(0.496, abs=0.001)
    assert mean_above(CASE_STUDY, 19_400) == pytest.approx(45_046, rel=1e-3)
    assert mean_below(CASE_STUDY, 19_400) == pytest.approx(10_224, rel=1e-3)


@pytest.mark.parametrize(
    ("mu", "sigma", "low", "high"), [(9.9, 1.0, 128, 131_072), (7.0, 0.4, 10, 5000), (8.0, 2.0, 1, 1e6)]
)
def test_a_log_normal_agrees_with_its_samples(mu: float, sigma: float, low: float, high: float) -> None:
    """Tails, means on both sides of t, expectations and quantiles, each within three standard errors."""
    lengths, samples = Lengths.log_normal(mu, sigma, low, high), drawn(mu, sigma, low, high, 40_000, seed=5)
    for q in (0.1, 0.5, 0.9):
        t = lengths.quantile(q)
        above, below = [x for x in samples if x > t], [x for x in samples if x <= t]
        assert lengths.tail(t) == pytest.approx(1 - q)
        assert len(above) / len(samples) == pytest.approx(1 - q, abs=3 * math.sqrt(q * (1 - q) / len(samples)))
        for part, mean, expected in [
            (above, mean_above(lengths, t), expect_above(lengths, convex, t)),
            (below, mean_below(lengths, t), expect_below(lengths, convex, t)),
        ]:
            costs = [convex(x) for x in part]
            assert mean == pytest.approx(statistics.fmean(part), abs=3 * statistics.stdev(part) / math.sqrt(len(part)))
            assert expected == pytest.approx(
                statistics.fmean(costs), abs=3 * statistics.stdev(costs) / math.sqrt(len(costs))
            )


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), st.integers(0, 5001))
def test_exact_samples_are_answered_exactly(samples: list[int], t: int) -> None:
    """P(L > t) counts what is longer than t, and the parts on both sides of t add up to the whole."""
    lengths = lengths_of(samples)
    above, below = [x for x in samples if x > t], [x for x in samples if x <= t]
    assert lengths.tail(t) == pytest.approx(len(above) / len(samples))
    assert lengths.mean() == pytest.approx(statistics.fmean(samples))
    integral = lengths.integrated(convex)
    assert integral.above(t) == pytest.approx(sum(map(convex, above)) / len(samples))
    assert integral.below(t) == pytest.approx(sum(map(convex, below)) / len(samples))


@given(st.floats(0, 1), st.integers(0, 200_000))
def test_cutting_inside_a_cell_loses_no_request(q: float, t: int) -> None:
    """Shares, means and quantiles fit together at any t, on a cell's edge or inside it."""
    integral = CASE_STUDY.integrated(lambda tokens: tokens)
    assert integral.above(t) + integral.below(t) == pytest.approx(CASE_STUDY.mean())
    assert 1 - CASE_STUDY.tail(CASE_STUDY.quantile(q)) == pytest.approx(q, abs=1e-9)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), st.floats(0, 1))
def test_a_quantile_is_a_length_that_occurs(samples: list[int], q: float) -> None:
    """A uniform draw put through it is a draw from the distribution."""
    lengths = lengths_of(samples)
    found = lengths.quantile(q)
    assert found in samples
    assert 1 - lengths.tail(found) >= q - 1e-9


def test_nothing_beyond_the_longest_length() -> None:
    """Where no request is, there is no part of the whole."""
    lengths = lengths_of([10, 20])
    integral = lengths.integrated(convex)
    assert (lengths.tail(20), integral.above(20), integral.below(5)) == (0, 0, 0)
    assert (lengths.tail(9), lengths.tail(10), lengths.tail(19)) == (1, 0.5, 0.5)


@pytest.mark.parametrize(
    "cells",
    [[], [(1, 2, 0)], [(2, 1, 1)], [(1, 3, 1), (2, 4, 1)], [(-1, 2, 1)], [(1, 2, math.nan)], [(1, math.inf, 1)]],
)
def test_cells_that_make_no_distribution_are_refused(cells: list[tuple[float, float, float]]) -> None:
    """No weight, overlap, negative or endless lengths."""
    with pytest.raises(ValueError, match="lengths"):
        Lengths.weighted(cells)
