"""What the chart renders for two regions, run as it stands: the pods' arguments, variables and files, as processes of
this machine on a real etcd, with the probes and the smoke test that Kubernetes and helm would run.

What containers, volumes, services and network policies do is not shown by it.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from prfaas.engine.tiny import build_tiny
from prfaas.security import PeerRole
from services.certificates import pem_files, write_all
from tests.deploy.chart import CHART, Document, container, environment, pods, rendered, services_of_ours, toml_of
from tests.etcd_process import ETCD, start_etcd

START_S, STOP_S = 240.0, 60.0
HERE = "127.0.0.1"

pytestmark = pytest.mark.timeout(START_S + 2 * STOP_S)


@dataclass
class Run:
    """Processes by region and set, and how to ask each whether it is ready."""

    smoke: dict[str, list[str]]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    probes: dict[str, dict[str, str]] = field(default_factory=dict)

    def tested(self, region: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """`helm test` of a region, without Kubernetes."""
        options = [*self.smoke[region], f"--timeout-s={timeout_s}"]
        command = [sys.executable, str(CHART / "files/smoke.py"), *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    if ETCD is None:
        pytest.skip("etcd is not on the PATH")
    folder = tmp_path_factory.mktemp("chart")
    build_tiny(folder / "model", "kimi_linear")
    write_all(folder / "certificates")
    etcd = start_etcd(folder / "etcd")
    running = Run({})
    try:
        for region in ("b", "a"):
            documents = rendered(None, _values(region, etcd.endpoint, _free_ports(14)))
            running.smoke[region] = _smoke_options(documents)
            for name, pod in services_of_ours(documents):
                _start(running, region, name, pod, toml_of(documents, name), folder)
        for name in running.probes:
            _wait_until(running, name, "readiness")
        yield running
    finally:
        for process in running.processes.values():
            process.kill()
            process.wait(STOP_S)
        etcd.stop()


def test_every_pod_becomes_ready_by_its_own_probes(run: Run) -> None:
    """Both regions have found themselves at the addresses that they advertise, and routers have a path."""
    assert {name.split("/")[1] for name in run.probes} == {
        "prfaas-router",
        "prfaas-decode-worker-default",
        "prfaas-prefill-worker-default",
        "prfaas-cache-pool",
    }
    for name in run.probes:
        for probe in ("startup", "liveness", "readiness"):
            assert _status(run.probes[name][probe]) == 200, (name, probe)


def test_the_smoke_test_passes(run: Run) -> None:
    for region, checks in (("a", 2), ("b", 3)):
        said = run.tested(region, 30)
        assert said.returncode == 0, said.stdout + said.stderr
        assert said.stdout.count("ok: ") == checks


def test_sigterm_drains_and_ends(run: Run) -> None:
    """As Kubernetes stops pods: all end by themselves, with 0; and then the smoke test fails."""
    for process in run.processes.values():
        process.send_signal(signal.SIGTERM)
    for name, process in run.processes.items():
        assert process.wait(STOP_S) == 0, name
    said = run.tested("b", 0)
    assert said.returncode == 1 and said.stdout.count("FAILED: ") == 3


def _values(region: str, etcd: str, ports: list[int]) -> dict[str, Any]:
    """Ports are apart, because all have one address here. This etcd has no certificates; services show each other
    theirs, as the chart's own values say."""
    free = iter(ports)

    def named(*names: str) -> dict[str, int]:
        return {name: next(free) for name in names}

    roles = {"a": ["prefillWorker", "cachePool"], "b": ["router", "decodeWorker", "cachePool"]}
    worker, pool = {"kv": {"pool_bytes": 64 << 20}}, {"pool": {"memory_bytes": 64 << 20}}
    return {
        "region": region,
        "regions": [{"name": name, "roles": each, "cidrs": []} for name, each in roles.items()],
        "store": {"endpoints": [etcd], "tls": {"enabled": False}},
        "router": {"ports": named("http", "metrics", "admin")},
        "prefillWorker": {"ports": named("rpc", "link", "kv", "metrics"), "config": worker},
        "decodeWorker": {"ports": named("rpc", "link", "kv", "metrics"), "config": worker},
        "cachePool": {"ports": named("rpc", "kv", "metrics"), "config": pool},
    }


def _start(run: Run, region: str, name: str, pod: Document, toml: str, folder: Path) -> None:
    """As the pod says; only where files lie is another place."""
    own, at = container(pod), folder / region / name
    at.mkdir(parents=True)
    role = PeerRole(pod["metadata"]["labels"]["role"])
    for key, path in zip(("ca.crt", "tls.crt", "tls.key"), pem_files(folder / "certificates", role), strict=True):
        (at / key).symlink_to(path)
    assert "/etc/prfaas/tls/tls.crt" in toml
    (at / "prfaas.toml").write_text(
        toml.replace("/models/model", str(folder / "model")).replace("/etc/prfaas/tls", str(at))
    )
    arguments = [text.replace("/etc/prfaas/config", str(at)) for text in own["args"]]
    variables = {key: text for key, text in os.environ.items() if not key.startswith("PRFAAS_")}
    with (at / "log").open("wb") as log:
        run.processes[f"{region}/{name}"] = subprocess.Popen(
            [sys.executable, "-m", "services.cli", *arguments],
            env=variables | environment(pod, f"{name}-0", HERE),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    ports = {port["name"]: port["containerPort"] for port in own["ports"]}
    run.probes[f"{region}/{name}"] = {
        probe: f"http://{HERE}:{ports[get['port']]}{get['path']}"
        for probe in ("startup", "readiness", "liveness")
        for get in [own[f"{probe}Probe"]["httpGet"]]
    } | {"log": str(at / "log")}


def _smoke_options(documents: list[Document]) -> list[str]:
    """Names of services become this machine's address; that the router's service has its own port is undone."""
    own = container(dict(pods(documents))["prfaas-smoke"])
    listening = {
        name: {port["name"]: port["containerPort"] for port in container(pod)["ports"]}
        for name, pod in services_of_ours(documents)
    }
    options = []
    for argument in own["args"]:
        if argument.startswith("--api="):
            options.append(f"--api=http://{HERE}:{listening['prfaas-router']['http']}")
        elif argument.startswith("--ready="):
            options.append(f"--ready=http://{HERE}:{argument.rpartition(':')[2]}")
    return options


def _wait_until(run: Run, name: str, probe: str) -> None:
    deadline = time.monotonic() + START_S
    while _status(run.probes[name][probe]) != 200:
        for each, process in run.processes.items():
            assert process.poll() is None, f"{each} ended: {_log(run, each)}"
        assert time.monotonic() < deadline, f"{name} is not ready: {_log(run, name)}"
        time.sleep(0.1)


def _log(run: Run, name: str) -> str:
    return Path(run.probes[name]["log"]).read_text()[-2000:]


def _status(url: str) -> int | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((HERE, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
