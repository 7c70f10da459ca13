"""What must hold between the figures of one run. A figure that was not measured is not judged."""

from collections.abc import Iterator, Sequence

from bench.router.results import Row

LONG_MS, ADDED_TTFT_MS, EVENTS_PER_S, MEMORY_MB, IDLE_STREAMS = 40.0, 1.0, 10_240, 120.0, 5000
#: Of the better one of the two in Rust.
EVENT_SHARE = 0.6
#: Memory that may still come in the second half of a million requests, and the per cent of its gap that a router may
#: add: neither is a trend.
GROWTH_MB, GAP_NOISE = 2.0, 1.05
RUST_PLAIN, RUST_PD = ("vllm-rr", "sglang-rr"), ("vllm-pd", "sglang-pd")


class _Figures:
    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = {(row.scenario, row.target): row for row in rows}

    def get(self, scenario: str, target: str, name: str) -> float | None:
        row = self.rows.get((scenario, target))
        if row is None:
            return None
        found = row.more.get(name) if name in row.more else getattr(row, name, None)
        return None if found is None else float(found)


def misses(rows: Sequence[Row]) -> Iterator[str]:
    figures = _Figures(rows)
    yield from _requests(figures)
    for scenario in ("sse64", "sse512"):
        for ours, rust in (("ours", RUST_PLAIN), ("ours-pd", RUST_PD)):
            yield from _streams(figures, scenario, ours, rust)
    yield from _below("memory: MB", figures.get("memory", "ours-bare", "rss_mb"), MEMORY_MB)
    yield from _below("memory: MB more in the last half", figures.get("memory", "ours-bare", "growth_mb"), GROWTH_MB)
    held = figures.get("idle", "ours", "streams")
    if held is not None and held < IDLE_STREAMS:
        yield f"idle: {held:.0f} streams held, not {IDLE_STREAMS}"
    for (scenario, target), row in figures.rows.items():
        if target.startswith("ours") and row.errors:
            yield f"{scenario} {target}: {row.errors} answers that were wrong, or none"


def _requests(figures: _Figures) -> Iterator[str]:
    for ours, vllm, sglang in (("ours", "vllm-pd", "sglang-rr"), ("ours-pd", "vllm-pd", "sglang-pd")):
        for peer in (vllm, sglang):
            yield from _below(
                f"ns32 {ours}: CPU us/request, {peer}'s",
                figures.get("ns32", ours, "cpu_us_per_request"),
                figures.get("ns32", peer, "cpu_us_per_request"),
            )
    yield from _below(
        "long: CPU us/request without tokenizing, hashing and matching, vllm-pd's",
        figures.get("long", "ours-bare", "cpu_us_per_request"),
        figures.get("long", "vllm-pd", "cpu_us_per_request"),
    )
    for ours in ("ours", "ours-pd"):
        whole_us = figures.get("longuniq", ours, "cpu_us_per_request")
        yield from _below(f"long {ours}: CPU ms/request", None if whole_us is None else whole_us / 1000, LONG_MS)


def _streams(figures: _Figures, scenario: str, ours: str, rust: tuple[str, ...]) -> Iterator[str]:
    def better(name: str) -> float | None:
        return min([found for peer in rust if (found := figures.get(scenario, peer, name)) is not None], default=None)

    event_us, gap_ms = better("cpu_us_per_event"), better("gap_p99_ms")
    name = f"{scenario} {ours}"
    yield from _below(
        f"{name}: CPU us/event, {EVENT_SHARE} of the better Rust router's",
        figures.get(scenario, ours, "cpu_us_per_event"),
        None if event_us is None else EVENT_SHARE * event_us,
    )
    yield from _below(
        f"{name}: gap p99 in ms, the better Rust router's",
        figures.get(scenario, ours, "gap_p99_ms"),
        None if gap_ms is None else GAP_NOISE * gap_ms,
    )
    direct, own = figures.get(scenario, "direct", "ttft_p50_ms"), figures.get(scenario, ours, "ttft_p50_ms")
    added_ms = None if direct is None or own is None else own - direct
    yield from _below(f"{name}: TTFT p50 added in ms", added_ms, ADDED_TTFT_MS)
    carried = figures.get(scenario, ours, "events_per_s")
    if scenario == "sse512" and carried is not None and carried < EVENTS_PER_S:
        yield f"{name}: {carried:,.0f} events/s carried, not {EVENTS_PER_S:,}"


def _below(what: str, figure: float | None, limit: float | None) -> Iterator[str]:
    if figure is not None and limit is not None and figure > limit:
        yield f"{what}: {figure:,.2f} is more than {limit:,.2f}"
