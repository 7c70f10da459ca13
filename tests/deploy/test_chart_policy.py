"""What every pod of the chart keeps to, with whatever values."""

from typing import Any

import pytest

from tests.deploy.chart import EVERYTHING, REGIONS, container, of_kind, pods, rendered, services_of_ours

BOTH = [(region, values) for region in REGIONS for values in ({}, EVERYTHING)]


@pytest.fixture(params=BOTH, ids=lambda case: f"{case[0]}-{'everything' if case[1] else 'file'}")
def documents(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    region, values = request.param
    return rendered(region, values)


def test_nobody_is_root(documents: list[dict[str, Any]]) -> None:
    """Nor can become so, nor write to the image, nor do what Kubernetes' restricted profile forbids."""
    for name, pod in pods(documents):
        whole, own = pod["spec"]["securityContext"], container(pod)["securityContext"]
        assert whole["runAsNonRoot"] is own["runAsNonRoot"] is True, name
        assert whole["runAsUser"] > 0 and own.get("runAsUser", 1) > 0, name
        assert whole["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert own["allowPrivilegeEscalation"] is False and own["readOnlyRootFilesystem"] is True, name
        assert own["capabilities"] == {"drop": ["ALL"]}, name
        assert not any(pod["spec"].get(key) for key in ("hostPID", "hostIPC", "initContainers")), name


def test_nobody_has_a_token_of_the_cluster(documents: list[dict[str, Any]]) -> None:
    assert all(pod["spec"]["automountServiceAccountToken"] is False for _, pod in pods(documents))


def test_variables_of_services_are_left_out(documents: list[dict[str, Any]]) -> None:
    """PRFAAS_ROUTER_SERVICE_HOST would be refused as a setting that is none."""
    assert all(pod["spec"]["enableServiceLinks"] is False for _, pod in pods(documents))


def test_resources_are_bounded(documents: list[dict[str, Any]]) -> None:
    """Memory of all; CPU is asked for and not capped, for a cap makes pauses."""
    for name, pod in pods(documents):
        resources = container(pod)["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys(), name
        assert resources["limits"]["memory"], name
        for volume in pod["spec"].get("volumes", []):
            if volume["name"] == "tmp":
                assert volume["emptyDir"]["sizeLimit"], name


def test_images_have_a_version(documents: list[dict[str, Any]]) -> None:
    for name, pod in pods(documents):
        _, colon, tag = container(pod)["image"].rpartition(":")
        assert colon and tag not in ("", "latest"), name


def test_probes_and_drain(documents: list[dict[str, Any]]) -> None:
    """All three probes, and time to leave."""
    for name, pod in pods(documents):
        if pod["metadata"]["labels"]["role"] == "smoke-test":
            continue
        own = container(pod)
        ports = {port["name"] for port in own["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert own[probe]["httpGet"]["port"] in ports, name
        pause_s = own["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert 0 < pause_s < pod["spec"]["terminationGracePeriodSeconds"], name


def test_probes_ask_what_they_are_for(documents: list[dict[str, Any]]) -> None:
    """Liveness is never readiness: a pod that waits for others would be killed for it."""
    for _, pod in services_of_ours(documents):
        own = container(pod)
        assert own["readinessProbe"]["httpGet"]["path"] == "/ready"
        assert own["livenessProbe"]["httpGet"]["path"] == own["startupProbe"]["httpGet"]["path"] == "/live"


def test_everything_is_labelled(documents: list[dict[str, Any]]) -> None:
    """By whom it was made, and where it belongs; pods also by role and pool."""
    for document in documents:
        labels = document["metadata"]["labels"]
        for label in ("name", "instance", "version", "part-of", "managed-by"):
            assert labels[f"app.kubernetes.io/{label}"], document["metadata"]["name"]
        assert labels["region"] in REGIONS
    for name, pod in services_of_ours(documents):
        labels = pod["metadata"]["labels"]
        assert labels["role"] == labels["app.kubernetes.io/component"] and labels["pool"], name


def test_each_set_has_what_keeps_it_up(documents: list[dict[str, Any]]) -> None:
    """Budget, network policy, account, spread."""
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        there = of_kind(documents, kind)
        for name, pod in pods(documents):
            if pod["metadata"]["labels"]["role"] != "smoke-test":
                selector = there[name]["spec"]["podSelector" if kind == "NetworkPolicy" else "selector"]
                assert selector["matchLabels"].items() <= pod["metadata"]["labels"].items()
    for name, pod in pods(documents):
        if pod["metadata"]["labels"]["role"] != "smoke-test":
            for constraint in pod["spec"]["topologySpreadConstraints"]:
                assert constraint["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items(), name


def test_no_secret_is_in_a_config_map_or_a_value(documents: list[dict[str, Any]]) -> None:
    for name, config in of_kind(documents, "ConfigMap").items():
        for line in config["data"].get("prfaas.toml", "").splitlines():
            key, _, value = (part.strip() for part in line.partition("="))
            assert key not in ("password", "admin_key", "secret") or value == '""', name
    assert not of_kind(documents, "Secret")
    for name, pod in pods(documents):
        for variable in container(pod).get("env", []):
            if any(word in variable["name"] for word in ("PASSWORD", "KEY", "SECRET")):
                assert "secretKeyRef" in variable["valueFrom"], name


def test_only_readiness_and_metrics_are_open_to_all_within_a_region(documents: list[dict[str, Any]]) -> None:
    """Ports of the cluster are for the cluster: no rule without peers has them."""
    for name, policy in of_kind(documents, "NetworkPolicy").items():
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        for rule in policy["spec"]["ingress"]:
            if not rule.get("from"):
                open_ports = {port["port"] for port in rule["ports"]}
                assert all(port.startswith("metrics") or port == "http" for port in open_ports), name
