"""Drawing tokens: a function of logits, settings and position, and of nothing else."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.engine.sampling import Logits, best, draw, score
from prfaas.request import Sampling

#: Multiples of 1/8: sums and differences of these are exact.
EIGHTHS = st.integers(-64, 64).map(lambda value: value / 8)
LOGITS = st.lists(EIGHTHS, min_size=1, max_size=40).map(lambda values: np.array(values, np.float32))
SEEDS = st.integers(-(2**63), 2**64 - 1)
POSITIONS = st.integers(0, 2**31)


def sampled(temperature: float = 1.0, top_p: float = 1.0, seed: int = 0) -> Sampling:
    return Sampling(max_tokens=1, temperature=temperature, top_p=top_p, seed=seed)


def softmax(logits: Logits, temperature: float) -> np.ndarray:
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return weights / weights.sum()


@given(LOGITS, SEEDS, POSITIONS)
def test_greedy_takes_the_lowest_id_among_the_best(logits: Logits, seed: int, position: int) -> None:
    """At temperature 0 neither seed nor position matters, and a tie has one answer on every node."""
    expected = min(token for token, logit in enumerate(logits) if logit == logits.max())
    assert draw(logits, sampled(temperature=0.0, seed=seed), position) == expected


@given(LOGITS, SEEDS, POSITIONS, st.sampled_from([0.1, 0.7, 1.0, 2.0]), st.sampled_from([0.1, 0.5, 0.9, 1.0]))
def test_a_draw_comes_from_the_nucleus(logits: Logits, seed: int, position: int, temperature: float, top_p: float):
    """Better tokens than the one drawn hold less than `top_p` of the mass."""
    token = draw(logits, sampled(temperature, top_p, seed), position)
    better = softmax(logits, temperature)[logits > logits[token]].sum()
    assert better < top_p


@given(LOGITS, SEEDS, POSITIONS, EIGHTHS)
def test_only_differences_of_logits_matter(logits: Logits, seed: int, position: int, offset: float) -> None:
    """Adding one number to all logits changes no draw."""
    settings = sampled(0.5, 0.9, seed)
    assert draw(logits + np.float32(offset), settings, position) == draw(logits, settings, position)


@given(LOGITS, SEEDS, st.lists(POSITIONS, min_size=1, max_size=8))
def test_a_draw_does_not_depend_on_earlier_draws(logits: Logits, seed: int, positions: list[int]) -> None:
    """There is no generator state to lose: positions drawn in any order, or alone, give the same tokens."""
    settings = sampled(1.5, seed=seed)
    forward = {position: draw(logits, settings, position) for position in positions}
    assert forward == {position: draw(logits, settings, position) for position in reversed(positions)}


@given(LOGITS, SEEDS, POSITIONS)
def test_no_temperature_is_too_low(logits: Logits, seed: int, position: int) -> None:
    """A temperature that would overflow a quotient takes one of the best tokens."""
    assert logits[draw(logits, sampled(1e-300, seed=seed), position)] == logits.max()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_over_positions_follow_the_distribution(temperature: float) -> None:
    """The positions of one seed are independent draws: frequencies come out within five standard deviations."""
    logits, draws = np.array([2.0, 1.0, 0.0, -1.0, 1.0], np.float32), 4000
    counts = Counter(draw(logits, sampled(temperature, seed=5), position) for position in range(draws))
    for token, share in enumerate(softmax(logits, temperature)):
        assert abs(counts[token] - draws * share) < 5 * (draws * share * (1 - share)) ** 0.5


def test_seeds_and_positions_give_different_draws() -> None:
    """Neither two requests nor two positions of one share their luck."""
    flat = np.zeros(1 << 16, np.float32)
    assert len({draw(flat, sampled(seed=seed), 7) for seed in range(50)}) > 45
    assert len({draw(flat, sampled(seed=7), position) for position in range(50)}) > 45


def test_draws_are_pinned() -> None:
    """A stream may be replayed by a newer release: the numbers themselves are part of the contract."""
    logits = np.linspace(-2, 2, 512, dtype=np.float32)
    drawn = [draw(logits, sampled(0.9, 0.95, seed=42), position) for position in range(6)]
    assert drawn == [342, 463, 312, 504, 211, 237]


@given(LOGITS, st.integers(1, 8))
def test_the_best_are_listed_in_order(logits: Logits, count: int) -> None:
    """Highest first, equal ones by id, as many as there are."""
    listed = best(logits, count)
    assert [logit for _, logit in listed] == sorted(logits.tolist(), reverse=True)[:count]
    assert list(listed) == sorted(listed, key=lambda pair: (-pair[1], pair[0]))
    assert all(logits[token] == logit for token, logit in listed)


@given(st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=50))
def test_scores_are_probabilities(values: list[float]) -> None:
    """Over all tokens they sum to one, whatever the logits; far apart ones overflow nothing."""
    logits = np.array(values, np.float32)
    scores = [score(logits, token_id) for token_id in range(len(values))]
    assert sum(math.exp(each.logit - each.log_normaliser) for each in scores) == pytest.approx(1.0)
    assert [each.logit for each in scores] == logits.tolist()
    shifted = score(logits + np.float32(8192), 0)
    assert math.isfinite(shifted.log_normaliser)
