"""`prfaas sim` as an operator runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = """
name = "small"
duration_s = 300.0
warm_up_s = 30.0

[[fleets]]
name = "far"
region = "a"
kind = "prefill_worker"
hardware = "h200"
nodes = 1

[[fleets]]
name = "pd"
region = "b"
kind = "pd"
hardware = "h20"
nodes = 2
shares = [1.0]

[[links]]
source = "a"
target = "b"
gbps = 100.0

[workload.arrivals]
rate_per_s = 0.3

[workload.outputs]
kind = "fixed"
tokens = 64

[policy]
threshold_tokens = 19000

[control]
fast = true
slow = true
slow_period_s = 60.0
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def sim(*arguments: str | Path, hash_seed: str = "0", timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.cli", "sim", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )


def test_a_run_prints_its_figures_and_writes_its_report(scenario, tmp_path):
    """Figures on stdout, progress as plain lines on stderr where that is not a terminal."""
    page = tmp_path / "report.html"
    done = sim("run", scenario, "--report", page)
    assert done.returncode == 0, done.stderr
    assert "throughput_per_s" in done.stdout
    assert [line for line in done.stderr.splitlines() if line.endswith("100/100")]
    assert "<svg" in page.read_text()


def test_the_same_seed_is_the_same_run_whatever_the_hash_seed(scenario):
    """And another seed is another run."""
    one, two = sim("run", scenario, "--json", hash_seed="1"), sim("run", scenario, "--json", hash_seed="2")
    assert one.returncode == 0, one.stderr
    assert one.stdout == two.stdout
    assert json.loads(one.stdout)["completed"] == json.loads(one.stdout)["offered"] > 50
    assert sim("run", scenario, "--json", "--seed", "7").stdout != one.stdout


def test_a_sweep_runs_every_combination(scenario):
    """One JSON object per run, in order; a wider line is a shorter wait."""
    done = sim("sweep", scenario, "--set", "link_gbps=0.5,100", "--set", "rate_per_s=0.1,0.3", "--json")
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert [run["set"] for run in runs] == [
        {"link_gbps": gbps, "rate_per_s": rate} for gbps in (0.5, 100) for rate in (0.1, 0.3)
    ]
    assert runs[1]["ttft"]["mean"] > runs[3]["ttft"]["mean"]


@pytest.mark.parametrize(
    "wrong",
    [
        ["run", "FILE", "--seed", "x"],
        ["sweep", "FILE", "--set", "link_gbps"],
        ["sweep", "FILE", "--set", "nope=1"],
        ["sweep", "FILE", "--set", "threshold_tokens=1,1"],
        ["sweep", "FILE", "--set", "rate_per_s=Infinity"],
    ],
)
def test_what_is_wrong_on_the_command_line_is_said(scenario, wrong):
    """Exit code 2 and one line, no traceback."""
    done = sim(*(scenario if part == "FILE" else part for part in wrong))
    assert done.returncode == 2
    assert "Error: " in done.stderr and "Traceback" not in done.stderr


def test_a_key_that_nobody_knows_is_named(scenario):
    scenario.write_text(SMALL.replace("threshold_tokens", "treshold_tokens"))
    done = sim("run", scenario)
    assert done.returncode == 2
    assert "treshold_tokens" in done.stderr


def test_a_report_that_cannot_be_written_is_said_at_once(scenario, tmp_path):
    """Not after the simulation."""
    done = sim("run", scenario, "--report", tmp_path / "no" / "such" / "report.html")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "--report" in done.stderr and "100/100" not in done.stderr


def test_figures_that_are_not_known_are_null(scenario):
    """JSON has no NaN, and a run with a single sample has no trend."""
    scenario.write_text(SMALL.replace("warm_up_s = 30.0", "warm_up_s = 30.0\nsample_s = 200.0"))
    done = sim("run", scenario, "--json")
    assert done.returncode == 0, done.stderr

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(done.stdout, parse_constant=refuse)["backlog_growth_per_s"] is None


def test_why_requests_failed_is_told(scenario):
    """In JSON and in the table: how many with each error."""
    scenario.write_text(SMALL + '\n[[faults]]\nkind = "chances"\nat_s = 0.0\nengine = 1.0\n')
    figures = json.loads(sim("run", scenario, "--json").stdout)
    assert figures["failed"] > 50 and sum(figures["errors"].values()) == figures["failed"]
    [(error, count)] = figures["errors"].items()
    table = sim("run", scenario).stdout
    assert any(f"errors {error}" in line and str(count) in line for line in table.splitlines())


def test_a_table_in_a_pipe_is_wide(scenario):
    """No column of a sweep is folded for a terminal that is not there."""
    done = sim("sweep", scenario, "--set", "link_gbps=1,100", "--set", "rate_per_s=0.1")
    assert done.returncode == 0, done.stderr
    head = next(line for line in done.stdout.splitlines() if "link_gbps" in line)
    assert all(name in head for name in ("rate_per_s", "throughput_per_s", "ttft mean", "remote_share", "failed"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_reproduction_has_every_figure_and_writes_its_page(tmp_path):
    """All keys are there, the page has its table and charts, and figures out of bounds do not fail it."""
    (tmp_path / "reproduction.md").write_text("# Kept\n")
    done = sim("reproduce", "--quick", "--json", "--report", tmp_path, timeout_s=540)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    columns = {"t", "n_p", "n_d", "theta_prfaas", "theta_pdp", "theta_pdd", "lambda_max", "egress_gbps"}
    for fleet in ("prfaas_pd", "homogeneous", "naive", "mixed"):
        assert columns <= set(figures["planner"][fleet])
        assert figures["simulated"]["sustained"][fleet] > 0
    assert set(figures["links"]) == {"10", "8", "6", "4", "2"}
    assert all({"lambda_max", "t"} <= set(link) for link in figures["links"].values())
    for rate in ("0.5", "1.0", "1.5", "2.0"):
        for fleet in ("prfaas_pd", "homogeneous", "naive"):
            assert {"mean", "p90"} <= set(figures["simulated"]["ttft"][rate][fleet])
    assert figures["simulated"]["egress_gbps"] > 0
    assert set(figures["changing"]) == {"link_step", "length_doubling", "diurnal", "burst"}
    assert "prfaas" in figures["trace"]
    page = (tmp_path / "reproduction.md").read_text()
    assert page.startswith("# Kept\n") and "| planner: t |" in page
    linked = [part.split(")")[0] for part in page.split("(reproduction/")[1:]]
    assert len(linked) > 10
    assert all((tmp_path / "reproduction" / chart).exists() for chart in linked)
