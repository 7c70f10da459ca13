"""Lengths out of samples, and what is expected of them on either side of a threshold."""

from collections import Counter
from collections.abc import Callable, Iterable

from prfaas.scheduling.lengths import Lengths


def lengths_of(samples: Iterable[int]) -> Lengths:
    """Exactly these lengths, each as often as it occurs."""
    return Lengths.weighted((tokens, tokens, count) for tokens, count in sorted(Counter(samples).items()))


def expect_above(lengths: Lengths, function: Callable[[float], float], tokens: float) -> float:
    """E[f(L) | L > t]."""
    return lengths.integrated(function).above(tokens) / lengths.tail(tokens)


def expect_below(lengths: Lengths, function: Callable[[float], float], tokens: float) -> float:
    """E[f(L) | L <= t]."""
    return lengths.integrated(function).below(tokens) / (1 - lengths.tail(tokens))


def mean_above(lengths: Lengths, tokens: float) -> float:
    """E[L | L > t], the paper's l_long."""
    return expect_above(lengths, lambda length: length, tokens)


def mean_below(lengths: Lengths, tokens: float) -> float:
    """E[L | L <= t], the paper's l_short."""
    return expect_below(lengths, lambda length: length, tokens)
