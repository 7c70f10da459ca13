"""What arrives: rates, burstiness, lengths, and the same requests for everybody who asks with the same seed."""

import itertools
import math
import statistics

import pytest

from prfaas.sim.workload import (
    Arrivals,
    Change,
    Diurnal,
    Fixed,
    LogNormal,
    Workload,
    arrival_times,
    drawn,
    stream,
)

CONTEXT = 1 << 18


def times(arrivals: Arrivals, until: float, seed: int = 1) -> list[float]:
    return list(itertools.takewhile(lambda at: at < until, arrival_times(arrivals, stream(seed, "gaps"))))


def within(found: list[float], start: float, end: float) -> int:
    return sum(start <= at < end for at in found)


def test_poisson_arrivals_have_their_rate_and_scatter():
    """Mean and variation of the gaps."""
    found = times(Arrivals(rate_per_s=2.0), 10_000.0)
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert len(found) == pytest.approx(20_000, rel=0.03)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(1.0, abs=0.05)


def test_bursty_arrivals_have_the_same_rate_and_more_scatter():
    """cv 4: the same number in the end, in clusters."""
    found = times(Arrivals(rate_per_s=2.0, cv=4.0), 40_000.0)
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert len(found) == pytest.approx(80_000, rel=0.06)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(4.0, rel=0.1)


def test_a_day_swings_around_its_mean():
    """More in the first half of the period than in the second, by as much as the amplitude says."""
    found = times(Arrivals(rate_per_s=5.0, diurnal=Diurnal(amplitude=0.5, period_s=7200.0)), 7200.0)
    first, second = within(found, 0, 3600), within(found, 3600, 7200)
    assert len(found) == pytest.approx(36_000, rel=0.03)
    assert first / second == pytest.approx((1 + 1 / math.pi) / (1 - 1 / math.pi), rel=0.05)


def test_a_burst_is_as_high_and_as_long_as_it_says():
    """Five times as many for a minute, and nothing else changes."""
    burst = Change(at_s=1000.0, factor=5.0, for_s=60.0)
    found = times(Arrivals(rate_per_s=10.0, changes=(burst,)), 2000.0)
    assert within(found, 1000, 1060) == pytest.approx(3000, rel=0.1)
    assert within(found, 1060, 2000) == pytest.approx(9400, rel=0.05)
    # Up to the burst the very same arrivals as without it.
    calm = times(Arrivals(rate_per_s=10.0), 2000.0)
    assert [at for at in found if at < 1000] == [at for at in calm if at < 1000]


def test_the_case_studys_lengths():
    """Cut at both ends, with a mean of about 27K."""
    chance = stream(1, "prompts")
    lengths = [LogNormal().draw(chance) for _ in range(20_000)]
    assert min(lengths) >= 128 and max(lengths) <= 131072
    assert statistics.mean(lengths) == pytest.approx(27_300, rel=0.03)
    assert statistics.median(lengths) == pytest.approx(math.exp(9.90), rel=0.05)


def test_common_random_numbers():
    """The k-th request has the same lengths at any rate, and twice the rate is half the time."""
    slow = Workload(arrivals=Arrivals(rate_per_s=1.0), outputs=LogNormal(mu=6.0))
    fast = Workload(arrivals=Arrivals(rate_per_s=2.0), outputs=LogNormal(mu=6.0))
    pairs = itertools.islice(zip(drawn(slow, 7, CONTEXT), drawn(fast, 7, CONTEXT), strict=False), 200)
    for one, other in pairs:
        assert one[1:] == other[1:]
        assert one.at_s == pytest.approx(2 * other.at_s)
    first = list(itertools.islice(drawn(slow, 7, CONTEXT), 20))
    assert first == list(itertools.islice(drawn(slow, 7, CONTEXT), 20))
    assert first != list(itertools.islice(drawn(slow, 8, CONTEXT), 20))


def test_a_mirrored_run_has_the_opposite_lengths_at_its_own_times():
    """Together a pair is closer to the distribution than two runs that know nothing of each other."""
    plain = Workload(arrivals=Arrivals(rate_per_s=1.0))
    mirrored = Workload(arrivals=Arrivals(rate_per_s=1.0), mirrors=1)
    ones = list(itertools.islice(drawn(plain, 1, CONTEXT), 4000))
    others = list(itertools.islice(drawn(mirrored, 2, CONTEXT), 4000))
    independent = list(itertools.islice(drawn(plain, 2, CONTEXT), 4000))
    assert [each.at_s for each in others] == [each.at_s for each in independent]
    median = statistics.median(each.prompt_tokens for each in ones)
    split = [
        (one.prompt_tokens > median) + (other.prompt_tokens > median) for one, other in zip(ones, others, strict=True)
    ]
    assert sum(count == 1 for count in split) > 3900
    exact, half = 27_330, len(ones) // 8
    off = {
        name: sum(
            abs(statistics.mean(a.prompt_tokens + b.prompt_tokens for a, b in pairs[start : start + half]) / 2 - exact)
            for start in range(0, len(ones), half)
        )
        for name, pairs in (
            ("mirrored", list(zip(ones, others, strict=True))),
            ("independent", list(zip(ones, independent, strict=True))),
        )
    }
    assert off["mirrored"] < 0.8 * off["independent"]


def test_lengths_double_from_one_moment_on():
    """Within the context."""
    doubled = Change(at_s=100.0, factor=2.0)
    workload = Workload(arrivals=Arrivals(rate_per_s=1.0), prompts=Fixed(tokens=1000), length_changes=(doubled,))
    for arrival in itertools.takewhile(lambda each: each.at_s < 200, drawn(workload, 1, CONTEXT)):
        assert arrival.prompt_tokens == (1000 if arrival.at_s < 100 else 2000)
    assert next(drawn(workload, 1, 1100)).prompt_tokens == 1100 - 1024
