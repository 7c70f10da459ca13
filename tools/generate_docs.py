"""Writes `docs/reference/metrics.md` from the metric specs; `--check` only compares."""

import argparse
import sys
from pathlib import Path

from prfaas.observe import names

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "metrics.md"

INTRODUCTION = f"""# Metrics

Generated from `prfaas/observe/names.py` by `make docs`. Every process that has metrics serves them at `/metrics`.
A label in italics is open: it takes at most {names.MAX_OPEN_VALUES} values, then `{names.OTHER}`.
Series of closed labels exist from the start, at 0.
"""


def page() -> str:
    return "\n".join([INTRODUCTION, *(_section(component, metrics) for component, metrics in names.COMPONENTS.items())])


def _section(component: str, metrics: tuple[names.Metric, ...]) -> str:
    rows = [f"| `{m.name}` | {type(m).__name__.lower()} | {_labels(m)} | {m.help} |" for m in metrics]
    head = [f"## {component.capitalize()}", "", "| name | kind | labels | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def _labels(metric: names.Metric) -> str:
    return "; ".join(
        f"{label.name}: {', '.join(label.values)}" if label.values else f"*{label.name}*" for label in metric.labels
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when the page is stale; write nothing")
    if not parser.parse_args().check:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        print("docs/reference/metrics.md is stale: run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
