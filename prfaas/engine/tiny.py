"""Model folders small enough to build in a test, in the same format as any other local model.

Weights are drawn from a seed and scaled so that the text which comes out depends visibly on every part of the cache: a
lost block or state changes tokens instead of passing unnoticed. All families share one byte-level tokenizer.
"""

from pathlib import Path

from prfaas.engine.tiny_tokenizer import write_tokenizer

FAMILIES = ("kimi_linear", "qwen3_next", "qwen3_next_moe", "qwen3", "cost_model")


def build_tiny(directory: Path, family: str, seed: int | None = None) -> None:
    """Write config, weights and tokenizer of `family` into `directory`. `seed` None takes the family's own, whose
    sensitivity was measured; the cost model has no weights to seed."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory)
    if family == "cost_model":
        from prfaas.engine.cost_model import write_config

        write_config(directory)
    else:
        # Torch takes seconds to import, and a cost model runs without it.
        from prfaas.engine.tiny_models import save_model

        save_model(directory, family, seed)
