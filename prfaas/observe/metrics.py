"""The metrics of one process: prometheus-client objects built from the specs in `prfaas.observe.names`.

Series of closed labels, and of the open values known at the start, are exported as 0 before anything happened: a rate
over a series that appears with its first event would miss that event. May be used from any thread.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import prometheus_client as prometheus

from prfaas.observe import names

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NO_VALUES: Mapping[str, Sequence[str]] = {}

_Family = prometheus.Counter | prometheus.Gauge | prometheus.Histogram
#: A metric's name and its label values in the spec's order.
_Series = tuple[str, ...]


def _family(metric: names.Metric, registry: prometheus.CollectorRegistry) -> _Family:
    labels = [label.name for label in metric.labels]
    match metric:
        case names.Counter():
            return prometheus.Counter(metric.name, metric.help, labels, registry=registry)
        case names.Gauge():
            return prometheus.Gauge(metric.name, metric.help, labels, registry=registry)
        case names.Histogram():
            return prometheus.Histogram(metric.name, metric.help, labels, registry=registry, buckets=metric.buckets)


class Metrics:
    """`open_values` names values of open labels known at the start, for example `{"model": ("tiny",)}`."""

    def __init__(self, metrics: Iterable[names.Metric], open_values: Mapping[str, Sequence[str]] = NO_VALUES) -> None:
        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=self._registry)
        self._families: dict[str, _Family] = {}
        self._open: dict[str, set[str]] = {}
        self._children: dict[_Series, _Family] = {}
        self._followed: dict[_Series, float] = {}
        for metric in metrics:
            self._families[metric.name] = _family(metric, self._registry)
            values = (label.values or open_values.get(label.name, ()) for label in metric.labels)
            for combination in itertools.product(*values):
                self._child(metric, {label.name: v for label, v in zip(metric.labels, combination, strict=True)})

    def add(self, counter: names.Counter, amount: float = 1, **labels: str) -> None:
        child = self._child(counter, labels)
        assert isinstance(child, prometheus.Counter)
        child.inc(amount)

    def follow(self, counter: names.Counter, total: float, **labels: str) -> None:
        """Bring the counter up to a running total that another process counts. A total that fell has started again."""
        key = (counter.name, *(labels[label.name] for label in counter.labels))
        before = self._followed.get(key, 0.0)
        self._followed[key] = total
        self.add(counter, total - before if total >= before else total, **labels)

    def set(self, gauge: names.Gauge, value: float, **labels: str) -> None:
        child = self._child(gauge, labels)
        assert isinstance(child, prometheus.Gauge)
        child.set(value)

    def choose(self, gauge: names.Gauge, value: str) -> None:
        """One-hot: 1 for `value` of the gauge's only label, 0 for its others."""
        (label,) = gauge.labels
        for each in label.values:
            self.set(gauge, float(each == value), **{label.name: each})

    def observe(self, histogram: names.Histogram, value: float, **labels: str) -> None:
        child = self._child(histogram, labels)
        assert isinstance(child, prometheus.Histogram)
        child.observe(value)

    def exposition(self) -> bytes:
        """What `/metrics` answers, with CONTENT_TYPE."""
        return prometheus.generate_latest(self._registry)

    def _child(self, metric: names.Metric, labels: Mapping[str, str]) -> _Family:
        assert len(labels) == len(metric.labels), f"{metric.name} has labels {[label.name for label in metric.labels]}"
        values = [self._bounded(label, labels[label.name]) for label in metric.labels]
        key = (metric.name, *values)
        child = self._children.get(key)
        if child is None:
            family = self._families[metric.name]
            child = family.labels(*values) if metric.labels else family
            self._children[key] = child
        return child

    def _bounded(self, label: names.Label, value: str) -> str:
        if label.values:
            return value if value in label.values else names.OTHER
        seen = self._open.setdefault(label.name, set())
        if value not in seen and len(seen) >= names.MAX_OPEN_VALUES:
            return names.OTHER
        seen.add(value)
        return value
