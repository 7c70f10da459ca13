"""The metrics of one process: prometheus-client objects built from the specs in `prfaas.observe.names`.

Series of closed labels, and of the open values known at the start, are exported as 0 before anything happened: a rate
over a series that appears with its first event would miss that event. What is counted for every request is counted on a
series that was looked up before (`counter`, `histogram`). For the thread of the event loop alone.
"""

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

import prometheus_client as prometheus
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from prfaas.observe import names

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NO_VALUES: Mapping[str, Sequence[str]] = {}


class Buckets:
    """One series of a histogram. The client library's own cost several times as much, as they may be used from any
    thread."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self.sum = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def cumulated(self) -> list[tuple[str, float]]:
        """How many were at most this, by bound."""
        bounds = (*map(floatToGoString, self._bounds), "+Inf")
        return [*zip(bounds, map(float, itertools.accumulate(self._counts)), strict=True)]


class Total:
    """One series of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        self.value += amount


class _Counted:
    """All series of one counter or histogram, as the registry collects them."""

    def __init__(self, metric: names.Counter | names.Histogram, registry: prometheus.CollectorRegistry) -> None:
        self._metric = metric
        self._series: dict[tuple[str, ...], Total | Buckets] = {}
        registry.register(self)

    def labels(self, *values: str) -> Total | Buckets:
        match self._metric:
            case names.Counter():
                return self._series.setdefault(values, Total())
            case names.Histogram(buckets=buckets):
                return self._series.setdefault(values, Buckets(buckets))

    def describe(self) -> list[Metric]:
        return [self._family()]

    def collect(self) -> Iterator[Metric]:
        family = self._family()
        for values, series in self._series.items():
            match family, series:
                case CounterMetricFamily(), Total(value=value):
                    family.add_metric(values, value)
                case HistogramMetricFamily(), Buckets():
                    family.add_metric(values, series.cumulated(), series.sum)
        yield family

    def _family(self) -> CounterMetricFamily | HistogramMetricFamily:
        metric, labels = self._metric, [label.name for label in self._metric.labels]
        kind = CounterMetricFamily if isinstance(metric, names.Counter) else HistogramMetricFamily
        return kind(metric.name, metric.help, labels=labels)


_Child = Total | Buckets | prometheus.Gauge
_Family = _Counted | prometheus.Gauge
#: A metric's name and its label values in the spec's order.
_Series = tuple[str, ...]


def _family(metric: names.Metric, registry: prometheus.CollectorRegistry) -> _Family:
    labels = [label.name for label in metric.labels]
    match metric:
        case names.Counter() | names.Histogram():
            return _Counted(metric, registry)
        case names.Gauge():
            return prometheus.Gauge(metric.name, metric.help, labels, registry=registry)


class Metrics:
    """`open_values` names values of open labels known at the start, for example `{"model": ("tiny",)}`."""

    def __init__(self, metrics: Iterable[names.Metric], open_values: Mapping[str, Sequence[str]] = NO_VALUES) -> None:
        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=self._registry)
        self._families: dict[str, _Family] = {}
        self._open: dict[str, set[str]] = {}
        self._children: dict[_Series, _Child] = {}
        self._followed: dict[_Series, float] = {}
        for metric in metrics:
            self._families[metric.name] = _family(metric, self._registry)
            values = (label.values or open_values.get(label.name, ()) for label in metric.labels)
            for combination in itertools.product(*values):
                self._child(metric, {label.name: v for label, v in zip(metric.labels, combination, strict=True)})

    def counter(self, counter: names.Counter, **labels: str) -> Total:
        """One series, to keep at hand."""
        child = self._child(counter, labels)
        assert isinstance(child, Total)
        return child

    def histogram(self, histogram: names.Histogram, **labels: str) -> Buckets:
        child = self._child(histogram, labels)
        assert isinstance(child, Buckets)
        return child

    def add(self, counter: names.Counter, amount: float = 1, **labels: str) -> None:
        self.counter(counter, **labels).inc(amount)

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
        self.histogram(histogram, **labels).observe(value)

    def exposition(self) -> bytes:
        """What `/metrics` answers, with CONTENT_TYPE."""
        return prometheus.generate_latest(self._registry)

    def _child(self, metric: names.Metric, labels: Mapping[str, str]) -> _Child:
        assert len(labels) == len(metric.labels), f"{metric.name} has labels {[label.name for label in metric.labels]}"
        values = [self._bounded(label, labels[label.name]) for label in metric.labels]
        key = (metric.name, *values)
        child = self._children.get(key)
        if child is None:
            family = self._families[metric.name]
            made = family.labels(*values) if metric.labels or isinstance(family, _Counted) else family
            assert not isinstance(made, _Counted)
            child = self._children[key] = made
        return child

    def _bounded(self, label: names.Label, value: str) -> str:
        if label.values:
            return value if value in label.values else names.OTHER
        seen = self._open.setdefault(label.name, set())
        if value not in seen and len(seen) >= names.MAX_OPEN_VALUES:
            return names.OTHER
        seen.add(value)
        return value
