"""The chart, rendered by helm as a user would, as Python values."""

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "deploy/helm/prfaas"
REGIONS = ("a", "b")
#: The oldest and the newest that the chart is tried with.
KUBERNETES = ("1.31", "1.35")
#: All that values can turn on and the files of the regions leave off.
EVERYTHING: dict[str, Any] = {
    "config": {"router": {"workers": 3}, "routing": {"threshold_tokens": 4096, "rtts_s": {"a": 0.03}}},
    "store": {"existingSecret": "prfaas-store-user", "tls": {"existingSecret": "prfaas-store-client"}},
    "defaults": {
        "autoscaling": {"enabled": True},
        "priorityClassName": "serving",
        "runtimeClassName": "nvidia",
        "imagePullSecrets": [{"name": "pull"}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}},
        "podAnnotations": {"example.com/team": "serving"},
        "podLabels": {"team": "serving"},
        "networkPolicy": {
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
            "from": [{"namespaceSelector": {"matchLabels": {"name": "front"}}}],
            "extraEgress": [{"ports": [{"port": 4317}]}],
        },
        "extraEnv": [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://otel:4317"}],
        "extraVolumes": [{"name": "extra", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
    },
    "router": {
        "extraArgs": ["--log-level=debug", "--request-log=/extra/requests.jsonl"],
        "tls": {"existingSecret": "prfaas-https"},
        "service": {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "loadBalancerClass": "example.com/l4"},
    },
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
}

Document = dict[str, Any]


class Refused(Exception):
    """helm said no; the message is its own."""


def helm(*args: str) -> str:
    with tempfile.TemporaryDirectory() as home:
        homes = {f"HELM_{name}_HOME": home for name in ("CACHE", "CONFIG", "DATA")} | {"KUBECONFIG": "/dev/null"}
        done = subprocess.run(
            ["helm", *args], capture_output=True, text=True, timeout=120, env={**os.environ, **homes}, check=False
        )
    if done.returncode:
        raise Refused(done.stderr + done.stdout)
    return done.stdout


def region_file(region: str) -> Path:
    return CHART / f"values-region-{region}.yaml"


def template(region: str | None, values: Mapping[str, Any] | None = None, kubernetes: str = "1.35") -> str:
    """`values` on top of the region's file; None is for the chart's own values alone."""
    return _template(region, yaml.safe_dump(dict(values or {})), kubernetes)


@cache
def _template(region: str | None, values: str, kubernetes: str) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(values)
        file.flush()
        files = [*(["-f", str(region_file(region))] if region else []), "-f", file.name]
        return helm("template", "prfaas", str(CHART), "-n", "serving", "--kube-version", kubernetes, *files)


def rendered(region: str | None, values: Mapping[str, Any] | None = None, kubernetes: str = "1.35") -> list[Document]:
    return [document for document in yaml.safe_load_all(template(region, values, kubernetes)) if document]


def of_kind(documents: list[Document], kind: str) -> dict[str, Document]:
    """By name."""
    return {document["metadata"]["name"]: document for document in documents if document["kind"] == kind}


def pods(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """Name and template (metadata, spec) of everything that runs."""
    for document in documents:
        if document["kind"] in ("Deployment", "StatefulSet"):
            yield document["metadata"]["name"], document["spec"]["template"]
        elif document["kind"] == "Pod":
            yield document["metadata"]["name"], document


def services_of_ours(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """Those pods that run `prfaas`, without the test's."""
    for name, pod in pods(documents):
        if pod["metadata"]["labels"]["role"] not in ("store", "smoke-test"):
            yield name, pod


def container(pod: Document) -> Document:
    [only] = pod["spec"]["containers"]
    return dict(only)


def toml_of(documents: list[Document], name: str) -> str:
    return str(of_kind(documents, "ConfigMap")[name]["data"]["prfaas.toml"])


def environment(pod: Document, name: str, ip: str = "10.2.3.4") -> dict[str, str]:
    """What a container of the pod would find, as Kubernetes expands it."""
    known = {"POD_NAME": name, "POD_IP": ip, "NODE_NAME": "node-7"}
    found: dict[str, str] = {}
    for variable in container(pod).get("env", []):
        if "value" in variable:
            value = variable["value"]
            for other, text in found.items():
                value = value.replace(f"$({other})", text)
        else:
            value = known.get(variable["name"], "from-a-secret")
        found[variable["name"]] = value
    return found
