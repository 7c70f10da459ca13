"""Random faults on live processes, under load: nothing wrong, nothing hung, errors that say what they are, and
afterwards a cluster as it was before.

Each file of tests has one cluster, so that they stand beside each other, each in a process of its own. A failure prints
its seed and its faults; `make chaos SEEDS=7` plays them again. What is done to the cluster, and when, is the same each
time; what happens in between is up to the machine.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from tests.chaos.load import needless
from tests.chaos.sequence import Outcome, World, leases_expire, run

SHORT_S, LONG_S = 20.0, 120.0
SEEDS = [int(seed) for seed in os.environ.get("CHAOS_SEEDS", "").split()]
SECONDS = float(os.environ.get("CHAOS_SECONDS") or SHORT_S)
#: From so many sequences on it is said what must have come of all of them.
MANY = 6
#: Of all requests, what may fail though no fault explains it: when it is asked once, and when it is asked again.
NEEDLESS, NEEDLESS_AGAIN = 0.02, 0.005

MARKS = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


def sequences(short: Iterable[int], long: Iterable[int]) -> list[Any]:
    """Parameters `seed` and `seconds` of a file's tests: `short` is for `make test`, too."""
    asked = [(seed, SECONDS) for seed in SEEDS] or [(seed, SHORT_S) for seed in short] + [(s, LONG_S) for s in long]
    return [
        pytest.param(
            seed, seconds, marks=[pytest.mark.soak] if SEEDS or seconds != SHORT_S else [], id=f"{seed}-{seconds:g}s"
        )
        for seed, seconds in asked
    ]


async def hold(world: World, seed: int, seconds: float, note: Callable[[dict[str, Any]], None]) -> Outcome:
    """Every answer is the reference's, every request ends, and everything is given back."""
    outcome = await run(world, seed, seconds)
    note(outcome.figures())
    assert not outcome.broken, outcome.told()
    assert outcome.tally.right > 0 and outcome.done.total() > 0
    return outcome


async def hold_together(world: World, outcomes: Sequence[Outcome], least_moves: int) -> None:
    """Nothing is left in the store, so many streams have gone on elsewhere, prompts were prefilled in the other region,
    and next to nothing failed that did not have to."""
    await leases_expire(world)
    if len(outcomes) < MANY:
        pytest.skip(f"after {len(outcomes)} sequences there is nothing to say of many")
    tallies = [outcome.tally for outcome in outcomes]
    sent = sum(tally.sent for tally in tallies)
    assert sum(tally.moves for tally in tallies) >= least_moves
    assert sum(tally.remote for tally in tallies) > 0
    assert sum(outcome.needless for outcome in outcomes) <= NEEDLESS * sent
    assert sum(len(needless(tally.failed)) for tally in tallies) <= NEEDLESS_AGAIN * sent
