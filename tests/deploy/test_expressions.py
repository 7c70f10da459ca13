"""Every expression of the rules and of the dashboards, against a Prometheus that scrapes a live cluster under load."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import yaml

from prfaas.engine.cost_model import write_config
from services.local_cluster import Plan, Wan, local_cluster
from tests.deploy.prometheus_process import PROMETHEUS, SCRAPE_S, Prometheus, prometheus
from tests.e2e.client import complete
from tests.e2e.reference import token_ids
from tools.dashboards.expressions import RANGE
from tools.promql import selectors

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "prfaas"
#: Many scrapes, so that every rate has its points.
WINDOW = "1m"
LIVENESS_S = 60.0

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(PROMETHEUS is None, reason="tools/deploy/prometheus.sh puts prometheus on the PATH"),
]


def of_rules() -> list[tuple[str, str]]:
    """Names and expressions."""
    found = []
    for path in sorted((CHART / "rules").glob("*.yaml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            found += [(rule.get("alert") or rule["record"], rule["expr"]) for rule in group["rules"]]
    return found


def of_dashboards() -> list[tuple[str, str]]:
    found = []
    for path in sorted((CHART / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            place = f"{path.stem}: {panel['title']}"
            found += [(place, target["expr"].replace(RANGE, WINDOW)) for target in panel["targets"]]
    return found


def missing(watcher: Prometheus, expression: str) -> list[str]:
    """Its selectors that select nothing."""
    return [each.text for each in selectors(expression) if not watcher.query(f"count({each.text})")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watcher(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Prometheus]:
    """Looks at a cluster with everything: a line between the regions, shards of the cache, two routers, canaries."""
    model = tmp_path_factory.mktemp("model")
    write_config(model, time_scale=0.1, byte_scale=0.002)
    plan = Plan(
        model_dir=model,
        threshold_tokens=1000,
        routers=2,
        pools=1,
        wan=Wan(mbit=400.0, rtt_ms=4.0),
        canary_period_s=2.0,
        slow_period_s=5.0,
        log_dir=tmp_path_factory.mktemp("logs"),
    )
    folder = tmp_path_factory.mktemp("prometheus")
    async with local_cluster(plan) as cluster:
        with prometheus(folder, cluster.metrics, CHART / "rules") as watcher:
            for seed in (1, 2, 1, 3):
                lengths = (300, 2000, 5000)
                await asyncio.gather(*(complete(cluster, token_ids(length, seed=seed), 4) for length in lengths))
                await asyncio.sleep(2 * SCRAPE_S)  # between two scrapes things must have happened
            deadline = asyncio.get_running_loop().time() + LIVENESS_S
            while missing(watcher, "prfaas_router_link_rtt_seconds") or len(watcher.query("up == 1")) < len(
                cluster.metrics
            ):
                assert asyncio.get_running_loop().time() < deadline, "not everything was scraped"
                await asyncio.sleep(SCRAPE_S)
            yield watcher


async def test_every_target_is_scraped(watcher: Prometheus):
    targets = watcher.get("targets")["activeTargets"]
    assert targets and [each["lastError"] for each in targets if each["health"] != "up"] == []


async def test_prometheus_has_all_rules_and_evaluates_them(watcher: Prometheus):
    """None of them ends in an error, such as series that cannot be matched."""
    groups = watcher.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert sorted(rule["name"] for rule in rules) == sorted(name for name, _ in of_rules())
    deadline = asyncio.get_running_loop().time() + LIVENESS_S
    while any(rule["health"] == "unknown" for group in watcher.get("rules")["groups"] for rule in group["rules"]):
        assert asyncio.get_running_loop().time() < deadline, "rules wait to be evaluated"
        await asyncio.sleep(SCRAPE_S)
    rules = [rule for group in watcher.get("rules")["groups"] for rule in group["rules"]]
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []


async def test_each_expression_of_a_rule_asks_for_series_that_there_are(watcher: Prometheus):
    """Series of closed labels are there before anything has happened, those of what an alert waits for too."""
    for name, expression in of_rules():
        watcher.query(expression)
        assert missing(watcher, expression) == [], name


async def test_each_expression_of_a_dashboard_shows_something(watcher: Prometheus):
    """Nothing that it asks for is missing, and it comes to at least one series."""
    for place, expression in of_dashboards():
        assert missing(watcher, expression) == [], place
        assert watcher.query(expression), f"{place}: {expression}"


async def test_no_alert_fires_on_a_cluster_that_is_well(watcher: Prometheus):
    firing = watcher.query('ALERTS{alertstate="firing"}')
    assert [each["metric"]["alertname"] for each in firing] == []


async def test_a_name_that_no_process_has_is_found_out(watcher: Prometheus):
    """So the tests above can fail: another name, another label's value, and what is no PromQL."""
    [(_, expression), *_] = of_dashboards()
    for selector in selectors(expression):
        assert missing(watcher, expression.replace(selector.name, f"{selector.name}s")) != []
    assert missing(watcher, 'prfaas_router_requests_total{outcome="fine"}') != []
    with pytest.raises(AssertionError, match="parse error"):
        watcher.query("sum(prfaas_router_requests_total")
