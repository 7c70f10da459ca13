"""Reads a vLLM server's cache: its geometry off the configuration, and what it takes to copy in and out of it.

What this cannot carry exactly is refused when the server starts.
"""

from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec

from prfaas.engine.vllm.geometry import CacheLayer, Geometry, attention_layer, in_order, recurrent_layer
from prfaas.engine.vllm.refuse import Unsupported
from prfaas.engine.vllm.rows import Rows, block_order


def describe(kv_cache_config: Any) -> Geometry:
    """Raises Unsupported."""
    return in_order(
        _layer(name, number, _spec_of(group.kv_cache_spec, name))
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
        for name in group.layer_names
    )


def rows_of(geometry: Geometry, caches: Mapping[str, torch.Tensor], modules: Mapping[str, Any]) -> dict[int, Rows]:
    """Of each attention layer, by its place in the geometry. Raises Unsupported."""
    try:
        return {
            index: _rows(layer, caches[layer.name], modules[layer.name])
            for index, layer in enumerate(geometry.layers)
            if layer.grows
        }
    except ValueError as error:
        raise Unsupported(str(error)) from error


def states_of(geometry: Geometry, caches: Mapping[str, Any]) -> dict[int, torch.Tensor]:
    """Of each recurrent layer its pages as bytes. Raises Unsupported."""
    return {index: _pages(layer, caches[layer.name]) for index, layer in enumerate(geometry.layers) if not layer.grows}


def _spec_of(spec: Any, name: str) -> Any:
    """A group may have a specification for each of its layers."""
    return getattr(spec, "kv_cache_specs", {}).get(name, spec)


def _layer(name: str, group: int, spec: Any) -> CacheLayer:
    match spec:
        case MambaSpec():
            tensors = [(_word(dtype), tuple(shape)) for dtype, shape in zip(spec.dtypes, spec.shapes, strict=True)]
            kind = spec.mamba_type.name.lower()
            return recurrent_layer(name, group, spec.block_size, kind, tensors, spec.state_content_size_bytes)
        case MLAAttentionSpec():
            raise Unsupported(f"{name}: latent attention is not supported")
        case FullAttentionSpec() if spec.sliding_window is None and spec.attention_chunk_size is None:
            return attention_layer(
                name,
                group,
                spec.block_size,
                _word(spec.dtype),
                spec.num_kv_heads,
                spec.head_size,
                spec.head_size_v or spec.head_size,
            )
        case _:
            raise Unsupported(f"{name}: a cache of kind {type(spec).__name__} is not supported")


def _rows(layer: CacheLayer, cache: torch.Tensor, module: Any) -> Rows:
    dtype = getattr(torch, layer.tensor.dtype)
    if cache.dtype != dtype or not hasattr(module.impl, "do_kv_cache_update"):
        raise Unsupported(f"{layer.name}: the attention backend {type(module.impl).__name__} is not supported")
    if cache[0].numel() < layer.block_tokens * layer.tensor.shape[0]:
        raise Unsupported(f"{layer.name}: blocks of shape {tuple(cache.shape[1:])} hold no {layer.block_tokens} tokens")

    def write(keys: torch.Tensor, values: torch.Tensor, block: torch.Tensor) -> None:
        slots = torch.arange(layer.block_tokens, device=block.device)
        module.impl.do_kv_cache_update(module, keys, values, block, slots)

    heads, width = module.num_kv_heads, module.head_size
    widths = (width, layer.tensor.shape[0] // heads - width)
    order = block_order(cache.shape[1:], dtype, layer.block_tokens, heads, widths, write, cache.device)
    return Rows(cache, order)


def _pages(layer: CacheLayer, cache: Any) -> torch.Tensor:
    if not isinstance(cache, torch.Tensor):
        raise Unsupported(f"{layer.name}: a recurrent cache that is not one page is not supported")
    pages = cache.view(torch.uint8).reshape(cache.shape[0], -1)
    if pages.data_ptr() != cache.data_ptr() or pages.shape[1] < layer.tensor.nbytes:
        raise Unsupported(f"{layer.name}: a recurrent cache of shape {tuple(cache.shape)} is not supported")
    return pages[:, : layer.tensor.nbytes]


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
