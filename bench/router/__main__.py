"""What the router costs, beside nginx and the routers of vLLM and SGLang in the same run.

    python -m bench.router [--json] [--check] [--only PART ...] [--targets NAME,...] [--rounds N]
                           [--harness FOLDER] [--peers FOLDER] [--install-peers]

The harness brings the mock worker of the others and the load generator. Ours runs before workers of its own protocol,
and does all it does in production but for one log line a request. Each round runs all targets in turn; figures are
medians, and CPU time is that of the router's own processes. Ratios within a run hold; times need a quiet machine.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from bench.router import lasting
from bench.router.harness import PEERS, Harness
from bench.router.model import model_folder
from bench.router.ours import BARE, PD, PLAIN, REPOSITORY, VARIANTS, targets
from bench.router.parts import long_parts
from bench.router.results import Row, rows_of, table
from bench.router.wanted import IDLE_STREAMS, misses

#: Of the harness's scenarios, and what is measured here besides.
SCENARIOS = {"requests": ("ns32",), "streams": ("sse64", "sse512"), "long": ("longuniq",)}
BESIDE = ("order", "idle", "memory")
OWN = tuple(variant.name for variant in VARIANTS)
#: Beside the others' as a rule; the rest of ours shows what one thing changes.
COMPARED = (PLAIN.name, PD.name)
MEMORY_REQUESTS = 1_000_000


def main() -> int:
    args = _arguments()
    build = REPOSITORY / "build" / "bench-router"
    harness = Harness(args.harness.resolve(), args.peers.resolve(), build)
    if (reason := harness.missing()) is not None:
        print(f"cannot measure: {reason}", file=sys.stderr)
        return 1
    if args.install_peers:
        harness.install_peers()
    lasting.raise_file_limit()
    rows = _measure(harness, model_folder(build), args)
    print(msgspec.json.format(msgspec.json.encode(rows)).decode() if args.json else "\n".join(table(rows)))
    found = list(misses(rows)) if args.check else []
    for miss in found:
        print(f"MISSED: {miss}", file=sys.stderr)
    return 1 if found else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.router", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--check", action="store_true", help="fail when a figure is not what it must be")
    parser.add_argument("--only", choices=(*SCENARIOS, *BESIDE), action="append", help="one part; may be repeated")
    parser.add_argument("--targets", help=f"of {', '.join((*PEERS, *OWN))}, separated by commas")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the parts with other routers")
    parser.add_argument("--requests", type=int, default=MEMORY_REQUESTS, help="requests of the memory part")
    parser.add_argument("--quiet-wait", type=float, default=1.0, help="seconds to wait for an idle machine, each run")
    parser.add_argument("--harness", type=Path, default=REPOSITORY.parent / "shared" / "bench" / "router")
    parser.add_argument("--peers", type=Path, default=REPOSITORY / "build" / "peers", help="folder of other routers")
    parser.add_argument("--install-peers", action="store_true", help="put them there first (PyPI)")
    return parser.parse_args()


def _measure(harness: Harness, model: Path, args: argparse.Namespace) -> list[Row]:
    parts = args.only or (*SCENARIOS, *BESIDE)
    wanted = args.targets.split(",") if args.targets else [*PEERS, *COMPARED]
    rows: list[Row] = []
    scenarios = [scenario for part, names in SCENARIOS.items() if part in parts for scenario in names]
    if scenarios:
        rows += _compare(harness, model, wanted, scenarios, args)
    beside: dict[str, Callable[[], Row]] = {
        "order": lambda: lasting.order(harness, model),
        "idle": lambda: lasting.idle(harness, model, IDLE_STREAMS),
        "memory": lambda: lasting.memory(harness, model, args.requests),
    }
    for name, measure in beside.items():
        if name in parts:
            print(f"{name}:", file=sys.stderr)
            rows.append(measure())
    return rows


def _compare(
    harness: Harness, model: Path, wanted: Sequence[str], scenarios: Sequence[str], args: argparse.Namespace
) -> list[Row]:
    absent = harness.absent([name for name in wanted if name in PEERS])
    for name, reason in absent.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)
    present = [name for name in wanted if name not in absent]
    rows = list(rows_of(harness.run(present, scenarios, args.rounds, targets(model), args.quiet_wait)))
    if "longuniq" in scenarios:
        again = [name for name in present if name in PEERS and name.endswith("-pd")]
        rows += rows_of(harness.run([*again, BARE.name], ("long",), args.rounds, targets(model), args.quiet_wait))
        rows.append(long_parts(model, harness.long_prompt()))
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
