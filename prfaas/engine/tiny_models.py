"""The recipes behind `prfaas.engine.tiny`: four layers, 0.7 million parameters, weights that make damage visible.

Sharp attention, a strong attention output and slow decay of the recurrent state: with an ordinary initialization whole
blocks of KV can vanish without one token changing. Draws come from one generator, so the order of parameters matters.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import KimiLinearConfig, Qwen3Config, Qwen3NextConfig
from transformers.models.auto import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from prfaas.engine.tiny_tokenizer import VOCAB_TOKENS

#: Standard deviation of the attention logits, and how much louder than other weights the attention output is.
SHARPNESS, ATTENTION_GAIN = 3.0, 4.0

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_TOKENS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 16384,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
HYBRID = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
QWEN3_NEXT: dict[str, Any] = {
    "layer_types": HYBRID,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
# v_head_dim = qk_nope_head_dim + qk_rope_head_dim, or attention on CPU takes its slow path.
KIMI_LINEAR: dict[str, Any] = {
    "layer_types": HYBRID,
    "mlp_layer_types": ["dense"] * 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "linear_num_heads": 2,
    "linear_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
# Every token takes every expert: a choice of experts would turn rounding noise into different tokens.
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """A configuration and how its weights are drawn: the seed, and the standard deviation before scaling by width."""

    config: Any
    seed: int
    std: float


def save_model(directory: Path, family: str, seed: int | None) -> None:
    """Build the model of `family` and save it in the Hugging Face format."""
    recipe = _recipe(family)
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_config(recipe.config, dtype=torch.float32)
    draw_weights(model, recipe.seed if seed is None else seed, recipe.std)
    model.save_pretrained(directory)
    for file in directory.glob("*.safetensors"):
        file.chmod(0o644)  # written for the owner only, but a worker may run as another user


def _recipe(family: str) -> Recipe:
    match family:
        case "kimi_linear":
            return Recipe(KimiLinearConfig(**COMMON, **KIMI_LINEAR), seed=3, std=1.5)
        case "qwen3_next":
            return Recipe(Qwen3NextConfig(**COMMON, **QWEN3_NEXT, mlp_only_layers=[0, 1, 2, 3]), seed=4, std=1.0)
        case "qwen3_next_moe":
            return Recipe(Qwen3NextConfig(**COMMON, **QWEN3_NEXT, **EXPERTS), seed=4, std=1.0)
        case "qwen3":
            return Recipe(Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=32), seed=5, std=1.0)
        case _:
            raise ValueError(f"no tiny model of family {family!r}")


def draw_weights(model: Any, seed: int, std: float) -> None:
    """Overwrite all weights of `model`, in the order of its parameters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _draw(model.config, name.split("."), parameter, std, generator)


def _draw(config: Any, path: list[str], parameter: torch.Tensor, std: float, generator: torch.Generator) -> None:
    fresh = torch.empty_like(parameter)
    if path[-1] == "A_log":
        parameter.copy_(fresh.uniform_(0.02, 0.5, generator=generator).log())
    elif path[-1] == "dt_bias":
        parameter.copy_(fresh.uniform_(-5.0, -2.0, generator=generator))
    elif "conv1d" in path:
        parameter.copy_(fresh.normal_(0, 0.5, generator=generator))
    elif "embed_tokens" in path:
        parameter.copy_(fresh.normal_(0, 1.0, generator=generator))
    elif parameter.dim() >= 2:
        scale = _gain(config, path, std) / parameter.shape[-1] ** 0.5
        parameter.copy_(fresh.normal_(0, scale, generator=generator))
    elif path[-2] == "q_norm":
        # The norm of Qwen3-Next multiplies by 1 + weight, that of Qwen3 by the weight.
        parameter.fill_(SHARPNESS - 1.0 if config.model_type == "qwen3_next" else SHARPNESS)


def _gain(config: Any, path: list[str], std: float) -> float:
    if not ("self_attn" in path and config.layer_types[int(path[2])] == "full_attention"):
        return std
    if config.model_type == "kimi_linear" and path[-2] in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj"):
        return SHARPNESS if path[-2] == "q_proj" else 1.0
    return std * ATTENTION_GAIN if path[-2] == "o_proj" else std
