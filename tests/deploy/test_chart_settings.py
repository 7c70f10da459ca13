"""What the chart gives to our services is what they take: options, variables, and the configuration's file."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from prfaas import config as configuration
from services.cli import main
from tests.deploy.chart import EVERYTHING, REGIONS, container, environment, rendered, services_of_ours, toml_of

MOONCAKE = {"store": "mooncake", "mooncake_master": "mooncake:50051", "mooncake_segment_bytes": 34359738368}
ON_VLLM = {
    "config": {"worker": {"engine": "vllm", "vllm_python": "/usr/bin/python3", "vllm_arguments": ["--dtype", "auto"]}}
}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((region, {}) for region in REGIONS),
    *((region, EVERYTHING) for region in REGIONS),
    ("b", {"security": {"mode": "off", "certManager": {"enabled": False}}, "store": {"tls": {"enabled": False}}}),
    ("b", {"cachePool": {"persistence": {"enabled": False}, "config": {"pool": MOONCAKE}}}),
    ("a", {"defaults": {"acrossRegions": {"mode": "hostNetwork"}}}),
    ("b", {"decodeWorker": ON_VLLM}),
    ("a", {"defaults": {"acrossRegions": {"mode": "podIP", "domain": ""}}}),
]


@pytest.mark.parametrize(("region", "values"), CASES)
def test_options_are_known(region: str, values: dict[str, Any]) -> None:
    """Every argument is parsed by the command that the pod runs; click refuses what it does not know."""
    for _, pod in services_of_ours(rendered(region, values)):
        command, *options = container(pod)["args"]
        assert command == pod["metadata"]["labels"]["role"]
        main.commands[command].make_context(command, options)


@pytest.mark.parametrize(("region", "values"), CASES)
def test_configuration_passes_the_check(region: str, values: dict[str, Any], tmp_path: Path) -> None:
    """File and environment together, by `prfaas config check`."""
    documents = rendered(region, values)
    for name, pod in services_of_ours(documents):
        file = tmp_path / f"{name}.toml"
        file.write_text(toml_of(documents, name))
        ours = {key: text for key, text in environment(pod, f"{name}-0").items() if key.startswith("PRFAAS_")}
        said = CliRunner().invoke(main, ["config", "check", "--config", str(file)], env=ours)
        assert said.output == "configuration: ok\n", name


def test_a_setting_that_is_none_does_not_pass(tmp_path: Path) -> None:
    """The check above can fail: for the file, and for a variable such as Kubernetes sets for a service."""
    documents = rendered("b")
    file = tmp_path / "prfaas.toml"
    file.write_text(toml_of(documents, "prfaas-router").replace("metrics_port", "metric_port"))
    assert CliRunner().invoke(main, ["config", "check", "--config", str(file)]).exit_code == 2
    file.write_text(toml_of(documents, "prfaas-router"))
    link = {"PRFAAS_ROUTER_SERVICE_HOST": "10.0.0.1"}
    assert CliRunner().invoke(main, ["config", "check", "--config", str(file)], env=link).exit_code == 2


@pytest.mark.parametrize("region", REGIONS)
def test_ports_of_the_pod_are_those_it_binds(region: str) -> None:
    """And every address is bound where others can reach it, and advertised where it leads back."""
    documents = rendered(region, EVERYTHING)
    for name, pod in services_of_ours(documents):
        loaded = _load(documents, name, pod)
        ports = {port["name"]: port["containerPort"] for port in container(pod)["ports"]}
        match pod["metadata"]["labels"]["role"]:
            case "router":
                bound = {"http": loaded.router.port, "admin": loaded.router.admin_port}
                bound["metrics"] = loaded.router.metrics_port or 0
                for i in range(1, loaded.router.workers):
                    bound[f"metrics-{i}"] = bound["metrics"] + i
                    bound[f"admin-{i}"] = bound["admin"] + i
                hosts = {loaded.router.host, loaded.router.metrics_host}
                hosts |= {loaded.router.admin_host} if "admin" in ports else set()
                bound = {port: number for port, number in bound.items() if number}
            case "cache-pool":
                own = loaded.pool
                bound = {"rpc": own.rpc_port, "kv": own.kv_port, "metrics": own.metrics_port}
                hosts = {own.rpc_host, own.kv_host, own.metrics_host}
            case _:
                worker = loaded.worker
                bound = {"rpc": worker.rpc_port, "link": worker.link_port, "metrics": worker.metrics_port}
                bound["kv"] = loaded.kv.port
                hosts = {worker.rpc_host, worker.metrics_host, loaded.kv.host}
        assert ports == bound and hosts == {"0.0.0.0"}, name


@pytest.mark.parametrize("region", REGIONS)
def test_files_that_are_named_are_mounted(region: str) -> None:
    """Each path of the configuration lies in a volume of the pod."""
    documents = rendered(region, EVERYTHING)
    for name, pod in services_of_ours(documents):
        mounted = tuple(mount["mountPath"] + "/" for mount in container(pod)["volumeMounts"])
        tree = tomllib.loads(toml_of(documents, name))
        named = [text for section in tree.values() for text in section.values() if str(text).startswith("/")]
        assert len(named) >= 6 and all(text.startswith(mounted) for text in named), name


@pytest.mark.parametrize("region", REGIONS)
def test_configuration_that_changes_restarts_pods(region: str) -> None:
    """Services read their configuration once."""

    def sums(values: dict[str, Any]) -> dict[str, str]:
        found = services_of_ours(rendered(region, values))
        return {name: pod["metadata"]["annotations"]["checksum/config"] for name, pod in found}

    before, after = sums({}), sums({"config": {"log": {"level": "debug"}}})
    assert before.keys() == after.keys() and all(before[name] != after[name] for name in before)


def test_ids_are_unique_in_the_cluster() -> None:
    """Though both regions have a release, and pods, of the same names."""
    ids = []
    for region in REGIONS:
        for name, pod in services_of_ours(rendered(region)):
            variables = environment(pod, f"{name}-0")
            ids += [variables[key] for key in ("PRFAAS_WORKER_ID", "PRFAAS_POOL_ID") if key in variables]
    assert len(ids) == 4 and len(set(ids)) == 4


def _load(documents: list[dict[str, Any]], name: str, pod: dict[str, Any]) -> configuration.Config:
    tree = tomllib.loads(toml_of(documents, name))
    given = {(section, key): value for section, fields in tree.items() for key, value in fields.items()}
    ours = {key: text for key, text in environment(pod, f"{name}-0").items() if key.startswith("PRFAAS_")}
    return configuration.load(overrides=given, environ=ours)
