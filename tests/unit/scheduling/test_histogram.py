"""An online histogram of lengths that fades with time."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduling.evidence import InsufficientData
from prfaas.scheduling.histogram import BUCKETS, LengthCounts, LengthHistogram
from prfaas.scheduling.lengths import Lengths

HALF_LIFE_S = 60.0


def lengths_of(counts: LengthCounts) -> Lengths:
    found = counts.lengths(needed=1)
    assert isinstance(found, Lengths)
    return found


def test_what_was_counted_is_distributed_as_what_arrived() -> None:
    """Within the width of a bucket, 4.4 %."""
    truth, chance, histogram = Lengths.log_normal(9.9, 1, 128, 131_072), random.Random(3), LengthHistogram(1e9)
    for second in range(30_000):
        histogram.observe(round(truth.quantile(chance.random())), second)
    histogram.check()
    seen = lengths_of(histogram.counts(30_000))
    assert seen.mean() == pytest.approx(truth.mean(), rel=0.02)
    for q in (0.05, 0.5, 0.95):
        assert seen.quantile(q) == pytest.approx(truth.quantile(q), rel=0.045)


def test_the_past_fades_and_what_comes_now_takes_its_place() -> None:
    """One half-life on, an old request counts half as much as a new one."""
    histogram = LengthHistogram(HALF_LIFE_S)
    histogram.observe(100, 0.0)
    histogram.observe(10_000, HALF_LIFE_S)
    counts = histogram.counts(HALF_LIFE_S)
    assert counts.total == pytest.approx(1.5)
    assert lengths_of(counts).tail(1000) == pytest.approx(2 / 3)
    assert histogram.counts(3 * HALF_LIFE_S).total == pytest.approx(1.5 / 4)


@given(st.lists(st.tuples(st.integers(0, 1 << 24), st.floats(0, 1e6)), max_size=50), st.floats(0, 1e7))
def test_after_any_silence_counts_stay_numbers(arrivals: list[tuple[int, float]], later_s: float) -> None:
    """Times may jump ahead by years of half-lives or run a little back; nothing overflows or turns negative."""
    histogram = LengthHistogram(1.0)
    for tokens, now_s in arrivals:
        histogram.observe(tokens, now_s)
        histogram.check()
    counts = histogram.counts(1e6 + later_s)
    histogram.check()
    assert 0 <= counts.total <= len(arrivals) + 1e-9


def test_the_counts_of_all_routers_are_one_distribution() -> None:
    """What two routers saw, added up, is what one would have seen."""
    both, routers = LengthHistogram(HALF_LIFE_S), [LengthHistogram(HALF_LIFE_S), LengthHistogram(HALF_LIFE_S)]
    for second in range(40):
        for histogram in (both, routers[second % 2]):
            histogram.observe(100 + 97 * second, second)
    merged = LengthCounts.merged(router.counts(40) for router in routers)
    assert merged.counts == pytest.approx(both.counts(40).counts)
    assert LengthCounts.merged([]).total == 0


def test_field_K4_too_few_requests_are_not_a_distribution() -> None:
    """Nothing, too little, and nonsense from elsewhere are the same state: insufficient."""
    histogram = LengthHistogram(HALF_LIFE_S)
    assert histogram.counts(0).lengths(needed=1) == InsufficientData("requests", 0, 1)
    for _ in range(9):
        histogram.observe(500, 0)
    assert isinstance(histogram.counts(0).lengths(needed=10), InsufficientData)
    assert isinstance(histogram.counts(0).lengths(needed=9), Lengths)
    assert isinstance(histogram.counts(HALF_LIFE_S).lengths(needed=9), InsufficientData)
    assert isinstance(LengthCounts((float("nan"),) * BUCKETS).lengths(needed=1), InsufficientData)


def test_the_shortest_and_the_longest_are_counted_too() -> None:
    """A prompt that is all cached but one token, and one beyond two million."""
    histogram = LengthHistogram(HALF_LIFE_S)
    for tokens in (0, 1, 1 << 21, 1 << 30):
        histogram.observe(tokens, 0)
    lengths = lengths_of(histogram.counts(0))
    assert lengths.tail(1.05) == pytest.approx(0.5)
    assert lengths.longest_tokens == 1 << 21
