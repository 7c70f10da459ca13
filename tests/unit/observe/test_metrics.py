"""Metrics exist from the start, stay bounded and say what happened."""

import re

import pytest

from prfaas.observe import names
from prfaas.observe.metrics import Metrics


def series(metrics: Metrics) -> dict[str, float]:
    lines = metrics.exposition().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_every_series_with_known_labels_is_zero_before_anything_happened():
    """A rate over a series that appears with its first event would miss that event."""
    found = series(Metrics(names.ROUTER, open_values={"model": ("tiny",)}))
    for path in ("local", "remote"):
        assert found[f'prfaas_router_ttft_seconds_count{{path="{path}"}}'] == 0
        assert found[f'prfaas_router_requests_total{{model="tiny",outcome="ok",path="{path}"}}'] == 0
    assert found['prfaas_router_attempts_total{ending="decode_lost"}'] == 0
    assert found["prfaas_router_threshold_tokens"] == 0


def test_counts_land_in_their_series():
    """Labels select the series, and only that one moves."""
    metrics = Metrics(names.ROUTER)
    metrics.add(names.ROUTES, path="remote", reason="long_prompt")
    metrics.add(names.ROUTES, path="remote", reason="long_prompt")
    metrics.observe(names.TTFT, 0.3, path="remote")
    metrics.set(names.IN_FLIGHT, 7)
    found = series(metrics)
    assert found['prfaas_router_routes_total{path="remote",reason="long_prompt"}'] == 2
    assert found['prfaas_router_routes_total{path="local",reason="long_prompt"}'] == 0
    assert found['prfaas_router_ttft_seconds_bucket{le="0.25",path="remote"}'] == 0
    assert found['prfaas_router_ttft_seconds_bucket{le="0.5",path="remote"}'] == 1
    assert found["prfaas_router_in_flight_requests"] == 7


def test_an_open_label_is_capped_and_then_other():
    """A client that invents model names cannot grow the process or the scrape without end."""
    metrics = Metrics(names.ROUTER)
    for number in range(names.MAX_OPEN_VALUES + 10):
        metrics.add(names.REQUESTS, model=f"m{number}", path="none", outcome="invalid")
    models = [name for name in series(metrics) if name.startswith("prfaas_router_requests_total")]
    assert len(models) == names.MAX_OPEN_VALUES + 1
    assert series(metrics)['prfaas_router_requests_total{model="other",outcome="invalid",path="none"}'] == 10


def test_a_value_unknown_to_a_closed_label_is_other():
    """A new reason shows as `other` until the spec knows it."""
    metrics = Metrics(names.ROUTER)
    metrics.add(names.ROUTES, path="remote", reason="whim")
    assert series(metrics)['prfaas_router_routes_total{path="remote",reason="other"}'] == 1


def test_a_followed_total_is_never_counted_twice_and_survives_a_restart_of_its_source():
    """Engine and pump report running totals; the counter grows by the difference, and by all of it after a restart."""
    metrics = Metrics(names.WORKER)
    for total in (100, 100, 250, 30):
        metrics.follow(names.KV_SENT_BYTES, total, peer_region="far")
        metrics.follow(names.KV_SENT_BYTES, 7, peer_region="near")
    found = series(metrics)
    assert found['prfaas_worker_kv_sent_bytes_total{peer_region="far"}'] == 280
    assert found['prfaas_worker_kv_sent_bytes_total{peer_region="near"}'] == 7


def test_exactly_one_role_is_shown():
    """Role is one-hot: the new role is 1 and the old one is back to 0."""
    metrics = Metrics(names.WORKER)
    metrics.choose(names.WORKER_ROLE, "decode")
    metrics.choose(names.WORKER_ROLE, "prefill")
    roles = {name: value for name, value in series(metrics).items() if name.startswith("prfaas_worker_role{")}
    assert roles == {
        'prfaas_worker_role{role="prefill"}': 1,
        'prfaas_worker_role{role="decode"}': 0,
        'prfaas_worker_role{role="mixed"}': 0,
    }


def test_forgetting_a_label_is_our_bug():
    """Metrics are written by our own code, so a wrong label is an assertion, not a series."""
    with pytest.raises(AssertionError, match="routes_total"):
        Metrics(names.ROUTER).add(names.ROUTES, path="remote")


@pytest.mark.parametrize("component", names.COMPONENTS)
def test_names_follow_the_convention(component: str):
    """`prfaas_<component>_`, base units, `_total` on counters and only there, no name used twice."""
    metrics = names.COMPONENTS[component]
    assert len({metric.name for metric in metrics}) == len(metrics)
    for metric in metrics:
        assert metric.name.startswith(f"prfaas_{component}_")
        assert metric.name.endswith("_total") == isinstance(metric, names.Counter)
        assert not re.search(r"_(ms|millis|kb|mb|percent)(_|$)", metric.name)
        if isinstance(metric, names.Histogram):
            assert list(metric.buckets) == sorted(set(metric.buckets))
