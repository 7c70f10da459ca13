"""A drill hits the process that was written down, or nobody."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.errors import ConfigError, PeerUnavailable
from services.drill import cluster_file
from services.drill.bounds import Drill, Sent
from services.drill.cluster_file import ClusterFile
from services.drill.faults import Commands, Kill, fault_on
from services.drill.processes import AnotherProcess, Process, alive, identify, send

SLEEPER = (sys.executable, "-c", "import time; time.sleep(600)")


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes = [subprocess.Popen(SLEEPER) for _ in range(3)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def named(process: subprocess.Popen[bytes]) -> Process:
    found = identify(process.pid)
    assert found is not None
    return found


def cluster(processes: dict[str, Process], **facts: str) -> ClusterFile:
    launcher = identify(os.getpid())
    assert launcher is not None
    return ClusterFile(
        cluster="c", launcher=launcher, endpoint="http://x", model="m", processes=processes, metrics={}, **facts
    )


def test_a_signal_reaches_the_process_that_was_meant(sleepers: list[subprocess.Popen[bytes]]):
    """And no other."""
    first, second, _ = sleepers
    send(named(first), signal.SIGKILL)
    assert first.wait(20) == -signal.SIGKILL
    assert second.poll() is None and alive(named(second))


def test_another_process_with_the_same_id_is_left_alone(sleepers: list[subprocess.Popen[bytes]]):
    """Ids are given out again: what has another beginning is somebody else."""
    process = sleepers[0]
    with pytest.raises(AnotherProcess):
        send(Process(process.pid, named(process).began + 1), signal.SIGKILL)
    assert process.poll() is None
    gone = named(sleepers[1])
    sleepers[1].kill()
    sleepers[1].wait()
    assert not alive(gone)
    with pytest.raises(AnotherProcess):
        send(gone, signal.SIGKILL)


def test_the_worker_that_is_used_most_is_killed(sleepers: list[subprocess.Popen[bytes]]):
    """Of those of the kind; the others go on."""
    names = ("prefill-0", "prefill-1", "decode-0")
    file = cluster({name: named(process) for name, process in zip(names, sleepers, strict=True)})
    seen = [Sent(0, 1, "remote", "prefill-1", "decode-0")] * 3 + [Sent(0, 1, "remote", "prefill-0", "decode-0")]
    assert Kill(file, "prefill").inflict(seen, 1.0) == "prefill-1"
    assert sleepers[1].wait(20) == -signal.SIGKILL
    assert sleepers[0].poll() is None and sleepers[2].poll() is None
    assert file.workers("prefill") == ["prefill-0"]


@pytest.mark.parametrize(
    ("drill", "says"),
    [
        (Drill.KILL_PREFILL, "no prefill worker"),
        (Drill.KILL_DECODE, "no second PD node"),
        (Drill.WAN_CUT, "--wan-mbit"),
        (Drill.STORE_OUTAGE, "--exec"),
    ],
)
def test_a_drill_that_the_cluster_has_nothing_for_is_refused(
    sleepers: list[subprocess.Popen[bytes]], drill: Drill, says: str
):
    """Before anything is asked or broken: killing the only node that decodes is an outage and no drill."""
    with pytest.raises(PeerUnavailable, match=says):
        fault_on(cluster({"decode-0": named(sleepers[0])}), drill)


def test_what_up_leaves_is_found_again_and_is_nobody_elses(tmp_path: Path, sleepers: list[subprocess.Popen[bytes]]):
    """Only its owner can read it, because a token is in it. A launcher that is gone has no cluster."""
    assert cluster_file.find(tmp_path) is None
    file = cluster({"decode-0": named(sleepers[0])}, token="t")
    path = cluster_file.write(file, tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert cluster_file.read(path) == cluster_file.find(tmp_path) == file
    path.write_bytes(path.read_bytes().replace(b'"began":', b'"began":9'))
    assert cluster_file.find(tmp_path) is None
    with pytest.raises(ConfigError, match="does not run any more"):
        cluster_file.read(path)
    cluster_file.write(file, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_the_operators_commands_are_run_and_their_failure_is_told(tmp_path: Path):
    """The one that breaks, then the one that undoes it."""
    trace = tmp_path / "trace"
    commands = Commands(f"echo broken >> {trace}", f"echo mended >> {trace}")
    commands.inflict((), 1.0)
    commands.heal()
    assert trace.read_text().split() == ["broken", "mended"]
    with pytest.raises(PeerUnavailable, match="it ended with 3: no such thing"):
        Commands("echo no such thing >&2; exit 3", "").inflict((), 1.0)
