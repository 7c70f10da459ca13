"""Seeded runs of `fault_world`, one after the other: how many there are, what they add up to, and how to repeat one.

`python -m tests.simulation.fault_runs SEED` repeats a run. With `--seeds` or `--seconds` it plays that many, or for so
long, from this seed on and on all cores: `make sim-soak`.
"""

import gc
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import count, islice

import click

from prfaas.flows.story import Ending, Moved
from tests.simulation.fault_world import REQUESTS, FaultWorld

#: What `make test` plays: 100,000 requests and 5,000 faults. Each file has a share of it, and each of its tests a part.
RUNS, FILES, RUNS_OF_A_TEST = 2000, 4, 50
#: Of one job of a soak.
RUNS_OF_A_JOB = 20


@dataclass
class Totals:
    runs: int = 0
    requests: int = 0
    faults: int = 0
    #: Requests that got all of their answer, those whose clients left, and errors by kind.
    answered: int = 0
    left: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    endings: Counter[Ending] = field(default_factory=Counter)
    moves: Counter[Moved] = field(default_factory=Counter)
    plans: int = 0
    conversions: int = 0

    def count(self, world: FaultWorld) -> None:
        self.runs += 1
        self.requests += len(world.clients)
        self.faults += len(world.injected)
        self.kinds.update(type(fault).__name__ for fault in world.injected)
        self.plans += sum(len(control.published) for control in world.control)
        self.conversions += world.flips
        for client in world.clients:
            self.answered += client.error is None and not client.left
            self.left += client.left
            if client.error is not None:
                self.errors[type(client.error).__name__] += 1
            self.endings.update(attempt.ending for attempt in client.story.attempts)
            self.moves.update(move.outcome for move in client.story.migrations)

    def add(self, other: "Totals") -> None:
        for name in ("runs", "requests", "faults", "answered", "left", "plans", "conversions"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("errors", "kinds", "endings", "moves"):
            getattr(self, name).update(getattr(other, name))


def seeds_of(file: int) -> range:
    """The first seeds of each test of one of the files."""
    share = RUNS // FILES
    return range(file * share, (file + 1) * share, RUNS_OF_A_TEST)


def survive(first: int) -> None:
    """A test's part. What it adds up to is asserted, so that it cannot shrink unseen."""
    totals = played(range(first, first + RUNS_OF_A_TEST))
    assert totals.runs == RUNS_OF_A_TEST
    assert totals.requests == RUNS_OF_A_TEST * REQUESTS
    assert totals.answered + totals.left + totals.errors.total() == totals.requests
    assert totals.answered > 0.7 * totals.requests


def played(seeds: Iterable[int]) -> Totals:
    totals = Totals()
    for seed in seeds:
        totals.count(play(seed))
    return totals


def play(seed: int) -> FaultWorld:
    """One run. Its errors say how to repeat it. What it leaves behind is not collected before it ends: coroutines run
    when they are, and when that is depends on what ran before."""
    world = FaultWorld(seed)
    gc.disable()
    try:
        world.run()
    except BaseException as error:
        error.add_note(f"seed {seed}, at {world.kernel.now():.3f} s, after {world.injected}")
        error.add_note(f"again: python -m tests.simulation.fault_runs {seed}")
        raise
    finally:
        gc.enable()
    return world


@click.command()
@click.argument("seed", type=int)
@click.option("--seeds", type=int, default=None, help="so many from this one on")
@click.option("--seconds", type=float, default=None, help="for so long")
def main(seed: int, seeds: int | None, seconds: float | None) -> None:
    if seeds is None and seconds is None:
        click.echo(played([seed]))
        return
    totals, ends_at = Totals(), math.inf if seconds is None else time.monotonic() + seconds
    parts = batched(count(seed) if seeds is None else range(seed, seed + seeds))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        under_way: set[Future[Totals]] = set()
        while under_way or time.monotonic() < ends_at:
            while time.monotonic() < ends_at and len(under_way) < 2 * (os.cpu_count() or 1):
                if (part := next(parts, None)) is None:
                    ends_at = -math.inf
                else:
                    under_way.add(pool.submit(played, part))
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for each in done:
                totals.add(each.result())
    click.echo(totals)


def batched(seeds: Iterable[int]) -> Iterator[tuple[int, ...]]:
    rest = iter(seeds)
    while part := tuple(islice(rest, RUNS_OF_A_JOB)):
        yield part


if __name__ == "__main__":
    main()
