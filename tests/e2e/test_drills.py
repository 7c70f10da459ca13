"""`prfaas drill` on a cluster of `prfaas up`, as an operator runs both: the bound holds, and the exit code says so."""

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

REPOSITORY = Path(__file__).parents[2]
READY_S, DRILL_S, GONE_S = 90.0, 170.0, 20.0
UP = ("--port", "0", "--threshold-tokens", "500", "--no-rebalance", "--prefill-workers", "2", "--wan-mbit", "500")
SHORT = ("--yes", "--json", "--before-s", "1", "--fault-s", "6", "--after-s", "2")

#: A cluster's start, a drill and the cluster's end.
pytestmark = pytest.mark.timeout(READY_S + 2 * DRILL_S + GONE_S)

ModelDir = Callable[[str], Path]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "services.cli", *arguments]


def environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])}


@contextmanager
def up(folder: Path, model: Path) -> Iterator[dict[str, Any]]:
    """A cluster that was started in the folder."""
    process = subprocess.Popen(
        command("up", "--model", str(model), *UP, "--log-dir", str(folder / "logs"), "--json"),
        cwd=folder,
        env=environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert process.wait(GONE_S) == 0
        assert list((folder / ".prfaas" / "clusters").iterdir()) == [], "the cluster is gone, but not its file"
    finally:
        process.kill()
        process.wait()


def drill(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("drill", *arguments),
        cwd=folder,
        env=environ(),
        capture_output=True,
        text=True,
        timeout=DRILL_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def held(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["held"] and told["broken"] == []
    assert (told["wrong"], told["hung"]) == (0, 0)
    assert told["given_back"] is True
    assert told["answers_checked"] >= told["requests_before"] > 0
    return told


def test_kill_prefill(tmp_path: Path, model_dir: ModelDir):
    """The worker that was used is killed and no other process; nobody's request fails; and it is back at the end.
    Without --yes, and with nobody to ask, nothing is broken at all."""
    with up(tmp_path, model_dir("cost_model")) as cluster:
        refused = drill(tmp_path, "kill-prefill")
        assert refused.returncode == 2 and "--yes" in refused.stderr
        assert all(psutil.pid_exists(pid) for pid in cluster["processes"].values())
        told = held(drill(tmp_path, "kill-prefill", *SHORT))
        assert (told["drill"], told["failed"]) == ("kill-prefill", 0)
        gone = {name for name, pid in cluster["processes"].items() if not psutil.pid_exists(pid)}
        assert gone == {told["target"]} <= {"prefill-0", "prefill-1"}
        assert told["remote_since"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kill-decode", "wan-cut", "store-outage", "kill-prefill"])
def test_every_drill(tmp_path: Path, model_dir: ModelDir, name: str):
    """On a cluster of its own, with the fault as long as it is by default."""
    with up(tmp_path, model_dir("cost_model")):
        told = held(drill(tmp_path, name, "--yes", "--json"))
        assert told["drill"] == name
        if name == "wan-cut":
            assert told["disturbed"] > 0, "nothing felt it: the line was not cut"
        if name != "kill-decode":
            assert told["failed"] == 0


@pytest.mark.slow
def test_a_bound_that_does_not_hold_is_told_by_the_exit_code(tmp_path: Path, model_dir: ModelDir):
    """The negative control: all that decodes is stopped, by the operator's own command, for longer than the bound."""
    with up(tmp_path, model_dir("cost_model")) as cluster:
        pids = " ".join(str(cluster["processes"][name]) for name in ("decode-0", "decode-1"))
        done = drill(
            tmp_path,
            *("kill-decode", "--yes", "--json", "--before-s", "1", "--fault-s", "25", "--after-s", "2"),
            *("--endpoint", cluster["endpoint"].removesuffix("/v1"), "--model", cluster["model"]),
            *("--exec", f"kill -STOP {pids}", "--undo", f"kill -CONT {pids}"),
        )
        told = json.loads(done.stdout)
        assert done.returncode == 1 and not told["held"]
        assert any("failed" in one or "right again" in one for one in told["broken"])
        assert told["given_back"] is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("kill-decode",), "kubectl delete pod"),
        (("wan-cut", "--yes"), "--exec"),
        (("kill-prefill", "--exec", "true"), "--endpoint and --model"),
        (("kill-prefill", "--endpoint", "http://x"), "go with --exec"),
        (("kill-prefill", "--cluster-file", "nothing.json"), "nothing.json"),
        (("pull-the-plug",), "pull-the-plug"),
    ],
)
def test_without_a_cluster_on_this_machine_it_says_what_to_run(tmp_path: Path, arguments: tuple[str, ...], says: str):
    """One message, exit code 2, and nothing is done."""
    done = drill(tmp_path, *arguments)
    assert done.returncode == 2, done.stdout
    assert says in done.stderr and "Traceback" not in done.stderr
