"""The fourth share of the seeded fault runs: `test_fault_runs_first` says what they are."""

import pytest

from tests.simulation.fault_runs import seeds_of, survive


@pytest.mark.parametrize("first", seeds_of(3))
def test_nothing_breaks_and_all_heals(first):
    """No token wrong, lost or repeated, nothing held twice or left, epochs only rise; healed, everything ends."""
    survive(first)
