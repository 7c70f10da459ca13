"""Numbers that came from elsewhere. What is not a number, infinite or below 0 is not known: it counts as missing."""

import math


def known(value: float | None) -> float | None:
    """The value, or None where it says nothing."""
    return value if value is not None and 0 <= value < math.inf else None


def is_known(value: float | None) -> bool:
    return known(value) is not None
