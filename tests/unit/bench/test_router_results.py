"""The figures of the router's benchmark: from the harness's runs to rows, and what must hold between them."""

from typing import Any

import pytest

from bench.router.harness import wanted_packages
from bench.router.lasting import growth_mb
from bench.router.results import Row, rows_of, table
from bench.router.wanted import misses


def run(**figures: Any) -> dict[str, Any]:
    """One run as the load generator and the harness tell of it."""
    told = {"rps": 100.0, "eps": 3200.0, "errs": 0, "badev": 0, "unfinished": 0, "ttft50": 800.0, "itl99": 21_000.0}
    return {**told, "lat50": 300.0, "rss": 90.0, "foreign": 0.0, "cpu_req": 150.0, "cpu_ev": 20.6, **figures}


def row(target: str, scenario: str, **figures: Any) -> Row:
    return Row(target=target, scenario=scenario, **figures)


def test_a_row_has_the_medians_of_the_rounds():
    """One round that somebody else disturbed does not count."""
    runs = {"ns32": {"vllm-pd": [run(cpu_req=150.0), run(cpu_req=900.0), run(cpu_req=160.0)]}}
    [found] = rows_of(runs)
    assert (found.cpu_us_per_request, found.cpu_us_per_event, found.errors) == (160.0, None, 0)


def test_what_went_wrong_in_any_round_is_counted():
    """Answers other than 200, streams with too few or too many events, streams that never ended, and whole runs."""
    runs = {"sse64": {"ours": [run(errs=1, badev=2), run(unfinished=4), {"error": "no answer"}]}}
    [found] = rows_of(runs)
    assert found.errors == 8


def test_the_events_that_only_ours_sends_do_not_make_it_cheaper():
    """A stream of ours has two events more than the mock's for the same tokens: they are not counted."""
    runs = {"sse64": {"ours": [run(cpu_ev=20.0)], "vllm-rr": [run(cpu_ev=20.0)]}}
    ours, theirs = rows_of(runs)
    assert ours.cpu_us_per_event == pytest.approx(20.0 * 103 / 101, rel=1e-3)
    assert theirs.cpu_us_per_event == 20.0


def test_the_table_shows_every_figure_of_a_row():
    """And a dash for what a scenario does not measure."""
    [head, line] = table([row("ours", "idle", rss_mb=80.5, more={"streams": 5000})])
    assert head.split()[:2] == ["scenario", "target"]
    assert line.split() == ["idle", "ours", "-", "-", "-", "-", "80.5", "0", "streams=5,000.00"]


GOOD = [
    row("direct", "sse64", ttft_p50_ms=0.2),
    row("vllm-rr", "sse64", cpu_us_per_event=40.0, gap_p99_ms=21.0),
    row("sglang-rr", "sse64", cpu_us_per_event=45.0, gap_p99_ms=22.0),
    row("ours", "sse64", cpu_us_per_event=23.0, gap_p99_ms=21.0, ttft_p50_ms=1.0),
    row("vllm-pd", "ns32", cpu_us_per_request=300.0),
    row("sglang-rr", "ns32", cpu_us_per_request=310.0),
    row("ours", "ns32", cpu_us_per_request=290.0),
    row("ours-bare", "memory", rss_mb=100.0, more={"growth_mb": 0.5}),
    row("ours", "idle", more={"streams": 5000}),
]


def test_nothing_is_missed_when_all_is_as_it_must_be():
    """Also when some targets were left out."""
    assert list(misses(GOOD)) == []


@pytest.mark.parametrize(
    ("worse", "named"),
    [
        (row("ours", "sse64", cpu_us_per_event=25.0), "sse64 ours: CPU us/event"),
        (row("ours", "sse64", gap_p99_ms=25.0), "sse64 ours: gap p99"),
        (row("ours", "sse64", ttft_p50_ms=1.3), "sse64 ours: TTFT p50"),
        (row("ours", "ns32", cpu_us_per_request=305.0), "ns32 ours: CPU us/request, vllm-pd's"),
        (row("ours-bare", "memory", rss_mb=130.0), "memory: MB"),
        (row("ours-bare", "memory", more={"growth_mb": 5.0}), "memory: MB more"),
        (row("ours", "idle", more={"streams": 4999}), "idle: 4999 streams"),
        (row("ours", "ns32", errors=1), "ns32 ours: 1 answers"),
    ],
)
def test_each_figure_that_is_not_what_it_must_be_is_named(worse, named):
    """Once, and no other with it."""
    rows = [worse if (each.scenario, each.target) == (worse.scenario, worse.target) else each for each in GOOD]
    [miss] = misses(rows)
    assert miss.startswith(named)


def test_memory_that_comes_and_goes_by_pages_is_not_growth():
    """What counts is the end against the middle."""
    rising, flat = [50.0 + at for at in range(100)], [50.0 + at % 2 for at in range(100)]
    assert growth_mb(rising) == pytest.approx(40.0)
    assert abs(growth_mb(flat)) <= 1.0


def test_peers_are_installed_in_the_versions_of_the_harness():
    """And only those that are compared with."""
    script = "mk sgl sglang-router==0.3.2\nmk vllmr vllm-router==0.1.17 'certifi'\nmk dyn aiohttp\n"
    assert wanted_packages(script) == {"sgl": ["sglang-router==0.3.2"], "vllmr": ["vllm-router==0.1.17", "certifi"]}
