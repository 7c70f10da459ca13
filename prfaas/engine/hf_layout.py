"""The KvLayout of a transformers model, read off its configuration.

The order of a layer's tensors is the one `hf_cache` stores them in: (keys, values) of attention, (latent, rope) of MLA,
(conv, recurrent) of linear attention. Recurrent states are float32 whatever the model computes in.
"""

from typing import Any

from prfaas.errors import ConfigError
from prfaas.kvcache.layout import KvLayout, TensorKind, TensorSpec

Tensors = tuple[TensorSpec, ...]


def layout_of(config: Any, dtype: str) -> KvLayout:
    """The cache geometry of `config` (a transformers configuration) when the model computes in `dtype`."""
    return KvLayout(tuple(_layer(config, kind, dtype) for kind in config.layer_types))


def _layer(config: Any, kind: str, dtype: str) -> Tensors:
    match config.model_type, kind:
        case "kimi_linear", "full_attention":
            return _tokens(dtype, latent=(config.kv_lora_rank,), rope=(config.qk_rope_head_dim,))
        case "kimi_linear", "linear_attention":
            heads, width = config.linear_num_heads, config.linear_head_dim
            return _states(dtype, (3 * heads * width, config.linear_conv_kernel_dim), (heads, width, width))
        case "qwen3_next" | "qwen3", "full_attention":
            row = (config.num_key_value_heads, config.head_dim)
            return _tokens(dtype, keys=row, values=row)
        case "qwen3_next", "linear_attention":
            key_width, value_width = config.linear_key_head_dim, config.linear_value_head_dim
            value_heads = config.linear_num_value_heads
            channels = 2 * config.linear_num_key_heads * key_width + value_heads * value_width
            return _states(dtype, (channels, config.linear_conv_kernel_dim), (value_heads, key_width, value_width))
        case model_type, _:
            raise ConfigError("model", f"layers of type {kind!r} in {model_type!r} models are not supported")


def _tokens(dtype: str, **rows: tuple[int, ...]) -> Tensors:
    return tuple(TensorSpec(name, TensorKind.TOKENS, dtype, row) for name, row in rows.items())


def _states(dtype: str, conv: tuple[int, ...], recurrent: tuple[int, ...]) -> Tensors:
    return (
        TensorSpec("conv", TensorKind.STATE, dtype, conv),
        TensorSpec("recurrent", TensorKind.STATE, "float32", recurrent),
    )
