"""Runs scenarios: one, or many at once on all cores."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence

from prfaas.sim.result import Result, result_of
from prfaas.sim.scenario import Scenario
from prfaas.sim.world import World


def run(scenario: Scenario, told: Callable[[int], None] = lambda part: None) -> Result:
    """`told` hears of each of PARTS parts. Raises ConfigError for a scenario that does not fit together."""
    world = World(scenario)
    world.play(told)
    world.check()
    return result_of(world)


def run_all(scenarios: Sequence[Scenario], processes: int | None = None) -> Iterator[Result]:
    """Results in the order of the scenarios, each as soon as it and all before it are there."""
    count = min(len(scenarios), processes or len(os.sched_getaffinity(0)))
    if count <= 1:
        yield from map(run, scenarios)
        return
    # Fresh interpreters rather than forks: the parent may have threads.
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        yield from pool.imap(run, scenarios)
