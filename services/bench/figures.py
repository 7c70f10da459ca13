"""Figures of a run, and what they say: does this rate meet the SLO, and was it the generator that was slow?"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.bench.drive import Driven, Outcome
from services.bench.load import Bounds

#: A generator that is this busy, or this late at its 99th percentile, has measured itself.
BUSY_RATIO, LATE_S = 0.8, 0.02
#: Failures told in words.
MAX_DETAILS = 5
#: A search gives up this far below where it began.
LEAST_SHARE = 1 / 64


@dataclass(frozen=True, slots=True)
class Slo:
    """A request is good if it came whole and within both. A rate meets the SLO when `share` of what is sent is good."""

    ttft_s: float
    #: On the mean time between its tokens.
    itl_s: float
    share: float

    def good(self, outcome: Outcome) -> bool:
        if outcome.failed is not None or outcome.ttft_s is None:
            return False
        tpot_s = outcome.tpot_s
        return outcome.ttft_s <= self.ttft_s and (tpot_s is None or tpot_s <= self.itl_s)


def measured(run: Driven, bounds: Bounds) -> list[Outcome]:
    """Those whose time came after the warm-up."""
    return [each for each in run.outcomes if each.planned.at_s >= bounds.warm_up_s]


def figures(run: Driven, rate_per_s: float, bounds: Bounds, slo: Slo, window_s: float) -> dict[str, Any]:
    outcomes = measured(run, bounds)
    done = [each for each in outcomes if each.failed is None]
    good = sum(map(slo.good, outcomes))
    ended_s = max((each.last_s for each in done), default=0.0) - bounds.warm_up_s
    # Of a server that falls behind, answers go on after the last request was sent.
    served_s = max(window_s, ended_s)
    output = sum(each.output_tokens for each in done)
    share = good / len(outcomes) if outcomes else 0.0
    return {
        "rate_per_s": rate_per_s,
        "window_seconds": window_s,
        "warm_up_requests": len(run.outcomes) - len(outcomes),
        "sent": len(outcomes),
        "completed": len(done),
        "failed": dict(Counter(each.failed for each in outcomes if each.failed is not None)),
        "failures": [f"{each.failed}: {_line(each.detail)}" for each in outcomes if each.failed][:MAX_DETAILS],
        "offered_per_s": len(outcomes) / window_s,
        "throughput_per_s": len(done) / served_s,
        "good": good,
        "good_share": share,
        "goodput_per_s": good / served_s,
        "meets_slo": bool(outcomes) and share >= slo.share,
        "prompt_tokens": sum(each.prompt_tokens or each.planned.prompt_tokens for each in done),
        "output_tokens": output,
        "output_tokens_per_s": output / served_s,
        "ttft_seconds": quantiles(each.ttft_s for each in done),
        "itl_seconds": quantiles(gap for each in done for gap in each.gaps_s),
        "tpot_seconds": quantiles(each.tpot_s for each in done),
        "e2e_seconds": quantiles(each.e2e_s for each in done),
        "generator": _generator(run, outcomes),
    }


def _line(detail: str) -> str:
    """Whatever a server has said, as one line that does nothing to a terminal."""
    return "".join(each if each.isprintable() else " " for each in detail[:300]).rstrip()


def _generator(run: Driven, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    cpu_ratio = run.cpu_s / run.elapsed_s if run.elapsed_s > 0 else 0.0
    late = quantiles(each.late_s for each in outcomes)
    lag = quantiles(run.lags_s)
    why = []
    if cpu_ratio > BUSY_RATIO:
        why.append(f"it used {cpu_ratio:.0%} of a core")
    if (late["p99"] or 0.0) > LATE_S:
        why.append(f"a hundredth of the requests was sent {late['p99']:.3f} s late or more")
    if (lag["p99"] or 0.0) > LATE_S:
        why.append(f"its event loop lagged {lag['p99']:.3f} s at the 99th percentile")
    return {
        "cpu_ratio": cpu_ratio,
        "late_seconds": late,
        "lag_seconds": lag,
        "most_in_flight": run.most_in_flight,
        "was_bottleneck": bool(why),
        "why": why,
    }


def quantiles(values: Iterable[float | None]) -> dict[str, float | None]:
    known = np.array([value for value in values if value is not None], dtype=float)
    if not len(known):
        return dict.fromkeys(("mean", "p50", "p90", "p99", "max"))
    p50, p90, p99 = np.percentile(known, (50, 90, 99))
    return {
        "mean": float(known.mean()),
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "max": float(known.max()),
    }


def next_rate(tried: Sequence[tuple[float, bool]], start_per_s: float, precision: float) -> float | None:
    """The rate to try next on the way to the highest that meets the SLO; None when it is known well enough.

    Doubles until one fails, halves until one holds (or the rate is a trifle), then halves the gap between the two. A
    rate that held above one that failed was luck.
    """
    if not tried:
        return start_per_s
    bad = min((rate for rate, holds in tried if not holds), default=math.inf)
    good = max((rate for rate, holds in tried if holds and rate < bad), default=0.0)
    if bad == math.inf:
        return good * 2
    if good == 0.0:
        return bad / 2 if bad > start_per_s * LEAST_SHARE else None
    return None if bad / good <= 1 + precision else math.sqrt(bad * good)


def highest(tried: Sequence[tuple[float, bool]]) -> float | None:
    """The highest rate that met the SLO and above no rate that did not."""
    bad = min((rate for rate, holds in tried if not holds), default=math.inf)
    return max((rate for rate, holds in tried if holds and rate < bad), default=None)
