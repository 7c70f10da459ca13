"""Traffic of another kind is told from the same traffic by chance."""

import random

import pytest

from prfaas.scheduling.drift import difference
from prfaas.scheduling.histogram import SLICE_REQUESTS, LengthHistogram
from prfaas.scheduling.lengths import Lengths

USUAL = Lengths.log_normal(9.90, 1.0, 128, 131_072)
LONGER = Lengths.log_normal(10.60, 1.0, 256, 262_144)


def arrived(histogram: LengthHistogram, lengths: Lengths, count: int, per_s: float, start_s: float, seed: int) -> float:
    """When the last of them came."""
    chance = random.Random(seed)
    for number in range(count):
        histogram.observe(round(lengths.quantile(chance.random())), start_s + number / per_s)
    histogram.check()
    return start_s + count / per_s


def mean_tokens(histogram: LengthHistogram, now_s: float) -> float:
    found = histogram.counts(now_s).lengths(1.0)
    assert isinstance(found, Lengths)
    return found.mean()


def test_few_requests_show_nothing():
    """A handful may all be long by chance; nothing is no traffic."""
    assert difference([5.0, 0.0], [0.0, 5.0]) < 1 < difference([500.0, 0.0], [0.0, 500.0])
    assert difference([0.0, 0.0], [0.0, 500.0]) == difference([500.0, 0.0], [0.0, 0.0]) == 0


@pytest.mark.parametrize("per_s", [1.5, 50.0])
def test_what_was_before_a_change_is_forgotten(per_s: float):
    """After some hundred requests of twice the length what counts is these, however many there were before."""
    histogram = LengthHistogram(300.0)
    changed_s = arrived(histogram, USUAL, max(1000, int(600 * per_s)), per_s, 0.0, seed=1)
    now_s = arrived(histogram, LONGER, max(8 * SLICE_REQUESTS, int(60 * per_s)), per_s, changed_s, seed=2)
    assert mean_tokens(histogram, now_s) == pytest.approx(LONGER.mean(), rel=0.15)
    assert histogram.counts(now_s).total <= 1.5 * per_s * (now_s - changed_s)


@pytest.mark.parametrize("seed", range(2))
def test_the_same_traffic_goes_on(seed: int):
    """Hours of it are never taken for a change."""
    histogram = LengthHistogram(300.0)
    now_s = arrived(histogram, USUAL, 10_000, 2.0, 0.0, seed)
    steady = 2.0 * 300.0 / 0.6931
    assert histogram.counts(now_s).total == pytest.approx(steady, rel=0.05)
