"""PromQL made from the metric objects, so that a metric that is renamed, or a label that it does not have, ends the
generator instead of leaving an empty panel."""

from collections.abc import Mapping

from prfaas.observe import names
from tools.promql import METRICS

#: Grafana's: four scrapes, or more where the panel shows a long time.
RANGE = "$__rate_interval"
Where = Mapping[str, str | tuple[str, ...]]
EVERYWHERE: Where = {}
#: What Prometheus says of every series.
PROCESS = "instance"


def series(metric: names.Metric, where: Where = EVERYWHERE, part: str = "") -> str:
    """A selector. Several values of a label are alternatives."""
    assert METRICS[metric.name] is metric
    assert bool(part) == isinstance(metric, names.Histogram), f"{metric.name} needs a part of a histogram, or has none"
    for label, values in where.items():
        [spec] = [each for each in metric.labels if each.name == label]
        several = values if isinstance(values, tuple) else (values,)
        assert not spec.values or set(several) <= set(spec.values), f"{label} of {metric.name} is never {several}"
    matchers = ",".join(
        f'{label}=~"{"|".join(value)}"' if isinstance(value, tuple) else f'{label}="{value}"'
        for label, value in where.items()
    )
    return f"{metric.name}{part}" + (f"{{{matchers}}}" if matchers else "")


def now(gauge: names.Gauge, *by: str, how: str = "sum", where: Where = EVERYWHERE) -> str:
    return f"{how}{_by(gauge, by)} ({series(gauge, where)})"


def per_s(counter: names.Counter, *by: str, where: Where = EVERYWHERE) -> str:
    return f"sum{_by(counter, by)} (rate({series(counter, where)}[{RANGE}]))"


def times(counter: names.Counter, *by: str, where: Where = EVERYWHERE) -> str:
    """How often in the time between two points."""
    return f"sum{_by(counter, by)} (increase({series(counter, where)}[{RANGE}]))"


def quantile(share: float, histogram: names.Histogram, *by: str, where: Where = EVERYWHERE) -> str:
    _by(histogram, by)
    buckets = f"rate({series(histogram, where, '_bucket')}[{RANGE}])"
    return f"histogram_quantile({share}, sum by ({', '.join(('le', *by))}) ({buckets}))"


def mean(histogram: names.Histogram, *by: str, where: Where = EVERYWHERE) -> str:
    total, count = (
        f"sum{_by(histogram, by)} (rate({series(histogram, where, part)}[{RANGE}]))" for part in ("_sum", "_count")
    )
    return f"{total} / {count}"


def ratio(part: str, whole: str) -> str:
    return f"{part} / {whole}"


def _by(metric: names.Metric, labels: tuple[str, ...]) -> str:
    unknown = set(labels) - {label.name for label in metric.labels} - {PROCESS}
    assert not unknown, f"{metric.name} has no labels {unknown}"
    return f" by ({', '.join(labels)})" if labels else ""
