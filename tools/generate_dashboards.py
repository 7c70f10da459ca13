"""Writes the Grafana dashboards from the metric specs; `--check` only compares."""

import argparse
import json
import sys
from pathlib import Path

from tools.dashboards.grafana import Dashboard, described
from tools.dashboards.kv import CACHE, TRANSFER
from tools.dashboards.nodes import CONTROL, WORKERS
from tools.dashboards.requests import OVERVIEW, ROUTERS

FOLDER = Path(__file__).resolve().parent.parent / "deploy" / "helm" / "prfaas" / "dashboards"

DASHBOARDS: tuple[Dashboard, ...] = (OVERVIEW, ROUTERS, TRANSFER, CACHE, WORKERS, CONTROL)


def pages() -> dict[str, str]:
    """What each file holds, by name."""
    return {f"{each.name}.json": json.dumps(described(each), indent=1) + "\n" for each in DASHBOARDS}


def stale(folder: Path) -> list[str]:
    """Files that are not what they should be, missing and superfluous ones too."""
    wanted = pages()
    found = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.json")}
    return sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when a dashboard is stale; write nothing")
    if parser.parse_args().check:
        if wrong := stale(FOLDER):
            print(f"stale dashboards: {', '.join(wrong)}: run `make docs`", file=sys.stderr)
        return 1 if wrong else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in stale(FOLDER):
        (FOLDER / name).unlink(missing_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
