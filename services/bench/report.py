"""The report of a bench: rows for a terminal, and one HTML page that loads nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prfaas.sim.document import Block, Chart, Heading, Table, Text, html
from prfaas.sim.plots import Line, distribution, line_chart
from services.bench.drive import Outcome

LATENCIES = {
    "ttft_seconds": "TTFT",
    "itl_seconds": "ITL, between pieces",
    "tpot_seconds": "TPOT, mean per request",
    "e2e_seconds": "E2E, whole answer",
}
QUANTILES = ("mean", "p50", "p90", "p99", "max")
HEAD = (
    "rate/s",
    "sent",
    "failed",
    "throughput/s",
    "goodput/s",
    "good",
    "TTFT p50",
    "TTFT p90",
    "ITL p50",
    "ITL p99",
    "",
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: its figures, and the outcomes that they were made of."""

    figures: Mapping[str, Any]
    outcomes: Sequence[Outcome]


def verdict(figures: Mapping[str, Any]) -> str:
    if figures["generator"]["was_bottleneck"]:
        return "generator limited"
    return "meets SLO" if figures["meets_slo"] else "misses SLO"


def run_rows(runs: Sequence[Measured]) -> list[list[str]]:
    return [_row(run.figures) for run in runs]


def _row(told: Mapping[str, Any]) -> list[str]:
    ttft, itl = told["ttft_seconds"], told["itl_seconds"]
    return [
        f"{told['rate_per_s']:.3g}",
        str(told["sent"]),
        str(told["sent"] - told["completed"]),
        f"{told['throughput_per_s']:.2f}",
        f"{told['goodput_per_s']:.2f}",
        f"{told['good_share']:.1%}",
        *(ms(value) for value in (ttft["p50"], ttft["p90"], itl["p50"], itl["p99"])),
        verdict(told),
    ]


def latency_rows(figures: Mapping[str, Any]) -> list[list[str]]:
    return [[label, *(ms(figures[name][q]) for q in QUANTILES)] for name, label in LATENCIES.items()]


def generator_line(figures: Mapping[str, Any]) -> str:
    own = figures["generator"]
    line = (
        f"Generator: {own['cpu_ratio']:.0%} of a core, at most {own['most_in_flight']} requests at a time, sends late"
        f" by p99 {ms(own['late_seconds']['p99'])}, event loop lag p99 {ms(own['lag_seconds']['p99'])}."
    )
    if own["was_bottleneck"]:
        return f"{line} IT MAY HAVE BEEN THE BOTTLENECK: {'; '.join(own['why'])}. These figures are not the server's."
    return f"{line} It was not the bottleneck."


def ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f} ms"


def page(about: Mapping[str, Any], runs: Sequence[Measured], highest_per_s: float | None, searched: bool) -> str:
    blocks: list[Block] = [Table(("setting", "value"), [[name, str(value)] for name, value in about.items()])]
    if searched:
        found = "no rate that was tried" if highest_per_s is None else f"{highest_per_s:.3g} requests/s"
        blocks.append(Text(f"Highest rate that meets the SLO: {found}."))
    blocks.append(Table(HEAD, run_rows(runs)))
    if len(runs) > 1:
        blocks += _by_rate(runs)
    for number, run in enumerate(runs):
        blocks += _of_run(number, run)
    blocks.append(
        Text(
            "Latencies count from the time at which a request was due, whenever it was sent. Good: whole, and within "
            "both bounds. Throughput and goodput are over the time until the last answer."
        )
    )
    return html("prfaas bench", blocks)


def _by_rate(runs: Sequence[Measured]) -> list[Block]:
    told = sorted((run.figures for run in runs), key=lambda each: each["rate_per_s"])

    def line(name: str, value: Any) -> Line:
        return Line(name, [(each["rate_per_s"], value(each)) for each in told])

    rates = [
        line("throughput", lambda each: each["throughput_per_s"]),
        line("goodput", lambda each: each["goodput_per_s"]),
    ]
    times = [line(q, lambda each, q=q: _or_gap(each["ttft_seconds"][q])) for q in ("p50", "p90", "p99")]
    return [
        Heading("By rate"),
        Chart(
            "rates", "What was served, and what of it was good.", line_chart("Served", "offered/s", "requests/s", rates)
        ),
        Chart("ttft-by-rate", "Time to the first token.", line_chart("TTFT", "offered/s", "seconds", times)),
    ]


def _or_gap(value: float | None) -> float:
    return float("nan") if value is None else value


def _of_run(number: int, run: Measured) -> list[Block]:
    told, done = run.figures, [each for each in run.outcomes if each.failed is None and each.ttft_s is not None]
    over_time = [Line("TTFT", [(each.planned.at_s, _or_gap(each.ttft_s)) for each in done])]
    by_length = sorted((float(each.prompt_tokens or each.planned.prompt_tokens), _or_gap(each.ttft_s)) for each in done)
    ttft = [Line("TTFT", distribution(_or_gap(each.ttft_s) for each in done), steps=True)]
    itl = [Line("ITL", distribution(gap for each in done for gap in each.gaps_s), steps=True)]
    blocks: list[Block] = [
        Heading(f"At {told['rate_per_s']:.3g} requests/s: {verdict(told)}"),
        Table(("latency", *QUANTILES), latency_rows(told)),
        Text(generator_line(told)),
    ]
    if told["failed"]:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(told["failed"].items()))
        blocks.append(Text(f"Failed: {counts}. For example: {told['failures'][0]}"))
    return [
        *blocks,
        Chart(f"ttft-{number}", "Share of requests within.", line_chart("TTFT", "seconds", "share", ttft)),
        Chart(f"itl-{number}", "Share of gaps within.", line_chart("ITL", "seconds", "share", itl)),
        Chart(
            f"time-{number}", "By the time it was due.", line_chart("TTFT", "second of the run", "seconds", over_time)
        ),
        Chart(
            f"length-{number}", "By prompt length.", line_chart("TTFT", "tokens", "seconds", [Line("TTFT", by_length)])
        ),
    ]
