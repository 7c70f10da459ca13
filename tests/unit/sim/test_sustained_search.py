"""The search for the highest rate with a bounded backlog, on a queue that is a formula."""

import math

import pytest

from prfaas.sim.sustained import GROWTH, PRECISION, Probe, search

CAPACITY_PER_S = 3.0


def queue(rate_per_s: float, softness: float = 0.004, failed: int = 0) -> Probe:
    """What is beyond the capacity stays behind; close to it a little does already, as in a run of finite length."""
    soft = softness * CAPACITY_PER_S
    beyond = rate_per_s - CAPACITY_PER_S
    growth = max(0.0, beyond) + soft * math.log1p(math.exp(-abs(beyond) / soft))
    return Probe(rate_per_s, rate_per_s, growth, (rate_per_s - growth,), failed)


@pytest.mark.parametrize("guess", [0.5, 0.9, 0.98, 0.995, 1.0, 1.005, 1.01, 1.02, 1.1, 2.0])
@pytest.mark.parametrize("softness", [0.0005, 0.002, 0.004])
def test_the_answer_is_where_growth_becomes_too_much(guess, softness):
    """To a tenth of the tolerance for growth, wherever the search begins."""
    found = search(lambda rate: queue(rate, softness), guess * CAPACITY_PER_S)
    at = queue(found.rate_per_s, softness)
    assert at.growth_per_s == pytest.approx(GROWTH * found.rate_per_s, abs=0.1 * GROWTH * CAPACITY_PER_S)
    bounded = max(probe.rate_per_s for probe in found.probes if probe.bounded)
    grows = min(probe.rate_per_s for probe in found.probes if not probe.bounded)
    assert bounded <= found.rate_per_s <= grows <= bounded * (1 + PRECISION)


@pytest.mark.parametrize("guess", [0.995, 1.0, 1.005, 1.01, 1.02])
def test_a_good_guess_costs_two_looks(guess):
    """Each is hours of simulation. Three where the guess is a per cent off."""
    found = search(queue, guess * CAPACITY_PER_S)
    assert len(found.probes) <= 3
    assert guess not in (1.0, 1.005) or len(found.probes) == 2


def test_requests_that_fail_are_not_sustained():
    """However short the backlog: it may be short because they fail."""

    def refusing(rate: float) -> Probe:
        return queue(rate, failed=int(rate > 2.0))

    found = search(refusing, 3.0)
    assert found.rate_per_s == pytest.approx(2.0, rel=PRECISION)


def test_a_search_without_an_end_is_an_error():
    """A cluster that cannot be overloaded is not what was asked about."""
    with pytest.raises(AssertionError, match="no end to the search"):
        search(lambda rate: Probe(rate, rate, 0.0, (rate,), 0), 1.0)


def test_the_error_is_that_of_pairs_of_seeds():
    """One pair has none that could be known."""

    def seen(rate: float) -> Probe:
        one = queue(rate)
        return Probe(rate, rate, one.growth_per_s, (2.9, 3.1), 0)

    assert search(queue, 3.0).error_per_s == 0.0
    assert search(seen, 3.0).error_per_s == pytest.approx(0.1)
