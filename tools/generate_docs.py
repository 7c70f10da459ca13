"""Writes `docs/reference` from the code that it describes; `--check` only compares."""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.reference import api, cli, configuration, metrics, vllm_compatibility

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "api.md": api.page,
    "cli.md": cli.page,
    "configuration.md": configuration.page,
    "metrics.md": metrics.page,
    "vllm-compatibility.md": vllm_compatibility.page,
}


def stale(folder: Path) -> Iterator[str]:
    """Names of pages that are not what the code says now."""
    for name, page in PAGES.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != page():
            yield name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when a page is stale; write nothing")
    if not parser.parse_args().check:
        FOLDER.mkdir(parents=True, exist_ok=True)
        for name, page in PAGES.items():
            (FOLDER / name).write_text(page(), encoding="utf-8")
        return 0
    found = [*stale(FOLDER)]
    for name in found:
        print(f"docs/reference/{name} is stale: run `make docs`", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
