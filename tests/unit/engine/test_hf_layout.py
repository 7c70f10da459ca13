"""Layouts read off model configurations, at the size of real models."""

from types import SimpleNamespace

import pytest

from prfaas.engine.hf_layout import layout_of
from prfaas.errors import ConfigError

HYBRID = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]


def test_kimi_keeps_one_latent_and_one_shared_part_per_token() -> None:
    """Kimi-Linear-48B: 576 numbers per token and MLA layer; 128 x 128 floats per KDA head, and the convolution."""
    config = SimpleNamespace(
        model_type="kimi_linear",
        layer_types=HYBRID,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        linear_num_heads=32,
        linear_head_dim=128,
        linear_conv_kernel_dim=4,
    )
    layout = layout_of(config, "bfloat16")
    assert [spec.name for layer in layout.layers[2:] for spec in layer] == ["conv", "recurrent", "latent", "rope"]
    assert layout.bytes_per_token == (512 + 64) * 2
    assert layout.state_bytes == 3 * (3 * 32 * 128 * 4 * 2 + 32 * 128 * 128 * 4)


def test_qwen3_next_keeps_keys_and_values_of_its_few_heads() -> None:
    """Qwen3-Next-80B: two heads of 256 per token and layer; the recurrent state is float32 in a bfloat16 model."""
    config = SimpleNamespace(
        model_type="qwen3_next",
        layer_types=HYBRID,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    )
    layout = layout_of(config, "bfloat16")
    assert layout.bytes_per_token == 2 * 2 * 256 * 2
    assert layout.state_bytes == 3 * ((2 * 16 + 32) * 128 * 4 * 2 + 32 * 128 * 128 * 4)
    assert {spec.name: spec.dtype for spec in layout.layers[0]} == {"conv": "bfloat16", "recurrent": "float32"}


def test_a_dense_model_has_no_state() -> None:
    config = SimpleNamespace(
        model_type="qwen3", layer_types=["full_attention"] * 36, num_key_value_heads=8, head_dim=128
    )
    layout = layout_of(config, "bfloat16")
    assert (layout.state_bytes, layout.bytes_per_token) == (0, 36 * 2 * 8 * 128 * 2)


def test_a_layer_we_cannot_ship_is_refused() -> None:
    """A sliding window would silently lose rows: better no engine than a wrong one."""
    config = SimpleNamespace(
        model_type="qwen3", layer_types=["full_attention", "sliding_attention"], num_key_value_heads=8, head_dim=128
    )
    with pytest.raises(ConfigError, match="'sliding_attention' in 'qwen3' models"):
        layout_of(config, "float32")
