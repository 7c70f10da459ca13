"""The figures of a run: one row for each target and scenario, and what must hold between them."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

#: Events of one stream: of the mock worker of the others, and of ours for the same tokens. Ours are counted as if there
#: were as many as the others have, or it would look cheaper for sending two more.
EVENTS = {"sse64": (101, 103), "sse512": (61, 63)}
OURS = "ours"
#: A harness's run by scenario and target.
Runs = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the rounds; `errors` is the sum. What a scenario does not measure is None."""

    target: str
    scenario: str
    cpu_us_per_request: float | None = None
    cpu_us_per_event: float | None = None
    ttft_p50_ms: float | None = None
    gap_p99_ms: float | None = None
    rss_mb: float | None = None
    errors: int = 0
    #: What one scenario alone measures, by name.
    more: dict[str, float] = {}


def rows_of(runs: Runs) -> Iterator[Row]:
    for scenario, by_target in runs.items():
        for target, each in by_target.items():
            whole = [run for run in each if "rps" in run]
            failed = len(each) - len(whole)
            streams = scenario.startswith("sse")
            theirs, own = EVENTS.get(scenario, (1, 1)) if target.startswith(OURS) else (1, 1)
            yield Row(
                target=target,
                scenario=scenario,
                cpu_us_per_request=None if streams else _median(whole, "cpu_req"),
                cpu_us_per_event=_median(whole, "cpu_ev", own / theirs) if streams else None,
                ttft_p50_ms=_median(whole, "ttft50", 1e-3) if streams else None,
                gap_p99_ms=_median(whole, "itl99", 1e-3) if streams else None,
                rss_mb=_median(whole, "rss"),
                errors=failed + sum(run["errs"] + run["badev"] + run["unfinished"] for run in whole),
                more={
                    "foreign_cores": _median(whole, "foreign") or 0.0,
                    **({"events_per_s": _median(whole, "eps", theirs / own) or 0.0} if streams else {}),
                    **({} if streams else {"latency_p50_ms": _median(whole, "lat50", 1e-3) or 0.0}),
                },
            )


def _median(runs: Sequence[Mapping[str, Any]], name: str, unit: float = 1.0) -> float | None:
    values = [run[name] for run in runs if run.get(name) is not None]
    return round(statistics.median(values) * unit, 3) if values else None


def table(rows: Iterable[Row]) -> Iterator[str]:
    head = ("scenario", "target", "CPU us/req", "CPU us/event", "TTFT p50 ms", "gap p99 ms", "RSS MB", "errors", "more")
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        figures = (row.cpu_us_per_request, row.cpu_us_per_event, row.ttft_p50_ms, row.gap_p99_ms, row.rss_mb)
        shown = ["-" if figure is None else f"{figure:,.1f}" for figure in figures]
        more = " ".join(f"{name}={value:,.2f}" for name, value in row.more.items())
        lines.append((row.scenario, row.target, *shown, str(row.errors), more))
    widths = [max(len(line[at]) for line in lines) for at in range(len(head))]
    for line in lines:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
