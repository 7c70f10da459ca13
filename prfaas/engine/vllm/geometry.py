"""The cache of a vLLM server as a KvLayout: what its connector tells the worker when it connects.

Each layer that has a cache is one layer of the layout, in the order of the model. An attention layer has one tensor of
rows, all keys of a token before all its values, whatever order the server's attention backend keeps them in; a
recurrent layer has one page of bytes, whose inner order is part of the tensor's name, so that it is part of the
namespace as well.
"""

import re
from collections.abc import Iterable

import msgspec

from prfaas.kvcache.layout import KvLayout, TensorKind, TensorSpec


class CacheLayer(msgspec.Struct, frozen=True):
    """One layer by vLLM's name for it, in the cache group whose block table it shares; a block has rows of so many
    tokens (of a recurrent layer: one state)."""

    name: str
    group: int
    block_tokens: int
    tensor: TensorSpec

    @property
    def grows(self) -> bool:
        return self.tensor.kind is TensorKind.TOKENS


class Geometry(msgspec.Struct, frozen=True):
    """All layers, in order."""

    layers: tuple[CacheLayer, ...]

    @property
    def layout(self) -> KvLayout:
        return KvLayout(tuple((layer.tensor,) for layer in self.layers))


def attention_layer(
    name: str, group: int, block_tokens: int, dtype: str, heads: int, key_width: int, value_width: int
) -> CacheLayer:
    row = heads * (key_width + value_width)
    return CacheLayer(name, group, block_tokens, TensorSpec("keys+values", TensorKind.TOKENS, dtype, (row,)))


def recurrent_layer(
    name: str, group: int, block_tokens: int, kind: str, tensors: Iterable[tuple[str, tuple[int, ...]]], nbytes: int
) -> CacheLayer:
    """`tensors`: dtype and shape of what lies in the page, in order."""
    content = " ".join(f"{dtype}{list(shape)}" for dtype, shape in tensors)
    return CacheLayer(name, group, block_tokens, TensorSpec(f"{kind} {content}", TensorKind.STATE, "uint8", (nbytes,)))


def in_order(layers: Iterable[CacheLayer]) -> Geometry:
    """Sorted by the number in each layer's name, then by name (some layers have two caches)."""
    return Geometry(tuple(sorted(layers, key=lambda layer: (_number(layer.name), layer.name))))


def _number(name: str) -> int:
    found = re.search(r"\d+", name)
    if found is None:
        raise ValueError(f"the layer {name!r} has no number")
    return int(found.group())
