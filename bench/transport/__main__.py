"""How close KV transfers come to what the machine and the line allow.

    python -m bench.transport [--json] [--check] [--rounds N] [--only loopback|wan|layerwise|sharing ...]

Real pump and engine processes, from engine memory to engine memory, what has arrived compared with what was sent.
Loopback: beside iperf3, a C loop over sockets, Mooncake's transfer engine and NIXL, in turn. The rest runs over an
emulated line of 1 Gbit/s. Needs root and /dev/net/tun. Ratios within a run hold; absolute figures are the machine's.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.transport import layerwise, line, loopback, sharing
from bench.transport.results import Results
from bench.transport.wanted import misses
from tools.wan.rig import lacking

PARTS = ("loopback", "wan", "layerwise", "sharing")


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.transport", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--check", action="store_true", help="fail when a figure is not what it must be")
    parser.add_argument("--rounds", type=int, default=5, help="rounds on loopback")
    parser.add_argument("--only", choices=PARTS, action="append", help="one part; may be repeated")
    args = parser.parse_args()
    if (reason := lacking()) is not None:
        print(f"cannot measure: {reason}", file=sys.stderr)
        return 1
    _ask_for_precedence()
    results = _measure(args.only or PARTS, args.rounds)
    print(json.dumps(results.as_json(), indent=2) if args.json else "\n".join(results.table()))
    found = list(misses(results)) if args.check else []
    for miss in found:
        print(f"MISSED: {miss}", file=sys.stderr)
    return 1 if found else 0


def _measure(parts: list[str] | tuple[str, ...], rounds: int) -> Results:
    measures: dict[str, Callable[[], Any]] = {
        "loopback": lambda: loopback.measure(rounds),
        "wan": _wan,
        "layerwise": lambda: [row for rtt_ms in layerwise.RTTS_MS for row in layerwise.exposed(rtt_ms)],
        "sharing": sharing.sharing,
    }
    found: dict[str, Any] = {}
    for part in PARTS:
        if part in parts:
            print(f"{part}:", file=sys.stderr)
            found[part] = measures[part]()
    return Results(**found)


def _wan() -> list[line.LineShare]:
    return [line.share_of_line(rtt_ms, loss) for rtt_ms in line.RTTS_MS for loss in line.LOSSES]


def _ask_for_precedence() -> None:
    """What else runs on the machine should not be what is measured. Where we may not, it is."""
    with contextlib.suppress(OSError):
        os.nice(-10)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("-10")


if __name__ == "__main__":
    raise SystemExit(main())
