"""The report of one simulation: what it measured, and how its cluster looked over time."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from prfaas.sim.document import Block, Chart, Heading, Table, Text, html
from prfaas.sim.plots import Line, Point, distribution, line_chart
from prfaas.sim.records import Rows
from prfaas.sim.result import Result

#: Throughput is counted in so many pieces of the run.
BINS = 120
ROLES = {
    "prefill": "prefill_nodes",
    "mixed": "mixed_nodes",
    "decode": "decode_nodes",
    "draining": "draining_nodes",
}

Columns = Mapping[str, npt.NDArray[np.float64]]


def page(result: Result) -> str:
    """One HTML file."""
    return html(f"Simulation: {result.scenario}", list(blocks(result)))


def blocks(result: Result) -> Iterator[Block]:
    yield Table(["figure", "value"], rows(result))
    if result.errors:
        yield Text(f"Errors that clients saw: {', '.join(result.errors)}.")
    yield Heading("Over time")
    yield from charts_over_time(result)
    yield Heading("Time to first token")
    yield ttft_chart(result)


def rows(result: Result) -> list[list[str]]:
    return [[name, shown(value)] for name, value in flat(result.summary)]


def flat(summary: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A line per figure; those of a group are named after it."""
    for name, value in summary.items():
        if isinstance(value, dict):
            yield from ((f"{name} {part}", each) for part, each in value.items())
        else:
            yield name, value


def shown(value: object) -> str:
    match value:
        case None:
            return "-"
        case float() if not math.isfinite(value):
            return "-"
        case float():
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        case int():
            return f"{value:,}"
        case _:
            return str(value)


def charts_over_time(result: Result) -> Iterator[Chart]:
    series = result.series
    yield throughput_chart(result.requests)
    yield Chart(
        "backlog",
        "Requests that have arrived and not finished.",
        line_chart("In the system", "minutes", "requests", [over_time(series, "in_system", "requests")]),
    )
    yield link_chart(series)
    yield threshold_chart(series)
    yield roles_chart(series)


def throughput_chart(requests: Rows) -> Chart:
    return Chart(
        "throughput",
        "Requests per second that arrived and that were finished.",
        line_chart(
            "Throughput",
            "minutes",
            "requests/s",
            [
                Line("finished", per_second(requests["finished_s"], requests)),
                Line("arrived", per_second(requests["arrived_s"], requests), dashed=True),
            ],
        ),
    )


def link_chart(series: Columns) -> Chart:
    return Chart(
        "link",
        "What the lines between regions carry, and what they can.",
        line_chart(
            "Link use",
            "minutes",
            "Gbps",
            [
                over_time(series, "link_gbps", "carried"),
                over_time(series, "link_capacity_gbps", "capacity", steps=True, dashed=True),
            ],
        ),
    )


def threshold_chart(series: Columns) -> Chart:
    return Chart(
        "threshold",
        "The threshold that routing follows.",
        line_chart("Threshold", "minutes", "tokens", [over_time(series, "threshold_tokens", "t", steps=True)]),
    )


def roles_chart(series: Columns) -> Chart:
    lines = [over_time(series, column, role, steps=True) for role, column in ROLES.items()]
    return Chart(
        "roles",
        "PD nodes by what they do. A draining node still counts for its role.",
        line_chart("Roles of PD nodes", "minutes", "nodes", lines),
    )


def ttft_chart(result: Result) -> Chart:
    requests = result.requests
    remote, ttft_s = requests["remote"], requests["ttft_s"]
    lines = [
        Line("local", distribution(ttft_s[~remote].tolist())),
        Line("remote", distribution(ttft_s[remote].tolist())),
    ]
    return Chart(
        "ttft",
        "Share of requests whose first token came within a time, by where they were prefilled.",
        line_chart("Time to first token", "seconds", "share", [line for line in lines if line.points], log_x=True),
    )


def over_time(series: Columns, column: str, name: str, *, steps: bool = False, dashed: bool = False) -> Line:
    return Line(name, list(zip((series["at_s"] / 60).tolist(), series[column].tolist(), strict=True)), steps, dashed)


def per_second(at_s: npt.NDArray[np.float64], requests: Rows) -> list[Point]:
    """How many there were in each piece of the time in which requests arrived."""
    if not len(requests):
        return []
    counts, edges = np.histogram(at_s[np.isfinite(at_s)], bins=BINS, range=(0.0, float(requests["arrived_s"].max())))
    middles = (edges[:-1] + edges[1:]) / 2 / 60
    return list(zip(middles.tolist(), (counts / np.diff(edges)).tolist(), strict=True))
