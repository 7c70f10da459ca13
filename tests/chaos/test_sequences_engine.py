"""Sequences of faults on a cluster that computes: the real engine on a tiny model."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos.sequence import Outcome, World
from tests.chaos.sequences import MARKS, hold, hold_together, sequences

FAMILY = "kimi_linear"
pytestmark = MARKS
_outcomes: list[Outcome] = []


@pytest.mark.parametrize(("seed", "seconds"), sequences(range(1, 7), range(101, 103)))
async def test_a_sequence_of_faults(
    world: World, seed: int, seconds: float, note: Callable[[dict[str, Any]], None]
) -> None:
    """Every answer is the reference's, every request ends, and everything is given back."""
    _outcomes.append(await hold(world, seed, seconds, note))


async def test_all_sequences_together(world: World) -> None:
    """Next to nothing failed that did not have to. Streams are over too soon here for faults to meet them for sure."""
    await hold_together(world, _outcomes, least_moves=0)
