"""The compose cluster as the tests see it: docker-compose, docker, and what they print."""

import json
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy/compose/docker-compose.yml"
PROJECT = "prfaas-test"
ONCE = frozenset({"certificates", "model"})


def run(*command: str, environ: Mapping[str, str] | None = None, limit_s: float = 120.0) -> str:
    """What the command prints. Fails with all it said when it fails."""
    done = subprocess.run(
        command, env={**os.environ, **(environ or {})}, cwd=ROOT, capture_output=True, text=True, timeout=limit_s
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass(frozen=True, slots=True)
class Composed:
    """`environ` are the variables that the compose file is filled in with."""

    environ: Mapping[str, str]
    routers: Mapping[str, str] = field(default_factory=dict)

    def compose(self, *arguments: str, limit_s: float = 120.0) -> str:
        return run("docker-compose", "-f", str(FILE), *arguments, environ=self.environ, limit_s=limit_s)

    def config(self) -> dict[str, Any]:
        return dict(json.loads(self.compose("config", "--format", "json")))

    def up(self) -> float:
        """Seconds until all is healthy."""
        begun = time.monotonic()
        self.compose("up", "--detach", "--no-build", "--wait", "--wait-timeout", "480", limit_s=600)
        return time.monotonic() - begun

    def down(self) -> None:
        self.compose("down", "--volumes", "--timeout", "45", limit_s=300)

    def container(self, service: str) -> str:
        return self.compose("ps", "--all", "--quiet", service).strip()

    def inspect(self, service: str) -> dict[str, Any]:
        return dict(json.loads(run("docker", "inspect", self.container(service)))[0])

    def health(self, service: str) -> str:
        """healthy, unhealthy or starting; or its status, when it does not run."""
        state = self.inspect(service)["State"]
        return str(state["Health"]["Status"] if state["Status"] == "running" else state["Status"])

    def wait_healthy(self, service: str, limit_s: float = 180.0) -> float:
        """Seconds that took."""
        begun = time.monotonic()
        while (state := self.health(service)) != "healthy":
            assert time.monotonic() - begun < limit_s, f"{service} is {state} after {limit_s} s"
            time.sleep(0.5)
        return time.monotonic() - begun

    def python(self, service: str, program: str, limit_s: float = 60.0) -> str:
        """Run a few lines inside a container."""
        return self.compose("exec", "-T", service, "python", "-c", program, limit_s=limit_s)

    def address(self, service: str, network: str) -> str:
        return str(self.inspect(service)["NetworkSettings"]["Networks"][f"{PROJECT}_{network}"]["IPAddress"])

    def leave(self, service: str, network: str) -> None:
        """As a cable that is pulled: nobody is told, and nothing arrives any more."""
        run("docker", "network", "disconnect", f"{PROJECT}_{network}", self.container(service))

    def join(self, service: str, network: str) -> None:
        aliases = self.config()["services"][service]["networks"][network]["aliases"]
        named = [part for alias in (service, *aliases) for part in ("--alias", alias)]
        run("docker", "network", "connect", *named, f"{PROJECT}_{network}", self.container(service))
