"""From a model folder to the engine that runs it. Torch is imported only when the folder needs it."""

import json
import os
from pathlib import Path

from prfaas.engine.port import Engine
from prfaas.errors import ConfigError

COST_MODEL = "cost_model"
SUPPORTED = (COST_MODEL, "kimi_linear", "qwen3", "qwen3_next")


def load_engine(model_dir: Path) -> Engine:
    """The engine for `model_dir`, loaded. Raises ConfigError when the folder holds no model that we can run."""
    if model_type(model_dir) == COST_MODEL:
        from prfaas.engine.cost_model import CostModelEngine

        return CostModelEngine(model_dir)
    stay_offline()
    from prfaas.engine.hf import HfEngine

    return HfEngine(model_dir)


def stay_offline() -> None:
    """Before transformers is imported: never ask a hub, never warn about kernels that are not installed."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")


def model_type(model_dir: Path) -> str:
    """`model_type` of the folder's config.json. Raises ConfigError when it is none that we can run."""
    try:
        kind = str(json.loads((model_dir / "config.json").read_text("utf-8"))["model_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("model", f"{model_dir} has no config.json with a model_type: {error!r}") from error
    if kind not in SUPPORTED:
        raise ConfigError("model", f"model type {kind!r} is not supported; supported are {', '.join(SUPPORTED)}")
    return kind
