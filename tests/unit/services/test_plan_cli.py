"""`prfaas plan`: the paper's case study, and fleets for a demand."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from prfaas.sim.workload import LogNormal
from services.cli import main

CASE = ("--prfaas-profile", "case-study-1t/h200", "--pd-profile", "case-study-1t/h20")
WORKLOAD = ("--log-normal", "9.90,1.00", "--output-tokens", "1024")
WITHIN = 0.03


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments])


def planned(*arguments: str) -> dict[str, Any]:
    done = run(*CASE, *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


@pytest.mark.parametrize("approximation", ["mean", "integral"])
def test_the_case_study_is_the_papers(approximation: str):
    """t of 19 to 20 thousand, 3 nodes prefill and 5 decode, 1.61, 1.64 and 3.91 requests/s, 3.24 in all, 13 Gbps."""
    fleet = ("--prfaas-nodes", "4", "--pd-nodes", "8", "--link-gbps", "100", "--whole-roles")
    told = planned(*WORKLOAD, *fleet, "--approximation", approximation)
    assert 19_000 <= told["threshold_tokens"] <= 20_000
    assert (told["pd_prefill_nodes"], told["pd_decode_nodes"], told["pd_mixed_nodes"]) == (3, 5, 0)
    stages = [told[f"theta_{stage}_per_s"] for stage in ("prfaas", "pdp", "pdd")]
    assert stages == pytest.approx([1.61, 1.64, 3.91], rel=WITHIN)
    assert told["throughput_per_s"] == pytest.approx(3.24, rel=WITHIN)
    assert told["offloaded_share"] == pytest.approx(0.496, abs=0.01)
    assert told["egress_gbps"] == pytest.approx(13, abs=1)
    assert (told["decode_batch"], told["mean_tokens"]) == (20, pytest.approx(27_000, rel=WITHIN))


def test_without_another_region_the_case_study_is_nine_and_three():
    told = planned(*WORKLOAD, "--prfaas-nodes", "0", "--pd-nodes", "12", "--whole-roles")
    assert (told["pd_prefill_nodes"], told["pd_decode_nodes"]) == (9, 3)
    assert told["throughput_per_s"] == pytest.approx(2.11, rel=WITHIN)
    assert (told["offloaded_share"], told["egress_gbps"], told["recommended_line_gbps"]) == (0, 0, 0)


@pytest.mark.parametrize(("gbps", "rate"), [(10, 3.07), (8, 2.66), (6, 2.34), (4, 2.08), (2, 1.64)])
def test_a_narrow_line_costs_throughput(gbps: int, rate: float):
    fleet = ("--prfaas-nodes", "4", "--pd-nodes", "8", "--link-gbps", str(gbps), "--whole-roles")
    told = planned(*WORKLOAD, *fleet)
    assert told["throughput_per_s"] == pytest.approx(rate, rel=WITHIN)
    assert told["egress_gbps"] <= gbps * (1 + 1e-9)


@pytest.mark.parametrize("demand", [0.5, 3.2, 20.0])
def test_the_fleet_for_a_demand_carries_it_and_no_cheaper_one_does(demand: float):
    """With a share kept free. One node less of either kind is too few, at the best threshold and roles of that."""
    told = planned(*WORKLOAD, "--demand-per-s", str(demand), "--whole-roles")
    assert told["carries_demand"] and told["busy_ratio"] <= 0.8 * (1 + 1e-9)
    n_prfaas, n_pd = told["prfaas_nodes"], told["pd_nodes"]
    for fewer in ((n_prfaas - 1, n_pd), (n_prfaas, n_pd - 1)):
        if fewer[0] >= 0 and fewer[1] >= 1:
            counts = ("--prfaas-nodes", str(fewer[0]), "--pd-nodes", str(fewer[1]), "--whole-roles")
            assert planned(*WORKLOAD, *counts)["throughput_per_s"] * 0.8 < demand


def test_a_line_that_is_there_moves_the_work_to_pd_nodes():
    """The demand is carried, within the line."""
    free = planned(*WORKLOAD, "--demand-per-s", "3")
    tight = planned(*WORKLOAD, "--demand-per-s", "3", "--link-gbps", "4")
    assert tight["egress_gbps"] <= 4 < free["egress_gbps"]
    assert tight["pd_nodes"] > free["pd_nodes"] and tight["carries_demand"]


def test_dearer_instances_are_used_less():
    cheap = planned(*WORKLOAD, "--demand-per-s", "10")
    dear = planned(*WORKLOAD, "--demand-per-s", "10", "--prfaas-cost", "4")
    assert dear["prfaas_nodes"] < cheap["prfaas_nodes"]


def test_lengths_of_a_trace_are_those_of_its_distribution(tmp_path: Path):
    """A trace drawn from the log-normal gives nearly its plan; its outputs are known."""
    chance, trace = random.Random(5), tmp_path / "trace.jsonl"
    lengths = (LogNormal().draw(chance) for _ in range(8000))
    lines = [{"timestamp": n, "input_length": each, "output_length": 1024} for n, each in enumerate(lengths)]
    trace.write_text("".join(json.dumps({**line, "hash_ids": []}) + "\n" for line in lines))
    counts = ("--prfaas-nodes", "4", "--pd-nodes", "8", "--whole-roles")
    told = planned("--trace", str(trace), "--trace-format", "mooncake", *counts)
    assert told["output_tokens"] == 1024
    assert told["throughput_per_s"] == pytest.approx(planned(*WORKLOAD, *counts)["throughput_per_s"], rel=0.05)


def test_a_measured_profile_is_a_file(tmp_path: Path):
    """And what a fleet cannot carry is said, with exit code 1."""
    missing = run("--prfaas-profile", str(tmp_path / "no.json"), *CASE[2:], *WORKLOAD, "--demand-per-s", "1")
    assert missing.exit_code == 2 and "no.json" in missing.output
    small = run(*CASE, *WORKLOAD, "--prfaas-nodes", "4", "--pd-nodes", "8", "--demand-per-s", "9")
    assert small.exit_code == 1 and "does not carry" in small.output


@pytest.mark.parametrize(
    "arguments",
    [
        (*WORKLOAD,),
        (*WORKLOAD, "--pd-nodes", "3"),
        ("--output-tokens", "9", "--demand-per-s", "1"),
        ("--fixed-tokens", "9", "--demand-per-s", "1"),
        (*WORKLOAD, "--fixed-tokens", "9", "--demand-per-s", "1"),
        ("--log-normal", "9", "--output-tokens", "1", "--demand-per-s", "1"),
        ("--log-normal", "nan,1", "--output-tokens", "1", "--demand-per-s", "1"),
        (*WORKLOAD, "--demand-per-s", "nan"),
        (*WORKLOAD, "--demand-per-s", "inf"),
    ],
)
def test_what_makes_no_question_is_refused(arguments: tuple[str, ...]):
    done = run(*CASE, *arguments)
    assert done.exit_code == 2, done.output
    assert "Error" in done.output and "Traceback" not in done.output


def test_the_table_says_it_in_words():
    done = run(*CASE, *WORKLOAD, "--demand-per-s", "3")
    assert done.exit_code == 0
    for words in ("PrfaaS instances", "threshold t", "line to order", "limited by"):
        assert words in done.output


def test_options_come_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PRFAAS_PLAN_DEMAND_PER_S", "3")
    assert planned(*WORKLOAD)["demand_per_s"] == 3
