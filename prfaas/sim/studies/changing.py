"""Changing conditions: the product's loops against an oracle that knows each change when it happens."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from prfaas.cluster import Plan
from prfaas.sim.document import Block, Chart, Heading, Table, Text
from prfaas.sim.jobs import Job
from prfaas.sim.plots import Line, Point, line_chart
from prfaas.sim.report import link_chart, roles_chart, threshold_chart, throughput_chart
from prfaas.sim.result import Result, result_of
from prfaas.sim.studies.conditions import LOAD, SETTLING, Condition, conditions
from prfaas.sim.studies.effort import Effort
from prfaas.sim.studies.oracle import oracle
from prfaas.sim.world import World

NAMES = ("link_step", "length_doubling", "diurnal", "burst")
#: TTFT is drawn as the mean of so many pieces of a run.
PIECES = 60
#: Whose time series are shown whole.
SHOWN = "link_step"


def jobs(effort: Effort) -> list[Job]:
    return [Job(name, measure, (name, effort.phase_s)) for name in NAMES]


def measure(name: str, phase_s: float) -> dict[str, Any]:
    condition = conditions(phase_s)[name]
    ours, best = _played(condition), oracle(condition)
    result, ideal = result_of(ours), result_of(best)
    windows = [_compared(result, ideal, window) for window in condition.windows]
    plans = ours.control[0].published
    back = gone_back(plans, [phase.at_s for phase in condition.phases])
    return {
        "figures": {
            "ttft_ratio": max(window["ttft_ratio"] for window in windows),
            "throughput_ratio": min(window["throughput_ratio"] for window in windows),
            "flips": ours.flips,
            "oracle_flips": best.flips,
            "turns": len(back),
            "turned": back,
            "plans": [{"at_s": at_s, "reason": plan.reason} for at_s, plan in plans],
            "rate_per_s": condition.scenario.workload.arrivals.rate_per_s
            if condition.scenario.workload.arrivals
            else 0,
            "windows": windows,
        },
        "ttft": {"ours": _ttft_over_time(result), "oracle": _ttft_over_time(ideal)},
        "charts": _charts(result) if name == SHOWN else [],
    }


def figures(results: Mapping[str, Any]) -> dict[str, Any]:
    return {name: results[name]["figures"] for name in NAMES}


def blocks(found: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Block]:
    yield Heading("Changing conditions")
    yield Text(
        f"Load is {LOAD:.0%} of what the tightest phase sustains. Both loops run, against an oracle that publishes "
        "the best plan for each phase the moment it begins, and pays only for the conversion. Ratios are those of the "
        f"worst phase, from the end of its slow period number {SETTLING} on; a turn is a plan that goes back on the "
        "one before within a phase."
    )
    yield Table(
        [
            "condition",
            "mean TTFT over the oracle's",
            "throughput over the oracle's",
            "flips",
            "oracle's flips",
            "turns",
        ],
        [
            [
                name,
                f"{row['ttft_ratio']:.3f}",
                f"{row['throughput_ratio']:.3f}",
                str(row["flips"]),
                str(row["oracle_flips"]),
                str(row["turns"]),
            ]
            for name, row in found.items()
        ],
    )
    for name in NAMES:
        ttft = results[name]["ttft"]
        lines = [Line("loops", ttft["ours"]), Line("oracle", ttft["oracle"], dashed=True)]
        title = f"Mean TTFT, {name.replace('_', ' ')}"
        yield Chart(f"changing_{name}", f"{title}.", line_chart(title, "minutes", "seconds", lines))
    yield from results[SHOWN]["charts"]


def _played(condition: Condition) -> World:
    world = World(condition.scenario)
    world.play()
    world.check()
    return world


def _compared(ours: Result, best: Result, window: tuple[float, float]) -> dict[str, float]:
    start_s, end_s = window

    def of(result: Result) -> tuple[float, int]:
        rows = result.requests
        came = (rows["arrived_s"] >= start_s) & (rows["arrived_s"] < end_s) & ~np.isnan(rows["ttft_s"])
        done = (rows["finished_s"] >= start_s) & (rows["finished_s"] < end_s)
        return float(rows["ttft_s"][came].mean()), int(np.count_nonzero(done))

    (ttft_s, done), (best_ttft_s, best_done) = of(ours), of(best)
    return {
        "start_s": start_s,
        "end_s": end_s,
        "ttft_s": ttft_s,
        "oracle_ttft_s": best_ttft_s,
        "ttft_ratio": ttft_s / best_ttft_s,
        "throughput_ratio": done / best_done if best_done else float("nan"),
    }


def gone_back(plans: Iterable[tuple[float, Plan]], phases_s: Sequence[float]) -> list[dict[str, Any]]:
    """The plans that want more prefill where the one before wanted less, or the other way round, and why. `phases_s`:
    when the phases begin, in each of which the way is open anew."""
    edges = [*phases_s[1:], float("inf")]
    back: list[dict[str, Any]] = []
    level, direction, phase = None, 0, 0
    for at_s, plan in plans:
        while at_s >= edges[phase]:
            phase, direction = phase + 1, 0
        total = round(sum(plan.shares.values()), 6)
        if level is not None and total != level:
            way = 1 if total > level else -1
            if direction == -way:
                back.append({"at_s": at_s, "reason": plan.reason})
            direction = way
        level = total
    return back


def _ttft_over_time(result: Result) -> list[Point]:
    rows = result.requests
    rows = rows[~np.isnan(rows["ttft_s"])]
    edges = np.linspace(0, rows["arrived_s"].max(), PIECES + 1)
    points = []
    for start_s, end_s in itertools.pairwise(edges.tolist()):
        inside = (rows["arrived_s"] >= start_s) & (rows["arrived_s"] < end_s)
        mean_s = float(rows["ttft_s"][inside].mean()) if inside.any() else float("nan")
        points.append(((start_s + end_s) / 120, mean_s))
    return points


def _charts(result: Result) -> list[Chart]:
    """Of the loops' own run."""
    charts = [
        throughput_chart(result.requests),
        link_chart(result.series),
        threshold_chart(result.series),
        roles_chart(result.series),
    ]
    return [
        Chart(f"{chart.name}_over_time", f"When the line steps to 3 Gbps and back: {chart.caption}", chart.svg)
        for chart in charts
    ]
