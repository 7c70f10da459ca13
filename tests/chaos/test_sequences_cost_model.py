"""Sequences of faults on a cluster whose engines take the time of the cost model, and little else."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos.sequence import Outcome, World
from tests.chaos.sequences import MARKS, hold, hold_together, sequences

FAMILY = "cost_model"
pytestmark = MARKS
_outcomes: list[Outcome] = []


@pytest.mark.parametrize(("seed", "seconds"), sequences(range(11, 18), range(111, 112)))
async def test_a_sequence_of_faults(
    world: World, seed: int, seconds: float, note: Callable[[dict[str, Any]], None]
) -> None:
    """Every answer is the reference's, every request ends, and everything is given back."""
    _outcomes.append(await hold(world, seed, seconds, note))


async def test_all_sequences_together(world: World) -> None:
    """Streams have gone on elsewhere, and next to nothing failed that did not have to."""
    await hold_together(world, _outcomes, least_moves=3)
