"""Whether a folder has what a vLLM worker needs of a model: more than vLLM itself does, because KV is told apart by
digests of the folder's files, and routers make tokens of prompts with its tokenizer.
"""

import json
from pathlib import Path
from typing import Any

from prfaas.errors import ConfigError

SETTING = "worker.model_dir"
_WANTED = "needed is a folder with config.json, tokenizer.json and *.safetensors, as transformers writes it"
#: What else is found, by a pattern, and what it is.
_OTHERS = {
    "*.gguf": "weights in GGUF, which have no digest here",
    "adapter_config.json": "an adapter: merge it into its model",
    "params.json": "a model in Mistral's own format",
    "*.bin": "weights in PyTorch's own format: convert them to safetensors",
}


def check_folder(model_dir: Path) -> None:
    """Raises ConfigError."""
    if not model_dir.is_dir():
        what = "is a file" if model_dir.exists() else "does not exist"
        raise ConfigError(SETTING, f"{model_dir} {what}: {_WANTED}")
    settings = _settings(model_dir)
    if settings.get("model_type") == "cost_model":
        raise ConfigError(SETTING, f"{model_dir} is a cost model, which only the engine `embedded` runs")
    if not isinstance(settings.get("vocab_size"), int):
        raise ConfigError(SETTING, f"config.json in {model_dir} has no vocab_size: only models of text are served")
    for pattern in ("*.safetensors", "tokenizer.json"):
        if not any(model_dir.glob(pattern)):
            raise ConfigError(SETTING, f"{model_dir} has no {pattern}{_instead(model_dir)}: {_WANTED}")


def _settings(model_dir: Path) -> dict[str, Any]:
    try:
        settings = json.loads((model_dir / "config.json").read_bytes())
    except FileNotFoundError:
        raise ConfigError(SETTING, f"{model_dir} has no config.json{_instead(model_dir)}: {_WANTED}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(SETTING, f"config.json in {model_dir} cannot be read: {error}") from error
    return settings if isinstance(settings, dict) else {}


def _instead(model_dir: Path) -> str:
    for pattern, what in _OTHERS.items():
        if any(model_dir.glob(pattern)):
            return f", but {what}"
    return ""
