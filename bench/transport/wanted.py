"""What the measured figures must be. All are ratios within one run, or compared with the line's own times."""

from collections.abc import Iterator, Mapping, Sequence

from bench.transport.layerwise import Exposed
from bench.transport.line import LineShare
from bench.transport.rate import Rate
from bench.transport.results import Results
from bench.transport.sharing import Sharing

#: Throughput of ours, at least this many times that of the other.
_THROUGHPUT = (
    ("ours", "iperf3", 0.80),
    ("ours_aes", "iperf3", 0.55),
    ("ours", "mooncake", 2.0),
    ("ours", "nixl", 2.0),
    ("ours_busy_engine", "ours_busy_elsewhere", 1 / 1.1),
)
_CPU_OF_C_LOOP = 1.35
#: On the line that has this round trip and loss.
_RTT_MS, _LOSS = 30.0, 0.001
_LINE_RATIO, _RETRANS_RATIO = 0.93, 0.005
#: By round trip and whether the lanes are warm: what may be left to wait for, beside the state.
_EXPOSED_S: Mapping[tuple[float, bool], float] = {(30.0, False): 0.10, (30.0, True): 0.10, (80.0, True): 0.15}
_EVEN, _TENANT, _URGENT = 1.2, 0.05, 3.0


def misses(results: Results) -> Iterator[str]:
    """What is not as it must be, in words. What was not measured is not missed."""
    if results.loopback is not None:
        yield from _loopback(results.loopback)
    if results.wan is not None:
        yield from _wan(results.wan)
    if results.layerwise is not None:
        yield from _layerwise(results.layerwise)
    if results.sharing is not None:
        yield from _sharing(results.sharing)


def _loopback(rates: Mapping[str, Rate]) -> Iterator[str]:
    for name, other, least in _THROUGHPUT:
        if name in rates and other in rates:
            ratio = rates[name].gbytes_per_s / rates[other].gbytes_per_s
            if ratio < least:
                yield f"{name} has {ratio:.2f} of {other}'s throughput, not {least:.2f}"
    ratio = rates["ours"].cpu_s_per_gb / rates["c_loop"].cpu_s_per_gb
    if ratio > _CPU_OF_C_LOOP:
        yield f"ours takes {ratio:.2f} of the C loop's CPU time for a GB, more than {_CPU_OF_C_LOOP}"


def _wan(rows: Sequence[LineShare]) -> Iterator[str]:
    for row in rows:
        if (row.rtt_ms, row.loss) == (_RTT_MS, _LOSS):
            where = f"{row.mbit:.0f} Mbit/s, {row.rtt_ms:.0f} ms, {row.loss:.1%} loss"
            if row.line_ratio < _LINE_RATIO:
                yield f"{where}: {row.line_ratio:.1%} of the line, not {_LINE_RATIO:.0%}"
            if row.retrans_ratio > _RETRANS_RATIO:
                yield f"{where}: {row.retrans_ratio:.2%} sent again, more than {_RETRANS_RATIO:.1%}"


def _layerwise(rows: Sequence[Exposed]) -> Iterator[str]:
    for row in rows:
        allowed = _EXPOSED_S.get((row.rtt_ms, row.warm))
        if allowed is not None and row.exposed_s > row.state_s + allowed:
            lanes = "warm" if row.warm else "cold"
            yield (
                f"layer by layer, {row.rtt_ms:.0f} ms, {lanes} lanes: {row.exposed_s:.3f} s are left, "
                f"more than {allowed} s beside the state's {row.state_s:.3f} s"
            )


def _sharing(found: Sharing) -> Iterator[str]:
    for name, ratio in (("one worker", found.even), ("two workers", found.even_pumps)):
        if ratio > _EVEN:
            yield f"two transfers of {name} share the line {ratio:.2f} to 1, worse than {_EVEN}"
    if abs(found.tenant_share - 1) > _TENANT:
        yield f"a tenant has {found.tenant_share:.3f} of its share, further off than {_TENANT:.0%}"
    if found.urgent > _URGENT:
        yield f"a small urgent transfer takes {found.urgent:.1f} times as long beneath a backlog, not {_URGENT:.0f}"
