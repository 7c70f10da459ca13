"""Dashboards are generated from the metric specs, and fresh."""

import json
from dataclasses import replace

import pytest

from prfaas.observe import names
from tools.dashboards.expressions import now, per_s, quantile, series
from tools.generate_dashboards import FOLDER, pages, stale
from tools.promql import faults, selectors


def test_the_dashboards_are_fresh(tmp_path):
    """And what is not, missing or superfluous is said to be so."""
    assert stale(FOLDER) == []
    for name, text in pages().items():
        (tmp_path / name).write_text(text)
    (tmp_path / "overview.json").write_text("{}")
    (tmp_path / "cache.json").unlink()
    (tmp_path / "more.json").write_text("{}")
    assert stale(tmp_path) == ["cache.json", "more.json", "overview.json"]


@pytest.mark.parametrize("name", pages())
def test_each_expression_asks_for_what_there_is(name: str):
    """Titles and ids tell panels apart, and each line has a legend."""
    panels = json.loads(pages()[name])["panels"]
    assert len({panel["title"] for panel in panels}) == len({panel["id"] for panel in panels}) == len(panels) > 0
    for panel in panels:
        for target in panel["targets"]:
            assert selectors(target["expr"]) and faults(target["expr"]) == [], panel["title"]
            assert target["legendFormat"]


def test_every_process_has_its_metrics_on_a_dashboard():
    """Of each kind but the relay, which stands in for a line."""
    shown = {each.name for text in pages().values() for each in selectors(json.dumps(json.loads(text)))}
    for component in ("router", "worker", "pool"):
        assert any(name.startswith(f"prfaas_{component}_") for name in shown), component


def test_expressions_are_refused_that_ask_for_what_there_is_not():
    assert series(names.REQUESTS, {"outcome": ("ok", "failed")}) == 'prfaas_router_requests_total{outcome=~"ok|failed"}'
    with pytest.raises(AssertionError):
        per_s(names.REQUESTS, where={"outcome": "fine"})
    with pytest.raises(AssertionError):
        now(names.LEADS, "region")
    with pytest.raises(AssertionError):
        series(names.TTFT)
    with pytest.raises(KeyError):
        now(replace(names.LEADS, name="prfaas_router_led"))
    with pytest.raises(AssertionError):
        quantile(0.5, names.ITL, "path")
