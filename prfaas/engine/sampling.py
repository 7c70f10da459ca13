"""Drawing a token from logits, exactly repeatable: the draw depends on the logits, the sampling and the position alone.

The generator is counter-based, keyed by the request's seed and set to the position, so a sequence replayed on another
node draws the same tokens without any generator state being moved.
"""

import math

import numpy as np
import numpy.typing as npt

from prfaas.request import Sampling, Score

Logits = npt.NDArray[np.float32]

_KEY_MASK = (1 << 64) - 1


def draw(logits: Logits, sampling: Sampling, position: int) -> int:
    """The token id for absolute `position` (that of the drawn token itself). Equal logits go to the lowest id."""
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    # The maximum is taken off before the division, so that no temperature can overflow.
    weights = np.exp((logits.astype(np.float64) - float(logits.max())) / sampling.temperature)
    order = np.argsort(-weights, kind="stable")
    mass = np.cumsum(weights[order])
    # The nucleus: the fewest best tokens that hold `top_p` of the mass, at least one.
    kept = mass[: int(np.searchsorted(mass, sampling.top_p * mass[-1])) + 1]
    point = _uniform(sampling.seed, position) * kept[-1]
    return int(order[min(int(np.searchsorted(kept, point, side="right")), len(kept) - 1)])


def best(logits: Logits, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` highest logits as (token id, logit), best first, equal ones by id."""
    candidates = np.argpartition(-logits, min(count, len(logits)) - 1)[:count]
    ranked = sorted((-float(logits[token]), int(token)) for token in candidates)
    return tuple((token, -negative) for negative, token in ranked)


def score(logits: Logits, token_id: int) -> Score:
    """Of a token under the model itself, as temperature 1 would draw it."""
    highest = float(logits.max())
    mass = float(np.exp(logits.astype(np.float64) - highest).sum())
    return Score(float(logits[token_id]), highest + math.log(mass))


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that belongs to this seed and position."""
    return float(np.random.Generator(np.random.Philox(key=seed & _KEY_MASK, counter=position)).random())
