"""Which series a PromQL expression asks for, and whether processes of prfaas have such.

Only what such expressions consist of is understood: selectors with a metric's name before their braces, and lists of
labels after `by`, `on` and the like.
"""

import re
from dataclasses import dataclass

from prfaas.observe import names

_STRING = r'"(?:[^"\\]|\\.)*"'
_MATCHER = rf"\s*(\w+)\s*(=~|!~|!=|=)\s*({_STRING})\s*"
_SELECTOR = re.compile(rf"\b(prfaas_\w+)(\{{(?:{_STRING}|[^}}\"])*\}})?")
_LABELS = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
#: What Prometheus puts on each series that it scrapes.
SCRAPED = frozenset({"job", "instance"})
#: What a histogram's series are called after its name.
PARTS = ("_bucket", "_sum", "_count")

METRICS = {metric.name: metric for metrics in names.COMPONENTS.values() for metric in metrics}


@dataclass(frozen=True, slots=True)
class Matcher:
    label: str
    operator: str
    value: str

    @property
    def values(self) -> tuple[str, ...]:
        """Of a pattern its alternatives."""
        return tuple(self.value.split("|")) if "~" in self.operator else (self.value,)


@dataclass(frozen=True, slots=True)
class Selector:
    """`text` is how it is written."""

    name: str
    matchers: tuple[Matcher, ...]
    text: str

    @property
    def metric(self) -> names.Metric | None:
        if isinstance(metric := METRICS.get(self.name), names.Counter | names.Gauge):
            return metric
        for part in PARTS:
            if self.name.endswith(part) and isinstance(found := METRICS.get(self.name[: -len(part)]), names.Histogram):
                return found
        return None


def selectors(expression: str) -> list[Selector]:
    return [Selector(found[1], tuple(_matchers(found[2] or "")), found[0]) for found in _SELECTOR.finditer(expression)]


def _matchers(braces: str) -> list[Matcher]:
    return [Matcher(each[1], each[2], each[3][1:-1]) for each in re.finditer(_MATCHER, braces)]


def faults(expression: str) -> list[str]:
    """What it asks for that there is not: metrics, labels, and values of closed labels."""
    found, grouped = list[str](), set(SCRAPED)
    for selector in selectors(expression):
        if (metric := selector.metric) is None:
            found.append(f"there is no series {selector.name}")
            continue
        labels = _labels(selector.name, metric)
        grouped |= labels.keys()
        for matcher in selector.matchers:
            if matcher.label not in labels:
                found.append(f"{selector.name} has no label {matcher.label}")
            elif known := labels[matcher.label]:
                found += [f"{matcher.label} is never {value}" for value in matcher.values if value not in known]
    named = {label.strip() for each in _LABELS.finditer(expression) for label in each[1].split(",") if label.strip()}
    return found + [f"no series here has the label {label}" for label in sorted(named - grouped)]


def _labels(name: str, metric: names.Metric) -> dict[str, tuple[str, ...]]:
    """The values of each label; none where it is open."""
    labels = {label.name: label.values for label in metric.labels} | dict.fromkeys(SCRAPED, ())
    if isinstance(metric, names.Histogram) and name.endswith("_bucket"):
        labels["le"] = (*(str(float(bound)) for bound in metric.buckets), "+Inf")
    return labels
