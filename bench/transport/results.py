"""What a run has measured, as a table and as JSON. A part that was not run is None."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.transport.layerwise import Exposed
from bench.transport.line import LineShare
from bench.transport.rate import Rate
from bench.transport.sharing import Sharing


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    loopback: dict[str, Rate] | None = None
    wan: Sequence[LineShare] | None = None
    layerwise: Sequence[Exposed] | None = None
    sharing: Sharing | None = None

    def as_json(self) -> dict[str, Any]:
        return {part: value for part, value in asdict(self).items() if value is not None}

    def table(self) -> Iterator[str]:
        if self.loopback is not None:
            yield from _loopback(self.loopback)
        if self.wan is not None:
            yield from _wan(self.wan)
        if self.layerwise is not None:
            yield from _layerwise(self.layerwise)
        if self.sharing is not None:
            yield from _sharing(self.sharing)


def _loopback(rates: Mapping[str, Rate]) -> Iterator[str]:
    yield f"{'loopback, 1 MiB blocks':24}{'GB/s':>8}{'CPU s/GB':>10}{'of iperf3':>11}"
    best = rates.get("iperf3")
    for name, rate in rates.items():
        share = f"{rate.gbytes_per_s / best.gbytes_per_s:11.0%}" if best else ""
        yield f"{name:24}{rate.gbytes_per_s:8.2f}{rate.cpu_s_per_gb:10.2f}{share}"
    yield ""


def _wan(rows: Sequence[LineShare]) -> Iterator[str]:
    yield f"{'Mbit/s':>8}{'RTT ms':>8}{'loss':>8}{'of the line':>13}{'sent again':>12}"
    for row in rows:
        yield f"{row.mbit:8.0f}{row.rtt_ms:8.0f}{row.loss:8.2%}{row.line_ratio:13.1%}{row.retrans_ratio:12.2%}"
    yield ""


def _layerwise(rows: Sequence[Exposed]) -> Iterator[str]:
    yield f"{'RTT ms':>8}{'lanes':>8}{'left after the last layer, s':>30}{'state alone, s':>16}"
    for row in rows:
        lanes = "warm" if row.warm else "cold"
        yield f"{row.rtt_ms:8.0f}{lanes:>8}{row.exposed_s:30.3f}{row.state_s:16.3f}"
    yield ""


def _sharing(found: Sharing) -> Iterator[str]:
    yield f"two transfers of one worker: {found.even:.2f} to 1"
    yield f"two transfers of two workers: {found.even_pumps:.2f} to 1"
    yield f"a tenant's share, of what its weight says: {found.tenant_share:.3f}"
    yield f"a small urgent transfer beneath a backlog: {found.urgent:.2f} times as long as alone"
