"""Whether what arrives lately is another kind of traffic than before, or the same by chance.

Counts that fade mix the two for minutes after a change, and a plan that is made meanwhile suits neither. Two samples of
one distribution differ by no more than the bound of Kolmogorov and Smirnov, save once in `CHANCE`; where they differ by
more, what was before the change says nothing any more.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

#: One in so many comparisons of equal traffic finds a change. It costs only that what is known rests on less.
CHANCE = 1_000_000
_BOUND = math.sqrt(math.log(2 * CHANCE) / 2)


def difference(before: Sequence[float], after: Sequence[float]) -> float:
    """Of two counts over the same buckets, in units of what chance explains: above 1 they are not of one kind."""
    all_before, all_after = math.fsum(before), math.fsum(after)
    if not (all_before > 0 and all_after > 0):
        return 0.0
    steps = (one / all_before - other / all_after for one, other in zip(before, after, strict=True))
    apart = max(map(abs, accumulate(steps)))
    return apart / (_BOUND * math.sqrt(1 / all_before + 1 / all_after))
