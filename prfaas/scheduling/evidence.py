"""Too little has been seen to decide: a state of its own, which is neither a value nor silence."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InsufficientData:
    """`have` of the `needed` amount of `what`. Whoever gets it keeps what is in force."""

    what: str
    have: float
    needed: float
