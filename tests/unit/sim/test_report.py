"""The report of a run says what the run measured."""

import re

import numpy as np
import pytest

from prfaas.cluster import NodeKind
from prfaas.request import Mode
from prfaas.sim import report
from prfaas.sim.policies import Policy
from prfaas.sim.result import Result
from prfaas.sim.run import run
from prfaas.sim.scenario import FleetSpec, LinkSpec, Scenario
from prfaas.sim.workload import Arrivals, Fixed, LogNormal, Workload

SCENARIO = Scenario(
    name="small & quick",
    fleets=(
        FleetSpec(name="far", region="a", kind=NodeKind.PREFILL_WORKER, hardware="h200", nodes=1),
        FleetSpec(name="pd", region="b", kind=NodeKind.PD, hardware="h20", nodes=2, shares=(1.0,)),
    ),
    links=(LinkSpec(source="a", target="b", gbps=100.0),),
    workload=Workload(arrivals=Arrivals(rate_per_s=0.3), prompts=LogNormal(), outputs=Fixed(tokens=64)),
    policy=Policy(threshold_tokens=19_000),
    duration_s=300.0,
    warm_up_s=30.0,
)


@pytest.fixture(scope="module")
def result() -> Result:
    return run(SCENARIO)


def test_a_page_has_every_plot_and_every_figure(result):
    """Throughput, TTFT per path, link, threshold and roles; and the summary as a table."""
    page = report.page(result)
    titles = ("Throughput", "Time to first token", "Link use", "Threshold", "Roles of PD nodes")
    assert all(f">{title}</text>" in page for title in titles)
    assert all(f"<td>{name}</td>" in page for name, _ in report.flat(result.summary))
    assert "Simulation: small &amp; quick" in page


def test_both_paths_have_a_line_of_their_own(result):
    """And a path that nobody took has none."""
    both = report.ttft_chart(result).svg
    assert ">local</text>" in both and ">remote</text>" in both
    never = run(SCENARIO.but(policy=Policy(mode=Mode.NEVER)))
    assert ">remote</text>" not in report.ttft_chart(never).svg


def test_throughput_adds_up_to_the_requests(result):
    """Counts per piece of time, times its length, are all requests."""
    points = report.per_second(result.requests["arrived_s"], result.requests)
    piece_s = (points[1][0] - points[0][0]) * 60
    assert sum(rate for _, rate in points) * piece_s == pytest.approx(len(result.requests))


def test_a_series_is_drawn_against_minutes(result):
    """Samples are seconds, the axis is minutes."""
    line = report.over_time(result.series, "in_system", "requests")
    assert line.points[-1][0] == pytest.approx(SCENARIO.duration_s / 60)
    assert [value for _, value in line.points] == result.series["in_system"].tolist()


def test_figures_of_a_group_carry_its_name():
    """So that two p90 can be told apart."""
    assert list(report.flat({"flips": 2, "ttft": {"p90": 1.5}})) == [("flips", 2), ("ttft p90", 1.5)]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (1234567, "1,234,567"), (19194.0, "19,194"), (0.123456, "0.1235")]
)
def test_figures_are_written_for_readers(value, text):
    assert report.shown(value) == text


def test_a_report_stands_alone(result):
    """It fetches nothing."""
    assert not re.findall(r'(?:src|href)="', report.page(result))


def test_nothing_arrived_is_no_error(result):
    """An empty run has a report as well."""
    assert report.per_second(np.array([]), result.requests[:0]) == []
