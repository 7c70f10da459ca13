"""Alert rules name metrics that there are, have a test each way, and a section in the runbooks."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.promql import SCRAPED, faults, selectors

ROOT = Path(__file__).resolve().parents[3]
RULES = ROOT / "deploy" / "helm" / "prfaas" / "rules"
TESTS = ROOT / "deploy" / "prometheus"
RUNBOOKS = ROOT / "docs" / "runbooks.md"
SEVERITIES = ("page", "ticket")


def rules() -> list[dict[str, Any]]:
    groups = [group for path in sorted(RULES.glob("*.yaml")) for group in yaml.safe_load(path.read_text())["groups"]]
    assert len({group["name"] for group in groups}) == len(groups)
    return [rule for group in groups for rule in group["rules"]]


def alert_tests() -> list[dict[str, Any]]:
    return [test for path in sorted(TESTS.glob("*_test.yaml")) for test in yaml.safe_load(path.read_text())["tests"]]


ALERTS = [rule for rule in rules() if "alert" in rule]
RECORDS = {rule["record"] for rule in rules() if "record" in rule}


def test_each_expression_asks_for_what_there_is():
    for rule in rules():
        recorded = set(re.findall(r"\bprfaas:[\w:]+", rule["expr"]))
        assert recorded <= RECORDS, rule
        assert faults(rule["expr"]) == [], rule.get("alert") or rule["record"]
        assert selectors(rule["expr"]) or recorded, rule


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_says_how_urgent_it_is_and_what_to_do(rule: dict[str, Any]):
    """Its summary names only labels that its series have."""
    assert rule["alert"].startswith("Prfaas") and rule["labels"]["severity"] in SEVERITIES
    assert rule["annotations"].keys() == {"summary", "runbook_url"}
    named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    outer = re.match(r"\s*(?:1 - )?(?:sum|max|min|count) by \(([^)]*)\)", rule["expr"])
    aggregated = re.match(r"\s*\(?(?:1 - )?(?:sum|max|min|count)\s*\(", rule["expr"]) or "prfaas:" in rule["expr"]
    has = {label.strip() for label in outer[1].split(",")} if outer else set() if aggregated else {*SCRAPED}
    assert named <= has


def test_the_tests_of_alerts_have_series_as_processes_have_them():
    """So that none passes on a metric, a label or a value that no process has."""
    for test in alert_tests():
        for each in test["input_series"]:
            assert faults(each["series"]) == [], test["name"]


def test_each_alert_has_a_test_that_it_fires_and_one_that_it_does_not():
    fires, quiet = set[str](), set[str]()
    for test in alert_tests():
        [case] = test["promql_expr_test"]
        (fires if case["exp_samples"] else quiet).add(test["name"].partition(":")[0])
    alerts = {rule["alert"] for rule in ALERTS}
    assert fires == alerts
    assert quiet == alerts


def test_each_alert_has_a_section_in_the_runbooks():
    """Under its own name, which is what the alert points at; and there are no others."""
    sections = re.findall(r"^### (Prfaas\w+)$", RUNBOOKS.read_text(), flags=re.MULTILINE)
    assert len(sections) == len(set(sections)) and set(sections) == {rule["alert"] for rule in ALERTS}
    for rule in ALERTS:
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{rule['alert'].lower()}"
