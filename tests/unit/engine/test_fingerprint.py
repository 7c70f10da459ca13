"""What makes two model folders the same for the namespace, and what does not."""

import json
from pathlib import Path

import pytest

from prfaas.engine.fingerprint import tokenizer_digest, weights_digest
from prfaas.errors import ConfigError

CONFIG = {"model_type": "qwen3", "rope_theta": 10000, "transformers_version": "5.19.0"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "ours", {})


def write(directory: Path, settings: dict[str, object], weights: bytes = b"weights") -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG | settings))
    (directory / "model-1.safetensors").write_bytes(weights)
    (directory / "model-2.safetensors").write_bytes(b"more")
    (directory / "tokenizer.json").write_text("{}")
    return directory


def test_copies_of_a_folder_are_the_same_model(folder: Path, tmp_path: Path) -> None:
    """Neither the path nor the release that saved the configuration counts."""
    copy = write(tmp_path / "theirs", {"transformers_version": "6.0.0"})
    assert weights_digest(copy) == weights_digest(folder)
    assert tokenizer_digest(copy) == tokenizer_digest(folder)


def test_other_weights_are_another_model(folder: Path, tmp_path: Path) -> None:
    """One byte is enough, and bytes cannot move from one file to the next unnoticed."""
    assert weights_digest(write(tmp_path / "b", {}, b"weightz")) != weights_digest(folder)
    moved = write(tmp_path / "c", {}, b"weight")
    (moved / "model-2.safetensors").write_bytes(b"smore")
    assert weights_digest(moved) != weights_digest(folder)


def test_the_same_weights_used_differently_are_another_model(folder: Path, tmp_path: Path) -> None:
    """RoPE settings change the keys although no weight differs."""
    assert weights_digest(write(tmp_path / "long", {"rope_theta": 1000000})) != weights_digest(folder)


def test_another_tokenizer_is_noticed(folder: Path) -> None:
    before = tokenizer_digest(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    assert tokenizer_digest(folder) != before


@pytest.mark.parametrize("missing", ["model-1.safetensors", "tokenizer.json"])
def test_an_incomplete_folder_is_refused_by_name(folder: Path, missing: str) -> None:
    """The error says which file is not there."""
    for file in folder.glob("*.safetensors" if missing.endswith("safetensors") else missing):
        file.unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors|no tokenizer\.json"):
        weights_digest(folder) and tokenizer_digest(folder)
