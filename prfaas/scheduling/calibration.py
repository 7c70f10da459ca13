"""T_prefill and the decode step as they are, learned from what nodes report, one calibration per model and hardware.

The profile in force before is the prior: observations correct it where they are, and it keeps the shape where they are
not. Recent observations count more, by their number and not by time, so that an idle hour changes nothing. A node is
cold when it is new or has changed its role, and its first observations are not used: kernels compile, caches fill.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from prfaas.cluster import NodeId
from prfaas.curve import Curve
from prfaas.profile import DecodeProfile
from prfaas.scheduling.evidence import InsufficientData
from prfaas.scheduling.robust import Anchor, RobustFit, Vector, robust_fit, weighted_median

#: Observations kept, and the number of newer ones after which one counts half. Followed drift is about as old as that.
WINDOW, HALF_LIFE = 256, 48
#: Observations of a cold node that are not used.
COLD_OBSERVATIONS = 3
#: Fewer than this say nothing: a third of them may be outliers.
NEEDED = 16
#: The prior counts as much as so many observations at each of its points: too little to bend what is observed.
ANCHOR_WEIGHT = 0.05
#: A calibrated curve has a point at each doubling up to this length, so that its quadratic part stays one.
LONGEST_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class PrefillObservation:
    """`seconds` of computing `total_tokens - cached_tokens`, without waiting in a queue."""

    total_tokens: int
    cached_tokens: int
    seconds: float

    @property
    def plausible(self) -> bool:
        return 0 <= self.cached_tokens < self.total_tokens and 0 < self.seconds < math.inf


@dataclass(frozen=True, slots=True)
class StepObservation:
    """A decode step, or the mean of several: as a step's time is linear in its batch, theirs is in the mean batch."""

    batch: float
    seconds: float

    @property
    def plausible(self) -> bool:
        return self.batch >= 1 and 0 < self.seconds < math.inf


@dataclass(frozen=True, slots=True)
class CalibratedPrefill:
    """`masked_share` of the observations was taken for outliers: near one half, trust nothing."""

    curve: Curve
    observations: int
    masked_share: float


@dataclass(frozen=True, slots=True)
class CalibratedDecode:
    decode: DecodeProfile
    observations: int
    masked_share: float


Observation = TypeVar("Observation", PrefillObservation, StepObservation)


class _WarmWindow(Generic[Observation]):
    """The last observations of warm nodes."""

    def __init__(self) -> None:
        self._kept: deque[Observation] = deque(maxlen=WINDOW)
        self._cold: dict[NodeId, int] = {}

    def started(self, node: NodeId) -> None:
        """The node is new, has restarted or has changed its role."""
        self._cold[node] = COLD_OBSERVATIONS

    def left(self, node: NodeId) -> None:
        self._cold.pop(node, None)

    def observe(self, node: NodeId, observation: Observation) -> None:
        """A node never heard of is cold. What cannot be true is dropped, and does not warm a node up."""
        if not observation.plausible:
            return
        cold = self._cold.setdefault(node, COLD_OBSERVATIONS)
        if cold > 0:
            self._cold[node] = cold - 1
        else:
            self._kept.append(observation)

    def check(self) -> None:
        """What is kept can be fitted, and no node gets colder than a new one."""
        assert all(observation.plausible for observation in self._kept)
        assert all(0 <= cold <= COLD_OBSERVATIONS for cold in self._cold.values())

    def weights(self) -> Vector:
        return np.exp2(-np.arange(len(self._kept))[::-1] / HALF_LIFE)


class PrefillCalibration(_WarmWindow[PrefillObservation]):
    """T(l) = c0 * [prior] + c1 * [a start-up cost] + c2 * l + c3 * l^2, no term negative: T rises from 0."""

    def __init__(self, prior: Curve) -> None:
        super().__init__()
        assert prior.from_zero and prior.rises and prior.ys[0] > 0, "a prefill curve"
        self._prior = prior

    def fit(self) -> CalibratedPrefill | InsufficientData:
        if len(self._kept) < NEEDED:
            return InsufficientData("prefill observations", len(self._kept), NEEDED)
        features = np.array([self._between(seen.cached_tokens, seen.total_tokens) for seen in self._kept])
        seconds = np.array([seen.seconds for seen in self._kept])
        anchors = np.array([self._features(tokens) for tokens in self._prior.xs])
        found = _fit_near(features, seconds, self.weights(), anchors)
        curve = Curve.through(
            ((x, float(self._features(x) @ found.coefficients)) for x in self._points()), from_zero=True
        )
        return CalibratedPrefill(curve, len(self._kept), found.masked_share)

    def _features(self, tokens: float) -> Vector:
        """The prior first. The start-up cost grows with the first tokens, as in every curve that comes from zero."""
        return np.array([self._prior(tokens), min(1.0, tokens / self._prior.xs[0]), tokens, tokens**2])

    def _between(self, cached_tokens: float, total_tokens: float) -> Vector:
        """T(total) - T(cached), term by term."""
        return self._features(total_tokens) - self._features(cached_tokens)

    def _points(self) -> list[float]:
        first = self._prior.xs[0]
        doublings = (first * 2.0**step for step in range(1, max(1, int(math.log2(LONGEST_TOKENS / first))) + 1))
        return sorted({*self._prior.xs, *doublings})


class DecodeCalibration(_WarmWindow[StepObservation]):
    """Step time = base + per_sequence * batch, neither negative. How many sequences memory holds is not learned."""

    def __init__(self, prior: DecodeProfile) -> None:
        super().__init__()
        self._prior = prior

    def fit(self) -> CalibratedDecode | InsufficientData:
        if len(self._kept) < NEEDED:
            return InsufficientData("decode observations", len(self._kept), NEEDED)
        features = np.array([self._features(seen.batch) for seen in self._kept])
        seconds = np.array([seen.seconds for seen in self._kept])
        anchors = np.array([self._features(batch) for batch in (1, self._prior.max_batch)])
        found = _fit_near(features, seconds, self.weights(), anchors)
        base, per_sequence = (float(found.coefficients @ part) for part in self._parts())
        decode = DecodeProfile(base, per_sequence, self._prior.max_batch)
        return CalibratedDecode(decode, len(self._kept), found.masked_share)

    def _features(self, batch: float) -> Vector:
        return np.array([self._prior.step_s(batch), 1.0, float(batch)])

    def _parts(self) -> tuple[Vector, Vector]:
        """What each feature adds to the base and to each sequence."""
        return np.array([self._prior.base_s, 1.0, 0.0]), np.array([self._prior.per_sequence_s, 0.0, 1.0])


def _fit_near(features: Vector, seconds: Vector, weights: Vector, anchors: Vector) -> RobustFit:
    """The first feature is the prior. The fit starts from the prior at the speed of most observations, so that the
    shape is known before the first outlier is judged."""
    prior = features[:, 0]
    speed = weighted_median(seconds / prior, weights)
    anchor = Anchor(anchors, speed * anchors[:, 0], ANCHOR_WEIGHT)
    return robust_fit(features, seconds, weights, speed * prior, anchor)
