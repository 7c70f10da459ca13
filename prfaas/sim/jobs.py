"""Pieces of work on several cores. What comes out does not depend on how many there are or who is done first.

A job runs in a process of its own that starts from nothing (spawn), so its function is one of a module's and its
arguments are values.
"""

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
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
    """What each job returned, in the order given. The first to fail, or Ctrl-C, ends all others at once."""
    assert len({job.name for job in jobs}) == len(jobs), "two jobs have one name"
    results: dict[str, Any] = {}
    if processes == 1:
        for job in jobs:
            results[job.name] = job.function(*job.arguments)
            done(job.name)
        return results
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            with _interrupts_later():
                running = {pool.submit(job.function, *job.arguments): job.name for job in jobs}
            for future in as_completed(running):
                results[running[future]] = future.result()
                done(running[future])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            # What they are at would otherwise be waited for.
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
            raise
    return {job.name: results[job.name] for job in jobs}


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Ctrl-C reaches this process only after it; processes that are started meanwhile never hear of it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
