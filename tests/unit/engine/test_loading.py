"""Which engine a model folder gets."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from prfaas.engine.loading import load_engine
from prfaas.engine.tiny import build_tiny
from prfaas.errors import ConfigError


def test_an_unknown_family_is_refused_naming_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match=r"'llama' is not supported.*cost_model, kimi_linear, qwen3, qwen3_next"):
        load_engine(tmp_path)


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '"kimi_linear"'])
def test_a_folder_without_a_model_type_is_a_configuration_error(tmp_path: Path, text: str | None) -> None:
    """Missing, torn or empty: the operator is told about the setting, not shown a stack trace of json."""
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"^model: .* has no config\.json with a model_type"):
        load_engine(tmp_path)


def test_a_cost_model_is_built_and_loaded_without_torch(tmp_path: Path) -> None:
    """A simulated engine starts at once and runs where torch is not installed."""
    program = """
import pathlib, sys
from prfaas.engine.loading import load_engine
from prfaas.engine.tiny import build_tiny
build_tiny(pathlib.Path(sys.argv[1]), "cost_model")
print(type(load_engine(pathlib.Path(sys.argv[1]))).__name__, "torch" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert run.stdout.split() == ["CostModelEngine", "False"], run.stderr


def test_there_is_no_tiny_model_of_an_unknown_family(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tiny model of family 'llama'"):
        build_tiny(tmp_path, "llama")
