"""`docs/reference/metrics.md`, from the metric specs."""

from prfaas.observe import names
from tools.reference.table import code, table

INTRODUCTION = f"""# Metrics

Generated from `prfaas/observe/names.py` by `make docs`. Every process that has metrics serves them at `/metrics`.
A label in italics is open: it takes at most {names.MAX_OPEN_VALUES} values, then `{names.OTHER}`.
Series of closed labels exist from the start, at 0.
"""


def page() -> str:
    return "\n".join([INTRODUCTION, *(_section(component, metrics) for component, metrics in names.COMPONENTS.items())])


def _section(component: str, metrics: tuple[names.Metric, ...]) -> str:
    rows = [(code(m.name), type(m).__name__.lower(), _labels(m), m.help) for m in metrics]
    return "\n".join([f"## {component.capitalize()}", "", table(("name", "kind", "labels", "meaning"), rows), ""])


def _labels(metric: names.Metric) -> str:
    return "; ".join(
        f"{label.name}: {', '.join(label.values)}" if label.values else f"*{label.name}*" for label in metric.labels
    )
