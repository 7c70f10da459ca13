"""Work on several cores."""

import math

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
