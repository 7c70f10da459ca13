"""A real Prometheus for tests: scrapes what it is told to, on a free loopback port, and is ended by its process id."""

import json
import shutil
import subprocess
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from services.free_ports import free_ports
from services.http_client import fetch

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
SCRAPE_S = 1
START_S = STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class Prometheus:
    endpoint: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that it comes to. Raises AssertionError where Prometheus does not take it."""
        found = self.get("query", query=expression)
        assert found["resultType"] == "vector", expression
        series: list[dict[str, Any]] = found["result"]
        return series

    def get(self, what: str, **parameters: str) -> Any:
        _, body = fetch(f"{self.endpoint}/api/v1/{what}?{urllib.parse.urlencode(parameters)}")
        answer = json.loads(body)
        assert answer["status"] == "success", f"{parameters}: {answer.get('error')}"
        return answer["data"]


@contextmanager
def prometheus(folder: Path, targets: Mapping[str, str], rules: Path) -> Iterator[Prometheus]:
    """`targets`: pages by the name of the process, which becomes the job's."""
    assert PROMETHEUS is not None
    [port] = free_ports(1)
    jobs = []
    for name, page in targets.items():
        at = urllib.parse.urlsplit(page)
        jobs.append({"job_name": name, "metrics_path": at.path, "static_configs": [{"targets": [at.netloc]}]})
    every = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    config = {"global": every, "rule_files": [f"{rules}/*.yaml"], "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [PROMETHEUS, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        listen = f"--web.listen-address=127.0.0.1:{port}"
        process = subprocess.Popen([*command, listen], stdout=log, stderr=log, cwd=folder)
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{port}/-/ready", folder / "log")
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)


def _wait_until_ready(process: subprocess.Popen[bytes], page: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        try:
            if fetch(page)[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.05)
