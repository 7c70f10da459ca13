"""What helm renders is what Kubernetes takes, in every region and for the oldest and the newest version."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import (
    CHART,
    EVERYTHING,
    KUBERNETES,
    REGIONS,
    container,
    helm,
    of_kind,
    pods,
    region_file,
    rendered,
)
from tools.deploy import chart_schema

#: Kinds of others, which the validator knows nothing of: (what must be there).
FOREIGN = {
    "Certificate": ("secretName", "issuerRef", "dnsNames"),
    "ServiceMonitor": ("selector", "endpoints"),
    "PrometheusRule": ("groups",),
}
CASES: list[tuple[str | None, dict[str, Any]]] = [
    (None, {}),
    ("a", {}),
    ("b", {}),
    ("a", EVERYTHING),
    ("b", EVERYTHING),
    ("a", {"defaults": {"acrossRegions": {"mode": "hostNetwork", "domain": ""}}}),
    ("b", {"security": {"mode": "off", "certManager": {"enabled": False}}, "store": {"tls": {"enabled": False}}}),
]


@pytest.mark.parametrize("region", [None, *REGIONS])
def test_helm_lint_finds_nothing(region: str | None) -> None:
    """With the chart's own values and those of each region, warnings count as errors."""
    files = ["-f", str(region_file(region))] if region else []
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART), *files)


@pytest.mark.parametrize("kubernetes", KUBERNETES)
@pytest.mark.parametrize(("region", "values"), CASES)
def test_every_manifest_is_valid(region: str | None, values: dict[str, Any], kubernetes: str, tmp_path: Path) -> None:
    """Strictly: a field that is none is an error."""
    ours = [document for document in rendered(region, values, kubernetes) if document["kind"] not in FOREIGN]
    path = tmp_path / "manifests.yaml"
    path.write_text(yaml.safe_dump_all(ours))
    command = ["kubernetes-validate", "--strict", "-k", kubernetes, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "WARN" not in said, said
    assert said.count(" passed for resource ") == len(ours)


@pytest.mark.parametrize("region", REGIONS)
def test_manifests_of_other_operators_have_what_they_need(region: str) -> None:
    documents = [each for each in rendered(region, EVERYTHING) if each["kind"] in FOREIGN]
    assert {each["kind"] for each in documents} == set(FOREIGN)
    for document in documents:
        for field in FOREIGN[document["kind"]]:
            assert document["spec"][field], document["metadata"]["name"]


@pytest.mark.parametrize(("region", "values"), CASES)
def test_nothing_has_the_name_of_another(region: str | None, values: dict[str, Any]) -> None:
    names = [(document["kind"], document["metadata"]["name"]) for document in rendered(region, values)]
    assert len(names) == len(set(names))
    assert all(len(name) <= 63 for _, name in names)


@pytest.mark.parametrize(("region", "values"), CASES)
def test_whatever_is_named_is_there(region: str | None, values: dict[str, Any]) -> None:
    """Ports of services and probes, config maps, accounts, and the workload of an autoscaler."""
    documents = rendered(region, values)
    labelled = [(pod["metadata"]["labels"], container(pod)) for _, pod in pods(documents)]
    for name, service in of_kind(documents, "Service").items():
        selector = {
            key: value for key, value in service["spec"]["selector"].items() if not key.startswith("statefulset")
        }
        chosen = [each for labels, each in labelled if selector.items() <= labels.items()]
        assert len(chosen) == 1, name
        offered = {port["name"] for port in chosen[0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= offered, name
    for name, pod in pods(documents):
        for volume in pod["spec"].get("volumes", []):
            if "configMap" in volume:
                assert volume["configMap"]["name"] in of_kind(documents, "ConfigMap"), name
        mounts = [mount["name"] for mount in container(pod)["volumeMounts"]]
        volumes = [volume["name"] for volume in pod["spec"].get("volumes", [])]
        claims = {"data"} if "data" in mounts else set()
        assert set(mounts) == set(volumes) | claims, name
        if account := pod["spec"].get("serviceAccountName"):
            assert account in of_kind(documents, "ServiceAccount"), name
    for name, scaler in of_kind(documents, "HorizontalPodAutoscaler").items():
        target = scaler["spec"]["scaleTargetRef"]
        workload = of_kind(documents, target["kind"])[target["name"]]
        assert "replicas" not in workload["spec"], f"{name}: each upgrade would undo what the autoscaler did"


def test_the_schema_has_the_products_settings() -> None:
    """A setting that is new, gone or changed is so in the chart's values."""
    text = chart_schema.SCHEMA.read_text()
    assert chart_schema.updated(text) == text, "python -m tools.deploy.chart_schema"
