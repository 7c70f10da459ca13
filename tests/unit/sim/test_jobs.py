"""Work on several cores."""

import math
import os
import signal
import subprocess
import sys
import time

import pytest

from prfaas.sim.jobs import Job, run_jobs

JOBS = [Job(f"root of {value}", math.sqrt, (value,)) for value in (16, 9, 4)]


@pytest.mark.parametrize("processes", [1, 2])
def test_results_come_in_the_order_of_the_jobs(processes: int):
    """However many cores there are, and whoever is done first."""
    ended: list[str] = []
    results = run_jobs(JOBS, processes, ended.append)
    assert list(results.items()) == [("root of 16", 4.0), ("root of 9", 3.0), ("root of 4", 2.0)]
    assert sorted(ended) == sorted(results)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_job_that_fails_is_not_swallowed(processes: int):
    """Its error is the caller's."""
    with pytest.raises(ValueError, match="math domain"):
        run_jobs([*JOBS, Job("root of -1", math.sqrt, (-1,))], processes, lambda name: None)


#: Whoever starts the tests in the background has it ignore interrupts; this one is on a terminal.
LONG = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from prfaas.sim.jobs import Job, run_jobs
if __name__ == "__main__":
    jobs = [Job("short", int, ()), *(Job(f"{n}", time.sleep, (60,)) for n in range(4))]
    run_jobs(jobs, 2, lambda name: print(name, flush=True))
"""


def test_an_interrupt_ends_what_is_running(tmp_path):
    """Long before it would have been done, without a word from the processes that worked."""
    script = tmp_path / "long.py"
    script.write_text(LONG)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # A group of its own, all of which hears Ctrl-C as on a terminal.
    running = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        env=environment,
    )
    assert running.stdout is not None and running.stdout.readline() == "short\n"
    before = time.monotonic()
    os.killpg(running.pid, signal.SIGINT)
    # Ends once every process that has these pipes has ended.
    _, errors = running.communicate(timeout=30)
    assert time.monotonic() - before < 20
    assert running.returncode != 0
    assert errors.count("Traceback") == errors.count("KeyboardInterrupt") == 1


def test_a_job_that_fails_does_not_wait_for_others():
    """They are ended where they are."""
    before = time.monotonic()
    jobs = [Job("root of -1", math.sqrt, (-1,)), Job("asleep", time.sleep, (60,))]
    with pytest.raises(ValueError, match="math domain"):
        run_jobs(jobs, 2, lambda name: None)
    assert time.monotonic() - before < 30
