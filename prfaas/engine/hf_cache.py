"""One sequence's cache inside transformers, kept in the memory order of the pool.

Attention rows lie token by token in buffers that grow, so a part is one straight copy in either direction and a decode
step writes one row instead of copying all of them. The model sees views in its own order. Nothing here is shared
between sequences: the model overwrites states in place.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

#: A buffer grows by this factor, and from at least this many rows.
GROWTH, FIRST_ROWS = 2, 64


class TokenMajorLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """Keys and values as two buffers [capacity, heads, width]; the model sees views of [1, heads, tokens, width]."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: list[torch.Tensor] = []
        self._tokens = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._buffers = [self._empty(0, states) for states in (key_states, value_states)]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows given as [1, heads, tokens, width]; copies them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self._tokens = self._tokens, self._tokens + key_states.shape[-2]
        for number, states in enumerate((key_states, value_states)):
            if len(self._buffers[number]) < self._tokens:
                self._grow(number, start, states)
            self._buffers[number][start : self._tokens].copy_(states[0].transpose(0, 1))
        self.keys, self.values = (buffer[: self._tokens].transpose(0, 1)[None] for buffer in self._buffers)
        return self.keys, self.values

    def rows(self, number: int, start: int, stop: int) -> torch.Tensor:
        """Rows of the keys (0) or values (1) as [tokens, heads, width], not copied."""
        assert stop <= self._tokens, "rows that were not computed yet"
        return self._buffers[number][start:stop]

    def _grow(self, number: int, used: int, states: torch.Tensor) -> None:
        grown = self._empty(max(self._tokens, GROWTH * used, FIRST_ROWS), states)
        grown[:used].copy_(self._buffers[number][:used])
        self._buffers[number] = grown

    @staticmethod
    def _empty(capacity: int, states: torch.Tensor) -> torch.Tensor:
        return states.new_empty((capacity, states.shape[1], states.shape[3]))


class HfCache:
    """A sequence of `tokens` positions. While a forward runs, `tokens` is already what it will be afterwards."""

    def __init__(self, config: Any) -> None:
        self.tokens = 0
        self.model_cache = DynamicCache(config=config)
        self.model_cache.layers = [
            TokenMajorLayer() if isinstance(layer, DynamicLayer) else layer for layer in self.model_cache.layers
        ]

    def rows(self, layer: int, number: int, start: int, stop: int) -> torch.Tensor:
        """Rows of a token tensor of an attention layer as [tokens, heads, width], not copied."""
        return self.model_cache.layers[layer].rows(number, start, stop)

    def state(self, layer: int, number: int) -> torch.Tensor:
        """The conv (0) or recurrent (1) state of a linear layer, not copied: the next forward overwrites it."""
        linear = self.model_cache.layers[layer]
        return (linear.conv_states, linear.recurrent_states)[number][0][0]

    def load_layer(self, layer: int, tensors: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Fill an empty layer with copies of its two tensors, by their number in the layout: rows in pieces that follow
        each other, a state in one."""
        target = self.model_cache.layers[layer]
        for first, second in zip(tensors[0], tensors[1], strict=True):
            if isinstance(target, TokenMajorLayer):
                target.update(_heads_first(first), _heads_first(second))
            else:
                # These two copy, and mark the state as present: by reference it would be ignored or overwritten.
                target.update_conv_state(first[None], conv_kernel_size=first.shape[-1])
                target.update_recurrent_state(second[None])


def _heads_first(rows: torch.Tensor) -> torch.Tensor:
    """[tokens, *row] as the model orders it: [1, heads, tokens, width], one head when the row has no heads."""
    return rows.reshape(len(rows), -1, rows.shape[-1]).transpose(0, 1)[None]
