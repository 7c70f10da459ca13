"""Our router as a target of the harness, and by itself for what the harness does not measure.

It logs warnings only, as the other routers do, and keeps everything else: tokenizing, hashing, matching against the
index of a cache, routing, streaming, metrics.
"""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.router.model import NAME

REPOSITORY = Path(__file__).parents[2]
HOST = "127.0.0.1"
READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Variant:
    """`layout`: four workers that do both, or two that prefill and two that decode. `pace`: as in `pacing`."""

    name: str
    port: int
    layout: str = "plain"
    pace: str = "steps"
    cache: bool = True

    def engine(self, model: Path) -> list[str]:
        """Its store and workers take the ports from 100 above."""
        command = [sys.executable, "-m", "bench.router.engine", str(self.port + 100), str(model)]
        return [*command, "--layout", self.layout, "--pace", self.pace, *([] if self.cache else ["--no-cache"])]

    def router(self) -> list[str]:
        return [sys.executable, "-m", "services.router"]

    def environment(self, model: Path) -> dict[str, str]:
        return {
            "PYTHONPATH": str(REPOSITORY),
            "PRFAAS_STORE_ENDPOINTS": f"{HOST}:{self.port + 100}",
            "PRFAAS_ROUTER_PORT": str(self.port),
            "PRFAAS_ROUTER_MODEL_DIR": str(model),
            "PRFAAS_ROUTER_MAX_IN_FLIGHT": "10000",
            "PRFAAS_ROUTER_TOKEN_GAP_TIMEOUT_S": "600",
            "PRFAAS_CACHE_ENABLED": "true" if self.cache else "false",
            "PRFAAS_LOG_LEVEL": "warning",
            "PRFAAS_LOG_FORMAT": "json",
        }


#: What the others are compared with; the last two are for comparison only.
PLAIN, PD = Variant("ours", 8310), Variant("ours-pd", 8330, layout="pd")
STREAMS = Variant("ours-streams", 8350, pace="streams")
BARE = Variant("ours-bare", 8370, cache=False)
VARIANTS = (PLAIN, PD, STREAMS, BARE)


def targets(model: Path) -> dict[str, dict[str, Any]]:
    """As the harness wants them. A stream of ours has two events more than the mock's: the one that opens it and the
    one that says how it ended, which the mock sends with the last token."""
    return {
        variant.name: {
            "port": variant.port,
            "cmd": [variant.engine(model), variant.router()],
            "measure": [-1],
            "env": variant.environment(model),
            "cwd": str(REPOSITORY),
            "extra_events": 2,
            "wait": READY_S,
        }
        for variant in VARIANTS
    }


@dataclass(frozen=True, slots=True)
class Running:
    port: int
    router_pid: int
    engine_pid: int

    def pause(self) -> None:
        os.kill(self.engine_pid, signal.SIGUSR1)

    def go_on(self) -> None:
        os.kill(self.engine_pid, signal.SIGUSR2)


@contextlib.contextmanager
def running(variant: Variant, model: Path, log: Path) -> Iterator[Running]:
    """The engine's side and the router, ready."""
    environment = {**os.environ, **variant.environment(model)}
    with log.open("wb") as out:
        commands = (variant.engine(model), variant.router())
        processes = [
            subprocess.Popen(command, env=environment, cwd=REPOSITORY, stdout=out, stderr=out) for command in commands
        ]
        try:
            engine, router = processes
            _await_ready(variant.port, router)
            yield Running(variant.port, router.pid, engine.pid)
        finally:
            for process in reversed(processes):
                _stop(process)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _await_ready(port: int, router: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + READY_S
    body = json.dumps({"model": NAME, "messages": [{"role": "user", "content": "ready?"}], "max_tokens": 1})
    while time.monotonic() < deadline:
        if router.poll() is not None:
            raise RuntimeError(f"the router has ended with {router.returncode}")
        connection = http.client.HTTPConnection(HOST, port, timeout=5)
        try:
            connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.2)
    raise RuntimeError(f"the router is not ready within {READY_S} s")
