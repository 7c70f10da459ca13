"""What `prfaas up --engine vllm` settles before it starts anything."""

import json
from pathlib import Path

import pytest

from prfaas.errors import ConfigError
from services.local_cluster import Vllm
from services.vllm_engine import ON_CPU, listed, prepare, share_cpus

#: Asked for its version, and for its device.
ANSWERS = """#!/bin/sh
case "$2" in *current_platform*) echo '"{device}"';; *) echo '["0.32.0", 3, 12]';; esac
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 8}))
    for name in ("tokenizer.json", "model.safetensors"):
        (folder / name).touch()
    return folder


def python_on(folder: Path, device: str) -> str:
    path = folder / "python"
    path.write_text(ANSWERS.format(device=device))
    path.chmod(0o755)
    return str(path)


def test_on_a_cpu_servers_are_modest(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is given comes after that, and so wins."""
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "7")
    python = python_on(tmp_path, "cpu")
    assert prepare(python, ("--dtype", "float32"), model, 2) == Vllm(
        python=python, arguments=(*ON_CPU, "--dtype", "float32")
    )


def test_with_gpus_each_worker_sees_one(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of those that are named, in turn; where none are named it sees all."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-5")
    vllm = prepare(python_on(tmp_path, "cuda"), ("--max-model-len", "8192"), model, 3)
    assert vllm.options[-2:] == ["--vllm-arguments=--max-model-len", "--vllm-arguments=8192"]
    seen = [vllm.surroundings(worker)["CUDA_VISIBLE_DEVICES"] for worker in range(3)]
    assert seen == ["4", "GPU-5", "4"]
    assert listed({}) == () and Vllm(python="python3").surroundings(0) == {}


def test_a_machine_without_a_gpu_is_told_at_once(model: Path, tmp_path: Path):
    """Before any server takes minutes to find out."""
    with pytest.raises(ConfigError, match="finds none on this machine"):
        prepare(python_on(tmp_path, ""), (), model, 2)


def test_cpus_are_shared():
    """A server that is left alone binds a thread to every core. What is set stays."""
    surroundings: dict[str, str] = {"OMP_NUM_THREADS": "3"}
    share_cpus(surroundings, 2)
    assert surroundings == {"OMP_NUM_THREADS": "3", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    share_cpus(alone := {}, 10_000)
    assert alone["OMP_NUM_THREADS"] == "1"
