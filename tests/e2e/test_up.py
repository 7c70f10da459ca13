"""The `prfaas` command as a user runs it: it says when it is ready, stops on Ctrl-C, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.http_client import fetch

READY_S, GONE_S = 90.0, 20.0

ModelDir = Callable[[str], Path]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "services.cli", *arguments]


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def started(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_up_stops_all_that_it_started(model_dir: ModelDir, signum: signal.Signals):
    """Ctrl-C, SIGTERM, and even kill -9 of the launcher leave no process and no open port."""
    with running("up", "--model", str(model_dir("cost_model")), "--port", "0", "--json") as process:
        cluster = started(process)
        assert set(cluster["processes"]) == {"router", "prefill-0", "decode-0", "decode-1"}
        status, body = fetch(f"{cluster['endpoint']}/models")
        assert (status, json.loads(body)["data"][0]["id"]) == (200, cluster["model"])
        children = family(process.pid)
        assert len(children) >= 4 + 2 * 3  # the services, and an engine and a pump for each worker
        process.send_signal(signum)
        process.wait(GONE_S)
        gone, alive = psutil.wait_procs(children, GONE_S)
        assert not alive and len(gone) == len(children)
        if signum is not signal.SIGKILL:
            assert process.returncode == 0
        with pytest.raises(ConnectionRefusedError):
            fetch(f"{cluster['endpoint']}/models")


def test_up_notices_a_process_that_dies(model_dir: ModelDir):
    """An engine that is killed takes its worker with it, and `up` ends and says so instead of limping on."""
    with running("up", "--model", str(model_dir("cost_model")), "--port", "0", "--json") as process:
        worker = started(process)["processes"]["decode-0"]
        engine = next(child for child in family(worker) if "engine_process" in " ".join(child.cmdline()))
        os.kill(engine.pid, signal.SIGKILL)
        assert process.wait(GONE_S) == 1


def test_a_stop_while_starting_is_a_stop(model_dir: ModelDir):
    """Ctrl-C during the start is obeyed at once and leaves nothing."""
    with running("up", "--model", str(model_dir("cost_model")), "--port", "0") as process:
        launcher = psutil.Process(process.pid)
        while not (children := launcher.children()):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(GONE_S) == 0
        assert not psutil.wait_procs(children, GONE_S)[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("up", "--pd-roles", "mixed,both"), "'both' is not one of"),
        (("up", "--wan-rtt-ms", "5"), "needs --wan-mbit"),
        (("wan-relay", "--route", "nonsense", "--mbit", "1"), "host:port=host:port"),
        (("router", "--port", "x"), "router.port"),
        (("decode-worker",), "worker.id"),
        (("config", "check", "--config", "no-such-file.toml"), "no-such-file.toml"),
    ],
)
def test_a_wrong_command_line_is_explained(arguments: tuple[str, ...], says: str):
    """Exit code 2 and one line that names the setting, no traceback."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_config_dump_masks_secrets():
    """The dump is JSON, comes with the environment applied, and shows no secret."""
    environ = os.environ | {"PRFAAS_STORE_PASSWORD": "hunter2", "PRFAAS_ROUTER_PORT": "1234"}
    done = subprocess.run(
        command("config", "dump"), capture_output=True, text=True, timeout=60, check=True, env=environ
    )
    assert json.loads(done.stdout)["router"]["port"] == 1234
    assert "hunter2" not in done.stdout


def test_the_demo_shows_its_point(model_dir: ModelDir):
    """`prfaas demo --json`: the short prompt stays, the long one goes remote and costs decode one token."""
    arguments = command("demo", "--json", "--model", str(model_dir("kimi_linear")))
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert (shown["short"]["path"], shown["short"]["kv_bytes"]) == ("local", 0)
    assert (shown["long"]["path"], shown["long"]["recomputed_tokens"]) == ("remote", 1)
    assert shown["long"]["kv_bytes"] > 0 and shown["long"]["uncached_tokens"] > shown["short"]["uncached_tokens"]
    assert all(one["text"] and one["ttft_seconds"] > 0 for one in shown.values())
