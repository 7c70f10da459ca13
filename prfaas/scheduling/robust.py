"""Least squares that a few wild observations cannot pull away: relative errors, Tukey's weights, no negative terms.

Every model here is a sum of features that rise with the amount of work, so coefficients that are not negative make a
prediction that never falls and is never below zero.
"""

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

#: Enough for the weights to settle.
ROUNDS = 12
#: Errors beyond so many times the typical one count nothing (95 % efficient when all errors are normal).
TUKEY = 4.685
#: Median absolute error to standard deviation.
MAD_TO_SIGMA = 1.4826
#: Errors are relative to the prediction, so it stays above this part of the first one.
LEAST_OF_START = 0.01
#: Observations that agree better than this are not told apart.
FINEST_ERROR = 0.005


@dataclass(frozen=True, slots=True)
class Anchor:
    """What is believed where nothing was observed: it decides the shape that observations leave open."""

    features: Matrix
    expected: Vector
    weight: float


@dataclass(frozen=True, slots=True)
class RobustFit:
    """`masked_share` of the observations, by weight, was taken for outliers."""

    coefficients: Vector
    masked_share: float


def robust_fit(features: Matrix, observed: Vector, weights: Vector, start: Vector, anchor: Anchor) -> RobustFit:
    """Coefficients, none negative, of `features @ coefficients ~ observed`, from the prediction `start` on.

    Errors are relative, because a second more is much for a short prompt and little for a long one.
    """
    predicted, coefficients, kept = start, np.zeros(features.shape[1]), weights
    anchor_rows = anchor.features / anchor.expected[:, None]
    for _ in range(ROUNDS):
        ratio = observed / predicted
        typical = max(FINEST_ERROR, MAD_TO_SIGMA * weighted_median(np.abs(ratio - 1), weights))
        kept = weights * np.clip(1 - ((ratio - 1) / (TUKEY * typical)) ** 2, 0, None) ** 2
        rows = np.vstack([features / predicted[:, None], anchor_rows])
        targets = np.concatenate([ratio, np.ones(len(anchor_rows))])
        strengths = np.concatenate([kept, np.full(len(anchor_rows), anchor.weight)])
        coefficients = _least_squares_above_zero(rows, targets, strengths)
        predicted = np.maximum(features @ coefficients, start * LEAST_OF_START)
    return RobustFit(coefficients, float(1 - weights[kept > 0].sum() / weights.sum()))


def weighted_median(values: Vector, weights: Vector) -> float:
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])


def _least_squares_above_zero(rows: Matrix, targets: Vector, weights: Vector) -> Vector:
    """The best over all choices of the terms that are used: with at most four of them, trying all is exact and short.

    A choice whose own best has a negative term is left out; the optimum is the best of some choice that has none.
    """
    scale = np.sqrt(np.einsum("ij,i->j", rows**2, weights))
    scaled = rows / scale
    gram, moment = scaled.T @ (scaled * weights[:, None]), scaled.T @ (targets * weights)
    best: Vector = np.zeros(rows.shape[1])
    best_gain = 0.0
    for used in _choices(rows.shape[1]):
        solved, *_ = np.linalg.lstsq(gram[np.ix_(used, used)], moment[used], rcond=None)
        gain = float(moment[used] @ solved)
        if solved.min() >= 0 and gain > best_gain:
            best, best_gain = np.zeros(rows.shape[1]), gain
            best[used] = solved
    unscaled: Vector = best / scale
    return unscaled


def _choices(terms: int) -> list[list[int]]:
    return [list(used) for size in range(1, terms + 1) for used in itertools.combinations(range(terms), size)]
