"""`prfaas up --engine vllm`, as somebody runs it who has a model folder and a Python with vLLM."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.vllm.conftest import PYTHON, START_S

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

WORDS = "--dtype float32 --max-model-len 4096 --max-num-seqs 4"
ANSWER_S, GONE_S = 120.0, 60.0


def asked(endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json", "x-prfaas-receipt": "1"}
    request = urllib.request.Request(f"{endpoint}/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


@pytest.fixture
def place() -> Iterator[Path]:
    """For temporary files, with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="up-") as path:
        yield Path(path)


def test_up_serves_a_prompt_from_the_other_region(model_dir: Callable[[str], Path], place: Path) -> None:
    """The one line on standard output says where; after Ctrl-C nothing is left, neither a process nor a file."""
    options = ("--engine", "vllm", "--model", str(model_dir("qwen3")), "--vllm-python", PYTHON)
    more = (f"--vllm-arguments={WORDS}", "--port", "0", "--threshold-tokens", "256", "--json")
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli", "up", *options, *more],
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(place)},
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        cluster = json.loads(process.stdout.readline())
        below = psutil.Process(process.pid).children(recursive=True)
        answer = asked(cluster["endpoint"], {"model": cluster["model"], "prompt": "light " * 100, "max_tokens": 8})
        receipt = answer["prfaas_receipt"]
        assert answer["usage"]["completion_tokens"] == 8
        assert (receipt["path"], receipt["recomputed_tokens"]) == ("remote", 1) and receipt["kv_bytes"] > 0
        process.send_signal(signal.SIGINT)
        assert process.wait(GONE_S) == 0
        assert psutil.wait_procs(below, timeout=GONE_S)[1] == []
        assert [*place.glob("prfaas-*")] == []
        assert process.stdout.read() == ""
    finally:
        process.kill()
        process.wait()


def test_a_server_with_refused_settings_ends_its_worker(model_dir: Callable[[str], Path]) -> None:
    """All of them in one message, read off the configuration of a real server."""
    words = ("--load-format", "dummy", "--hf-overrides", '{"rope_theta": 5000.0}', *WORDS.split(), "--enforce-eager")
    arguments = (f"--vllm-arguments={word}" for word in words)
    options = ("--id", "d", "--region", "b", "--model-dir", str(model_dir("qwen3")), "--engine", "vllm", *arguments)
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "decode-worker", *options, "--vllm-python", PYTHON],
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert done.returncode == 2, done.stderr[-4000:]
    # What is left of the server may still speak after it.
    [said] = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert said.startswith("Error: worker.vllm_arguments: ")
    assert "--load-format (dummy): " in said and "--hf-overrides (on): " in said
