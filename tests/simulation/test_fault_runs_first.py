"""Clusters of everything under random faults, and the first share of these runs; each file has one, as a file's tests
run on one core.

`fault_world` says what is done, and what must hold. A failure names its seed and the command that repeats it.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from prfaas.flows.story import Ending, Moved
from prfaas.sim.fault_plan import Fault
from tests.simulation.fault_runs import FILES, RUNS, RUNS_OF_A_TEST, played, seeds_of, survive
from tests.simulation.fault_world import REQUESTS, faults_of


@pytest.mark.parametrize("first", seeds_of(0))
def test_nothing_breaks_and_all_heals(first):
    """No token wrong, lost or repeated, nothing held twice or left, epochs only rise; healed, everything ends."""
    survive(first)


def test_the_runs_are_as_many_as_they_should_be():
    """Two thousand, with a hundred thousand requests and five thousand faults, and each of them in a file."""
    seeds = [seed for file in range(FILES) for first in seeds_of(file) for seed in range(first, first + RUNS_OF_A_TEST)]
    assert seeds == list(range(RUNS)) and RUNS >= 2000
    assert RUNS * REQUESTS >= 100_000
    assert sum(faults_of(seed) for seed in seeds) >= 5000
    files = sorted(Path(__file__).parent.glob("test_fault_runs_*.py"))
    assert len(files) == FILES
    for file in range(FILES):
        assert sum(f"seeds_of({file})" in path.read_text() for path in files) >= 1, f"no file plays share {file}"


def test_the_faults_are_real():
    """Over some runs all kinds of faults occur, all endings of attempts and of migrations, and roles change."""
    totals = played(range(100))
    assert totals.faults == sum(map(faults_of, range(100)))
    assert totals.kinds.keys() == {kind.__name__ for kind in get_args(Fault)}
    assert totals.endings.keys() == set(Ending) - {Ending.RUNNING}
    assert totals.moves.keys() >= {Moved.MOVED, Moved.EXHAUSTED, Moved.LEFT} and totals.moves[Moved.MOVED] > 20
    assert totals.plans > 200 and totals.conversions > 100
    assert 0 < totals.errors.total() < 0.1 * totals.requests


def test_one_seed_is_one_run_whatever_the_hash_seed():
    """Same seed, same trace, on any machine."""
    root = Path(__file__).parents[2]
    script = "from tests.simulation.fault_runs import play; print([play(seed).kernel.trace for seed in range(6)])"
    traces = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(traces) == 1 and "," in next(iter(traces))
