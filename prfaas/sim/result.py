"""What came of a simulation: figures, time series, and one row per request."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from prfaas.profile import GBPS
from prfaas.sim.records import Rows
from prfaas.sim.world import World


@dataclass(frozen=True, slots=True)
class Result:
    """`summary` is plain data, fit for JSON."""

    scenario: str
    summary: dict[str, Any]
    series: dict[str, npt.NDArray[np.float64]] = field(repr=False)
    requests: Rows = field(repr=False)
    errors: tuple[str, ...] = ()
    trace: int = 0


def result_of(world: World) -> Result:
    rows, series = world.records.rows(), world.series.columns()
    return Result(
        scenario=world.scenario.name,
        summary=_summary(world, rows, series),
        series=series,
        requests=rows,
        errors=tuple(world.records.errors),
        trace=world.kernel.trace,
    )


def _summary(world: World, rows: Rows, series: dict[str, npt.NDArray[np.float64]]) -> dict[str, Any]:
    start_s, end_s = world.scenario.warm_up_s, world.scenario.duration_s
    span_s = end_s - start_s
    counted = rows[(rows["arrived_s"] >= start_s) & (rows["arrived_s"] < end_s)]
    finished = (rows["finished_s"] >= start_s) & (rows["finished_s"] < end_s)
    served = counted[~np.isnan(counted["ttft_s"])]
    remote = served["remote"]
    step_times, caches = world.cluster.step_times, world.cluster.caches
    late = series["at_s"] > (start_s + end_s) / 2
    return {
        "offered": len(counted),
        "offered_per_s": len(counted) / span_s,
        "completed": int(np.count_nonzero(~np.isnan(counted["finished_s"]))),
        "failed": int(np.count_nonzero(counted["failed"] >= 0)),
        "errors": _errors(counted, world.records.errors),
        "throughput_per_s": float(np.count_nonzero(finished)) / span_s,
        "retried": int(np.count_nonzero(counted["attempts"] > 1)),
        "remote_share": float(remote.mean()) if len(served) else 0.0,
        "ttft": _times(served["ttft_s"]),
        "ttft_remote": _times(served["ttft_s"][remote]),
        "ttft_local": _times(served["ttft_s"][~remote]),
        "terms_mean_s": {
            name: _mean(served[f"{name}_s"])
            for name in ("queue", "network", "prefill_queue", "prefill", "exposed", "decode_queue", "first_step")
        },
        "itl_s": {f"p{q}": step_times.quantile_s(q / 100) for q in (50, 90, 99)},
        "tokens_per_s": _tokens_per_s(served),
        "egress_gbps": _mean(series["link_gbps"][series["at_s"] > start_s]),
        "egress_bytes": float(series["link_gbps"].sum() * world.scenario.sample_s * GBPS),
        "prefill_skip_rate": caches.skipped_tokens / caches.prompt_tokens if caches.prompt_tokens else 0.0,
        "flips": world.flips,
        "threshold_tokens": {
            "first": float(series["threshold_tokens"][0]) if len(series["at_s"]) else 0.0,
            "last": float(series["threshold_tokens"][-1]) if len(series["at_s"]) else 0.0,
        },
        "in_system_at_end": float(series["in_system"][-1]) if len(series["at_s"]) else 0.0,
        "late_offered_per_s": _slope(series["at_s"][late], _arrived(rows, series["at_s"][late])),
        "backlog_growth_per_s": _slope(series["at_s"][late], series["in_system"][late]),
    }


def _errors(counted: Rows, names: Sequence[str]) -> dict[str, int]:
    """How many requests failed with each error."""
    found = {name: int(np.count_nonzero(counted["failed"] == code)) for code, name in enumerate(names)}
    return {name: count for name, count in found.items() if count}


def _times(seconds: npt.NDArray[np.float64]) -> dict[str, float | None]:
    if not len(seconds):
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99))
    return {"mean": float(seconds.mean()), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def _mean(values: npt.NDArray[np.float64]) -> float:
    if not len(values):
        return 0.0
    return math.nan if np.isnan(values).all() else float(np.nanmean(values))


def _tokens_per_s(served: Rows) -> dict[str, float | None]:
    """Of each request after its first token: what its reader sees."""
    done = served[~np.isnan(served["finished_s"]) & (served["output_tokens"] > 1)]
    if not len(done):
        return {"p1": None, "p50": None}
    rates = (done["output_tokens"] - 1) / (done["finished_s"] - done["arrived_s"] - done["ttft_s"])
    p1, p50 = np.percentile(rates, (1, 50))
    return {"p1": float(p1), "p50": float(p50)}


def _arrived(rows: Rows, at_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """How many requests had come at each of these times."""
    return np.searchsorted(rows["arrived_s"], at_s, side="right").astype(np.float64)


def _slope(xs: npt.NDArray[np.float64], ys: npt.NDArray[np.float64]) -> float:
    """Of the straight line that fits best, per second."""
    if len(xs) < 2:
        return math.nan
    return float(np.polyfit(xs - xs[0], ys, 1)[0])
