"""What the prefix cache of hybrid models finds, and what its index costs.

    python -m bench.cache [--json] [--check] [--blocks N] [--only index|replay]

Index: ten million blocks, beside a plain dict. Replay: an hour of a chat service through one node's cache, without a
bound and in pools of 64 and 256 GiB, beside a cache with a state at every block and plain LRU. Times are CPU time of
the one thread.
"""

import argparse
import json
import sys

from bench.cache import index, replay
from bench.cache.results import Results

PARTS = ("index", "replay")


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.cache", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--check", action="store_true", help="fail when a figure is not what it must be")
    parser.add_argument("--blocks", type=int, default=10_000_000, help="in the index")
    parser.add_argument("--only", choices=PARTS, action="append", help="one part; may be repeated")
    args = parser.parse_args()
    parts = args.only or PARTS
    results = Results(
        index=index.measure(args.blocks) if "index" in parts else None,
        replay=list(replay.measure()) if "replay" in parts else None,
    )
    print(json.dumps(results.as_json(), indent=2) if args.json else "\n".join(results.table()))
    missed = list(results.misses()) if args.check else []
    for miss in missed:
        print(f"MISSED: {miss}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
