"""What was frozen or started for a test does not outlive it, however it ends."""

import signal
import subprocess
import sys

import psutil
import pytest

from tests.chaos.guard import Guard

LIVENESS_S = 20.0
#: It names a process that it has frozen, and then waits to be killed.
FREEZES = """
import signal, subprocess, sys
from tests.chaos.guard import Guard
frozen = subprocess.Popen(["sleep", "600"])
guard = Guard(signal.SIGCONT)
guard.watch(frozen.pid)
frozen.send_signal(signal.SIGSTOP)
print(frozen.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_who_was_frozen_goes_on_when_the_tests_are_killed():
    tests = subprocess.Popen([sys.executable, "-c", FREEZES], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert tests.stdout is not None and tests.stdin is not None
    frozen = psutil.Process(int(tests.stdout.readline()))
    try:
        waits(frozen, psutil.STATUS_STOPPED)
        tests.kill()
        tests.wait()
        waits(frozen, psutil.STATUS_SLEEPING)
    finally:
        frozen.kill()
        tests.stdin.close()
        tests.stdout.close()


def test_the_last_one_that_was_named_is_ended(sleeper: subprocess.Popen[bytes]):
    guard = Guard(signal.SIGKILL)
    guard.watch(2**22 + 1)  # no process has this number
    guard.watch(sleeper.pid)
    guard.act()
    assert sleeper.wait(LIVENESS_S) == -signal.SIGKILL


def waits(process: psutil.Process, status: str) -> None:
    """Until the kernel says so."""
    for _ in range(int(LIVENESS_S / 0.02)):
        if process.status() == status:
            return
        try:
            process.wait(0.02)
        except psutil.TimeoutExpired:
            continue
    raise AssertionError(f"{process.status()}, not {status}")
