"""A worker whose vLLM cannot be what its settings want ends with exit code 2 and the name of the setting.

Another program stands for the Python that has vLLM: it answers as one, and runs something else for a server.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 120.0
#: It asks for its version; or is to be a server.
PYTHON = """#!/bin/sh
if [ "$1" = -c ]; then echo '["0.32.0", 3, 12]'; else exec {python} -P {server} "$@"; fi
"""
#: What a connector does in a server that has two ranks. It finds our package, and nothing else of ours, by PYTHONPATH.
REFUSING = """
import importlib.util, json, os, sys
from prfaas.engine.vllm.compatibility import findings
from prfaas.engine.vllm.facts import Facts
from prfaas.engine.vllm.refuse import Unsupported, refusals_told
from prfaas.engine.vllm.rule import Verdict

assert os.listdir(os.environ["PYTHONPATH"].split(os.pathsep)[0]) == ["prfaas"]
transfer = json.loads(sys.argv[sys.argv.index("--kv-transfer-config") + 1])
assert transfer["kv_connector_module_path"] == "prfaas.engine.vllm.connector"
assert sys.argv[sys.argv.index("--max-model-len") + 1] == "512"
print("this is the server's log")
with refusals_told(transfer["kv_connector_extra_config"]["bridge"]):
    raise Unsupported.because(findings(Facts(tensor_parallel=2), Verdict.REFUSED))
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """All that is looked at before a server starts."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 8}))
    for name in ("tokenizer.json", "model.safetensors"):
        (folder / name).touch()
    return folder


def vllm_python(folder: Path, server: str) -> Path:
    (folder / "server.py").write_text(server)
    path = folder / "python"
    path.write_text(PYTHON.format(python=sys.executable, server=folder / "server.py"))
    path.chmod(0o755)
    return path


def ended(model: Path, python: Path) -> subprocess.CompletedProcess[str]:
    words = ("--vllm-arguments=--max-model-len", "--vllm-arguments=512")
    options = ("--id", "p", "--region", "a", "--model-dir", str(model), "--engine", "vllm", *words)
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "prefill-worker", *options, "--vllm-python", str(python)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=os.environ | {"TMPDIR": str(model.parent)},
    )
    assert [*model.parent.glob("prfaas-*")] == [], "nothing is left in the folder for what is temporary"
    return done


def test_a_server_that_the_connector_refuses(model: Path, tmp_path: Path):
    """The reason comes from inside of the server. What a server prints is log, and no output of the worker."""
    done = ended(model, vllm_python(tmp_path, REFUSING))
    assert done.returncode == 2, done.stderr
    assert "Error: worker.vllm_arguments: --tensor-parallel-size (2): " in done.stderr
    assert "start a worker for each accelerator" in done.stderr
    assert done.stdout == "" and "this is the server's log" in done.stderr


def test_a_server_that_does_not_start(model: Path, tmp_path: Path):
    """Whatever it says of it is in its log."""
    done = ended(model, vllm_python(tmp_path, "import sys; print('no such option'); sys.exit(7)"))
    assert done.returncode == 2, done.stderr
    assert "Error: worker.vllm_arguments: the server ended with 7 while it started; its log says why" in done.stderr
    assert "no such option" in done.stderr


def test_a_worker_that_ends_while_its_server_starts(model: Path, tmp_path: Path):
    """Which takes minutes: the server ends as well, and leaves nothing behind."""
    python = vllm_python(tmp_path, "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)")
    options = ("--id", "p", "--region", "a", "--model-dir", str(model), "--engine", "vllm")
    worker = subprocess.Popen(
        [sys.executable, "-m", "services.cli", "prefill-worker", *options, "--vllm-python", str(python)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    try:
        assert worker.stderr is not None
        server = next(int(line.split()[1]) for line in worker.stderr if line.startswith("pid "))
        worker.terminate()
        assert "Traceback" not in worker.communicate(timeout=LIMIT_S)[1]
    finally:
        worker.kill()
        worker.wait()
    assert not Path(f"/proc/{server}").exists()
    assert [*tmp_path.glob("prfaas-*")] == [], "nothing is left in the folder for what is temporary"


def test_no_vllm_and_no_model(model: Path, tmp_path: Path):
    """Told before a server is started."""
    done = ended(model, tmp_path / "none")
    assert done.returncode == 2 and "Error: worker.vllm_python: " in done.stderr, done.stderr
    (model / "model.safetensors").rename(model / "model.gguf")
    done = ended(model, tmp_path / "none")
    assert done.returncode == 2 and "but weights in GGUF" in done.stderr, done.stderr
