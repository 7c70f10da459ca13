"""The page of a reproduction, the scenarios that it rests on, and the oracle that it compares with."""

import time
from pathlib import Path

import pytest

from prfaas.sim.case_study_runs import FLEETS, scenario
from prfaas.sim.document import Chart, Heading
from prfaas.sim.reproduce import BEGIN, END, HEAD, PAGE, Reproduction, jobs, rewritten, spent, write
from prfaas.sim.scenario import load
from prfaas.sim.studies.conditions import LOAD, NARROW_GBPS, conditions
from prfaas.sim.studies.oracle import oracle
from prfaas.sim.wanted import Check

SCENARIOS = Path(__file__).parents[3] / "bench" / "scenarios"
CHART = Chart("one", "A chart.", "<svg></svg>\n")


def reproduction(*checks: Check) -> Reproduction:
    return Reproduction(figures={}, checks=list(checks), blocks=[Heading("Measured"), CHART])


def test_only_what_is_generated_is_rewritten():
    """What stands before and after the marks stays, however often it is done."""
    page = f"# Mine\n\nwords\n\n{BEGIN}\nold\n{END}\nmore words\n"
    once = rewritten(page, "new\n")
    assert once.startswith("# Mine\n\nwords\n") and once.endswith(f"{END}\nmore words\n")
    assert "new" in once and "old" not in once
    assert rewritten(once, "new\n") == once


def test_a_page_without_marks_gets_them():
    """At its end; nothing of it is lost."""
    once = rewritten("# Mine\n", "new\n")
    assert once.startswith("# Mine\n") and once.index(BEGIN) < once.index("new") < once.index(END)
    assert rewritten(once, "newer\n").count(BEGIN) == 1


def test_a_reproduction_is_written_with_its_charts(tmp_path):
    """The page links files that are there, and one HTML file has it all."""
    write(reproduction(), tmp_path)
    page = (tmp_path / PAGE).read_text()
    assert "(reproduction/one.svg)" in page
    assert (tmp_path / "reproduction" / "one.svg").read_text() == CHART.svg
    assert "<svg>" in (tmp_path / "reproduction" / "report.html").read_text()


def test_a_miss_is_named():
    """In the table and for the exit code."""
    found = reproduction(Check("good", ">= 1", 2.0, True), Check("bad", ">= 1", 0.5, False))
    assert found.missed == ["bad"]
    assert found.rows() == [["good", ">= 1", "2", "yes"], ["bad", ">= 1", "0.5", "NO"]]
    assert all(len(row) == len(HEAD) for row in found.rows())


@pytest.mark.parametrize("quick", [False, True])
def test_jobs_have_names_of_their_own(quick):
    """Results are looked up by them."""
    names = [job.name for job in jobs(quick)]
    assert len(set(names)) == len(names) > 20


def test_a_job_tells_what_it_cost():
    """CPU time, not time on the clock: other work on the machine does not count."""
    busy, idle = spent(sum, (range(3_000_000),)), spent(time.sleep, (0.05,))
    assert (busy.result, idle.result) == (sum(range(3_000_000)), None)
    assert busy.cpu_s > idle.cpu_s >= 0


@pytest.mark.parametrize("fleet", FLEETS)
def test_the_files_that_ship_are_the_planned_fleets(fleet):
    """`sim run` on a shipped file shows the cluster that `reproduce` measures."""
    planned, shipped = scenario(fleet, 1.0), load(SCENARIOS / f"{fleet}.toml")
    fleets = sorted(planned.fleets, key=lambda each: each.name)
    assert fleets == sorted(shipped.fleets, key=lambda each: each.name)
    assert planned.links == shipped.links
    assert planned.policy.mode is shipped.policy.mode
    if planned.policy.mode.value == "auto":
        assert planned.policy.threshold_tokens == shipped.policy.threshold_tokens


def test_load_is_set_by_the_tightest_phase():
    """A narrow line is what limits the step; the burst and the peak of the day are phases of their own."""
    found = conditions(2400.0)
    step = found["link_step"]
    narrow = next(phase.plan for phase in step.phases if phase.at_s > 0)
    assert step.scenario.workload.arrivals.rate_per_s == pytest.approx(LOAD * narrow.throughput.lambda_max)
    assert [fault.gbps for fault in step.scenario.faults] == [NARROW_GBPS, 100]
    steady = found["burst"].phases[0].plan.throughput.lambda_max
    assert 5 * found["burst"].scenario.workload.arrivals.rate_per_s == pytest.approx(LOAD * steady)
    day = found["diurnal"].scenario.workload.arrivals
    assert day.rate_per_s * (1 + day.diurnal.amplitude) == pytest.approx(LOAD * steady)


def test_windows_begin_after_the_third_slow_period():
    """Of each phase that begins with a change."""
    for condition in conditions(2400.0).values():
        period_s = condition.scenario.control.slow_period_s
        for (start_s, end_s), phase in zip(condition.windows, condition.phases, strict=True):
            assert start_s == phase.at_s + 3 * period_s
            assert end_s <= condition.scenario.duration_s


def test_the_oracle_changes_roles_when_conditions_change_and_only_then():
    """It publishes the best plan of each phase at its beginning, and nodes follow by the product's own flow."""
    condition = conditions(240.0)["link_step"]
    world = oracle(condition)
    published = world.control[0].published
    assert [at_s for at_s, _ in published] == pytest.approx([1.0, 240.0, 480.0], abs=0.1)
    assert [plan.threshold_tokens for _, plan in published] == [p.plan.threshold_tokens for p in condition.phases]
    moved = abs(condition.phases[1].plan.n_p - condition.phases[0].plan.n_p)
    assert world.flips == 2 * moved > 0
    assert not world.control[0].rounds
