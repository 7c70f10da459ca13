"""The `prfaas` command as a user runs it: it says when it is ready, stops on Ctrl-C, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.http_client import chat, fetch
from services.running import LAUNCHED

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


@pytest.mark.parametrize(
    "signum", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM, signal.SIGKILL]
)
def test_up_stops_all_that_it_started(model_dir: ModelDir, signum: signal.Signals):
    """Ctrl-C, SIGTERM, and even kill -9 of the launcher leave no process and no open port."""
    with running("up", "--model", str(model_dir("cost_model")), "--port", "0", "--json") as process:
        cluster = started(process)
        workers, pools = {"prefill-0", "decode-0", "decode-1"}, {"pool-a-0", "pool-b-0"}
        assert set(cluster["processes"]) == {"router", *workers, *pools}
        status, body = fetch(f"{cluster['endpoint']}/models")
        assert (status, json.loads(body)["data"][0]["id"]) == (200, cluster["model"])
        children = family(process.pid)
        assert (
            len(children) >= 6 + 2 * 3 + 2
        )  # the services, an engine and a pump for each worker, a pump for each pool
        process.send_signal(signum)
        process.wait(GONE_S)
        gone, alive = psutil.wait_procs(children, GONE_S)
        assert not alive and len(gone) == len(children)
        if signum is not signal.SIGKILL:
            assert process.returncode == 0
        with pytest.raises(ConnectionRefusedError):
            fetch(f"{cluster['endpoint']}/models")


def test_up_makes_certificates_for_the_run(model_dir: ModelDir):
    """With --mtls the cluster serves as it does without, and its keys are gone when it is."""
    with running("up", "--model", str(model_dir("cost_model")), "--port", "0", "--mtls", "--json") as process:
        cluster = started(process)
        folder = Path(cluster["certificates"])
        assert folder.stat().st_mode & 0o777 == 0o700 and (folder / "router.key").exists()
        endpoint = cluster["endpoint"].removesuffix("/v1")
        *_, answer = chat(endpoint, cluster["model"], "hello", 4)
        assert answer.text
        process.send_signal(signal.SIGINT)
        assert process.wait(GONE_S) == 0
        assert not folder.exists()


@pytest.mark.parametrize("part", [pytest.param("node", marks=pytest.mark.slow), "engine"])
def test_up_starts_a_lost_worker_again(model_dir: ModelDir, part: str):
    """A worker that is killed, or whose engine is, costs neither the cluster nor its place in it."""
    arguments = ("--model", str(model_dir("cost_model")), "--port", "0", "--threshold-tokens", "100", "--json")
    # With a cache the second of equal prompts has nothing left that is worth sending to region a.
    with running("up", *arguments, "--no-pool") as process:
        cluster = started(process)
        worker = cluster["processes"]["prefill-0"]
        engines = [child.pid for child in family(worker) if "prfaas.node.engine_process" in child.cmdline()]
        victim = engines[0] if part == "engine" else worker
        os.kill(victim, signal.SIGKILL)
        deadline = time.monotonic() + READY_S
        while psutil.pid_exists(worker) or ask(cluster, "hello " * 300)["prefill"] != "prefill-0":
            assert time.monotonic() < deadline, "the worker did not come back"
        process.send_signal(signal.SIGINT)
        assert process.wait(GONE_S) == 0


def ask(cluster: dict[str, Any], prompt: str) -> Any:
    """The receipt of an answer, which must come whatever happens to the worker."""
    *_, answer = chat(cluster["endpoint"].removesuffix("/v1"), cluster["model"], prompt, 4)
    assert answer.text
    return answer.receipt


def test_a_stop_while_starting_is_a_stop(model_dir: ModelDir):
    """Ctrl-C during the start is obeyed at once and leaves nothing."""
    with running("up", "--model", str(model_dir("cost_model")), "--port", "0") as process:
        launcher = psutil.Process(process.pid)
        while not (children := launcher.children()):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(GONE_S) == 0
        assert not psutil.wait_procs(children, GONE_S)[1]


def test_a_service_whose_launcher_is_gone_already_does_not_start():
    """A launcher killed while its services start leaves none of them behind."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    environ = os.environ | {LAUNCHED: str(gone.pid)}
    done = subprocess.run(command("router", "--port", "0"), env=environ, timeout=60, check=False, capture_output=True)
    assert done.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("up", "--pd-roles", "mixed,both"), "'both' is not one of"),
        (("up", "--wan-rtt-ms", "5"), "needs --wan-mbit"),
        (("up", "--pd-roles", "prefill"), "no node decodes"),
        (("up", "--pd-roles", "mixed", "--pd-roles", "decode"), "more than once"),
        (("up", "--model", "tests", "--threshold-tokens", "-5"), "routing.threshold_tokens"),
        (("up", "--model", "tests", "--port", "99999"), "router.port"),
        (("up", "--model", "tests", "--kv-pool-bytes", "10"), "kv.pool_bytes"),
        (("up", "--wan-mbit", "nan"), "not a finite number"),
        (("up", "--wan-mbit", "inf"), "not a finite number"),
        (("up", "--model", "tests", "--family", "kimi_linear"), "does not go with --model"),
        (("demo", "--model", "tests", "--family", "kimi_linear"), "does not go with --model"),
        (("up", "--no-rebalance", "--slow-period-s", "5"), "nothing is planned"),
        (("up", "--admin-key", ""), "--admin-key is empty"),
        (("up", "--engine", "vllm"), "needs --model"),
        (("up", "--engine", "vllm", "--model", "tests", "--vllm-arguments", "'"), "--vllm-arguments: No closing quot"),
        (("up", "--engine", "vllm", "--model", "tests", "--pools", "1"), "goes without --pools"),
        (("up", "--engine", "vllm", "--model", "tests"), "tests has no config.json"),
        (("up", "--vllm-arguments", "--dtype float32"), "go with --engine vllm only"),
        (("up", "--model", "tests", "--keys-file", "README.md"), "README.md"),
        (("drain", "n", "--undo", "--force", "--admin", "http://x", "--key", "k"), "--force does not go"),
        (("model", "build-tiny", "tests", "--family", "qwen3"), "tests is not empty"),
        (("prefill-worker", "--role", "decode"), "No such option"),
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
