"""Pieces of work on several cores. What comes out does not depend on how many there are or who is done first.

A job runs in a process of its own that starts from nothing (spawn), so its function is one of a module's and its
arguments are values.
"""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

#: Told the name of each job as it ends.
Done = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Job:
    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def run_jobs(jobs: Sequence[Job], processes: int, done: Done) -> dict[str, Any]:
    """What each job returned, in the order given. The first to fail ends the others that have not begun."""
    assert len({job.name for job in jobs}) == len(jobs), "two jobs have one name"
    results: dict[str, Any] = {}
    if processes == 1:
        for job in jobs:
            results[job.name] = job.function(*job.arguments)
            done(job.name)
        return results
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(job.function, *job.arguments): job.name for job in jobs}
        try:
            for future in as_completed(running):
                results[running[future]] = future.result()
                done(running[future])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {job.name: results[job.name] for job in jobs}
