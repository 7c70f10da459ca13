"""Digests of a model folder, for the namespace: equal folders give equal digests wherever they are read."""

import hashlib
import json
from pathlib import Path

from prfaas.errors import ConfigError
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS as HASH_UNIT_TOKENS

#: Settings of config.json that say who wrote it, not what the model computes.
WRITER_SETTINGS = {"transformers_version", "architectures", "_name_or_path"}


def weights_digest(model_dir: Path) -> str:
    """Hex sha256 over the weights, file by file, and the settings they are used with (such as RoPE scaling)."""
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise ConfigError("model", f"no *.safetensors in {model_dir}")
    settings = json.loads((model_dir / "config.json").read_text("utf-8"))
    computed = {name: value for name, value in settings.items() if name not in WRITER_SETTINGS}
    digest = hashlib.sha256(json.dumps(computed, sort_keys=True).encode())
    for file in files:
        digest.update(_file_digest(file))
    return digest.hexdigest()


def tokenizer_digest(model_dir: Path) -> str:
    """Hex sha256 of tokenizer.json."""
    file = model_dir / "tokenizer.json"
    if not file.is_file():
        raise ConfigError("model", f"no tokenizer.json in {model_dir}")
    return _file_digest(file).hex()


def _file_digest(file: Path) -> bytes:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()
