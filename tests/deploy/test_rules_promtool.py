"""Promtool's word on the alert rules, and what makes each fire."""

import subprocess
from pathlib import Path

import pytest

from tests.deploy.prometheus_process import PROMTOOL

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "helm" / "prfaas" / "rules"
TESTS = DEPLOY / "prometheus"

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="tools/deploy/prometheus.sh puts promtool on the PATH")


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(PROMTOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@needs_promtool
def test_promtool_takes_the_rules():
    done = promtool("check", "rules", "--lint-fatal", *sorted(RULES.glob("*.yaml")))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_takes_the_configuration_of_the_compose_cluster():
    done = promtool("check", "config", "--syntax-only", DEPLOY / "compose" / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("tests", sorted(TESTS.glob("*_test.yaml")), ids=lambda path: path.stem)
def test_alerts_fire_when_they_should_and_only_then(tests: Path):
    done = promtool("test", "rules", tests)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_an_alert_whose_metric_has_another_name_does_not_fire(tmp_path: Path):
    """So the tests above can fail."""
    rules, tests = tmp_path / "helm" / "prfaas" / "rules", tmp_path / "prometheus"
    rules.mkdir(parents=True)
    tests.mkdir()
    own = (RULES / "links.yaml").read_text()
    (rules / "links.yaml").write_text(own.replace("prfaas_router_breakers{", "prfaas_router_breaker{"))
    (tests / "links_test.yaml").write_text((TESTS / "links_test.yaml").read_text())
    done = promtool("test", "rules", tests / "links_test.yaml")
    assert done.returncode != 0 and "PrfaasBreakerOpen" in done.stdout + done.stderr
