"""What is broken in a sequence, drawn from a seed: the same seed, the same faults. Pure.

Nothing is spared for the sake of the load: all nodes of a kind may be away at once, and then requests fail, with an
error that says so. What each process and thing suffers comes one after the other; different ones suffer together.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    #: SIGKILL; started again when the fault ends.
    KILL = "kill"
    #: SIGSTOP, and SIGCONT at the end: nobody is told of either.
    FREEZE = "freeze"
    #: The line between the regions carries nothing.
    CUT = "cut"
    #: It carries a hundredth.
    SLOW = "slow"
    #: The store is killed, and comes back with what it had on its disk.
    STORE = "store"
    #: A worker takes nothing new.
    DRAIN = "drain"
    #: A PD node has another role.
    FLIP = "flip"


LINE, STORE = "line", "store"
#: How often each comes, in parts of all, and how long it lasts at least and at most.
SHARES = {
    Kind.KILL: 8,
    Kind.FREEZE: 5,
    Kind.CUT: 2,
    Kind.SLOW: 2,
    Kind.STORE: 2,
    Kind.DRAIN: 2,
    Kind.FLIP: 2,
}
LASTS_S = {
    Kind.KILL: (0.0, 3.0),
    Kind.FREEZE: (0.2, 8.0),
    Kind.CUT: (1.0, 8.0),
    Kind.SLOW: (2.0, 8.0),
    Kind.STORE: (1.0, 8.0),
    Kind.DRAIN: (1.0, 6.0),
    Kind.FLIP: (2.0, 6.0),
}
#: Between two of them.
MEAN_GAP_S, LEAST_GAP_S = 1.6, 0.2


@dataclass(frozen=True, slots=True)
class Fault:
    """Of which thing, when in the sequence, and for how long. `role` is what a flip makes of its node."""

    at_s: float
    kind: Kind
    target: str
    lasts_s: float
    role: str = ""

    def __str__(self) -> str:
        what = " ".join(part for part in (self.kind.value, self.target, self.role) if part)
        return f"{self.at_s:6.2f} s: {what} for {self.lasts_s:.2f} s"


def draw(seed: int, seconds: float, processes: Sequence[str], spared: Sequence[str] = ()) -> list[Fault]:
    """In order of time; all are over when the sequence is. `spared` are never killed, but all else comes to them."""
    return list(_drawn(random.Random(seed), seconds, processes, spared))


def _drawn(dice: random.Random, seconds: float, processes: Sequence[str], spared: Sequence[str]) -> Iterator[Fault]:
    targets = _targets(processes, spared)
    kinds = [kind for kind in Kind if targets[kind]]
    free_s, at_s = dict[str, float](), 0.0
    while True:
        at_s += LEAST_GAP_S + dice.expovariate(1 / (MEAN_GAP_S - LEAST_GAP_S))
        if at_s + 1 > seconds:
            return
        [kind] = dice.choices(kinds, [SHARES[kind] for kind in kinds])
        target, role = dice.choice(targets[kind]), dice.choice(("prefill", "decode"))
        lasts_s = min(dice.uniform(*LASTS_S[kind]), seconds - at_s)
        if free_s.get(target, 0.0) <= at_s:
            free_s[target] = at_s + lasts_s
            yield Fault(at_s, kind, target, lasts_s, role if kind is Kind.FLIP else "")


def _targets(processes: Sequence[str], spared: Sequence[str]) -> dict[Kind, list[str]]:
    names = [name for name in processes if name != "wan-relay"]
    workers = [name for name in names if name.startswith(("prefill", "decode"))]
    return {
        Kind.KILL: [name for name in names if name not in spared],
        Kind.FREEZE: names,
        Kind.CUT: [LINE],
        Kind.SLOW: [LINE],
        Kind.STORE: [STORE],
        Kind.DRAIN: workers,
        Kind.FLIP: [name for name in workers if name.startswith("decode")],
    }
