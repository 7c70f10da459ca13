"""What a request and a token cost on the token link: plain TCP beside gRPC, in plain and with certificates.

    python -m bench.token_link [--json] [--check] [--rounds N]

Router and worker are two processes over loopback; the worker answers by rule. The adapters take turns, round by round,
and of each the round with the least CPU counts: what else the machine does can only add. Read the ratios; absolute
figures are the machine's.
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from bench.token_link.plan import ADAPTERS, SCENARIOS, SECURITY, Scenario
from bench.token_link.router import link, measure
from prfaas.live.link_stream import LinkCounters
from services.certificates import write_all


@dataclass(frozen=True, slots=True)
class Row:
    adapter: str
    security: str
    scenario: str
    router_us_per_request: float
    worker_us_per_request: float
    router_us_per_token: float
    worker_us_per_token: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of gRPC's CPU to plain TCP's."""

    security: str
    scenario: str
    router: float
    worker: float
    wanted: float


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.token_link", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument(
        "--check", action="store_true", help="fail when the default is not as much cheaper as it must be"
    )
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rows = [row for security in SECURITY for row in _measured(security, args.rounds)]
    ratios = list(_ratios(rows))
    if args.json:
        print(
            json.dumps({"rows": [asdict(row) for row in rows], "ratios": [asdict(each) for each in ratios]}, indent=2)
        )
    else:
        print("\n".join(_table(rows, ratios)))
    missed = [each for each in ratios if each.router < each.wanted] if args.check else []
    for each in missed:
        print(f"MISSED: {each.scenario}, {each.security}: {each.router} times, not {each.wanted}", file=sys.stderr)
    return 1 if missed else 0


def _measured(security: str, rounds: int) -> list[Row]:
    with _worker(security) as (ports, certificates):
        return uvloop.run(_compare(ports, certificates, security, rounds))


async def _compare(ports: dict[str, int], certificates: Path | None, security: str, rounds: int) -> list[Row]:
    counters = LinkCounters()
    links = {adapter: link(adapter, ports, certificates, counters) for adapter in ADAPTERS}
    try:
        for over in links.values():
            await measure(over, SCENARIOS[0], ports["pid"])  # warms both processes
        found = defaultdict[tuple[str, Scenario], list[tuple[float, float]]](list)
        for turn in range(rounds):
            for scenario in SCENARIOS:
                for adapter, over in links.items():
                    print(f"{security}: round {turn + 1}, {scenario.name}, {adapter}", file=sys.stderr)
                    found[adapter, scenario].append(await measure(over, scenario, ports["pid"]))
    finally:
        await asyncio.gather(*(over.close() for over in links.values()))
    return [
        _row(adapter, security, scenario, min(ours for ours, _ in measured), min(theirs for _, theirs in measured))
        for (adapter, scenario), measured in found.items()
    ]


def _row(adapter: str, security: str, scenario: Scenario, router_s: float, worker_s: float) -> Row:
    requests, tokens = scenario.total, scenario.total * scenario.tokens
    per = (router_s / requests, worker_s / requests, router_s / tokens, worker_s / tokens)
    return Row(adapter, security, scenario.name, *(round(each * 1e6, 2) for each in per))


def _ratios(rows: list[Row]) -> Iterator[Ratio]:
    by = {(row.adapter, row.security, row.scenario): row for row in rows}
    wanted = {scenario.name: dict(zip(SECURITY, scenario.wanted, strict=True)) for scenario in SCENARIOS}
    default, other = ADAPTERS
    for (adapter, security, scenario), row in by.items():
        if adapter == default:
            dear = by[other, security, scenario]
            router = round(dear.router_us_per_request / row.router_us_per_request, 2)
            worker = round(dear.worker_us_per_request / row.worker_us_per_request, 2)
            yield Ratio(security, scenario, router, worker, wanted[scenario][security])


def _table(rows: list[Row], ratios: list[Ratio]) -> Iterator[str]:
    yield f"{'CPU in microseconds':30}{'':6}{'':6}{'router':>18}{'worker':>18}"
    yield f"{'':30}{'':6}{'':6}{'request':>9}{'token':>9}{'request':>9}{'token':>9}"
    for row in rows:
        figures = (
            row.router_us_per_request,
            row.router_us_per_token,
            row.worker_us_per_request,
            row.worker_us_per_token,
        )
        yield f"{row.scenario:30}{row.security:6}{row.adapter:6}" + "".join(f"{each:9.1f}" for each in figures)
    yield ""
    yield f"{'gRPC costs, times plain TCP':36}{'router':>8}{'worker':>8}"
    for each in ratios:
        yield f"{each.scenario:30}{each.security:6}{each.router:8.2f}{each.worker:8.2f}"


@contextlib.contextmanager
def _worker(security: str) -> Iterator[tuple[dict[str, int], Path | None]]:
    with tempfile.TemporaryDirectory() as folder:
        certificates = Path(folder) if security == "mtls" else None
        if certificates is not None:
            write_all(certificates)
        command = [sys.executable, "-m", "bench.token_link.worker", *([str(certificates)] if certificates else [])]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdin is not None and worker.stdout is not None
            try:
                yield json.loads(worker.stdout.readline()), certificates
            finally:
                worker.stdin.close()
                worker.wait(10)


if __name__ == "__main__":
    raise SystemExit(main())
