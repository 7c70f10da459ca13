"""Rows of tokens in and out of an attention layer's blocks, whatever order its backend keeps a block in.

A CPU backend packs keys for its matrix instructions, a GPU backend has heads before tokens or after them. What crosses
between servers is rows: all keys of a token, then all its values. The order is not looked up but found out, by letting
the backend write numbers into a block of its own.
"""

from collections.abc import Callable, Sequence

import torch

from prfaas.engine.vllm.paging import pages

#: Numbers below it are exact in every dtype that a cache has.
DIGIT = 128

#: Writes (keys, values), each [tokens, heads, width], into a cache of one block, token i at slot i.
WriteBlock = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def block_order(
    block: torch.Size,
    dtype: torch.dtype,
    tokens: int,
    heads: int,
    widths: tuple[int, int],
    write: WriteBlock,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Of each [token, element of its row], which element of the block it is. Raises ValueError when the backend does
    not keep every element once."""
    row = heads * sum(widths)
    numbers = torch.arange(tokens * row, device=device).view(tokens, row)
    found = torch.zeros(block.numel(), dtype=torch.int64, device=device)
    scale = 1
    while scale < numbers.numel():
        digits = (numbers // scale % DIGIT).to(dtype)
        keys, values = digits.split([heads * width for width in widths], dim=1)
        scratch = torch.full((1, *block), -1, dtype=dtype, device=device)
        write(
            keys.reshape(tokens, heads, widths[0]).contiguous(),
            values.reshape(tokens, heads, widths[1]).contiguous(),
            scratch,
        )
        # What the backend leaves alone stays negative.
        found += scratch.flatten().to(torch.int64) * scale
        scale *= DIGIT
    used = torch.nonzero(found >= 0).flatten()
    order = torch.empty(numbers.numel(), dtype=torch.int64, device=device)
    if used.numel() != numbers.numel() or not torch.equal(found[used].sort().values, numbers.flatten()):
        raise ValueError("the attention backend does not keep each key and value once")
    order[found[used]] = used
    return order.view(tokens, row)


class Rows:
    """One attention layer: its cache [blocks, ...] and the order within a block."""

    def __init__(self, cache: torch.Tensor, order: torch.Tensor) -> None:
        self._cache, self._order, self._flat = cache, order, order.flatten()
        self._tokens, self._row = order.shape

    def read(self, blocks: Sequence[int], start: int, stop: int, into: torch.Tensor) -> None:
        """Rows `start:stop` of the sequence in `blocks` into a tensor of that many rows."""
        found = pages(blocks, self._tokens, start, stop)
        whole = self._cache[list(found.blocks)].reshape(len(found.blocks), -1)
        rows = whole.index_select(1, self._flat).view(-1, self._row)
        into.copy_(rows[found.skipped : found.skipped + stop - start])

    def write(self, blocks: Sequence[int], start: int, stop: int, rows: torch.Tensor) -> None:
        """The other way. Rows of these blocks before `start` stay as they are; those after `stop` are undefined."""
        found = pages(blocks, self._tokens, start, stop)
        at = list(found.blocks)
        whole = self._cache.new_zeros((len(at) * self._tokens, self._row))
        whole[found.skipped : found.skipped + stop - start] = rows
        flat = self._cache.new_zeros((len(at), self._cache[0].numel()))
        flat[:, self._flat] = whole.view(len(at), -1)
        if found.skipped:
            before = self._order[: found.skipped].flatten()
            flat[0, before] = self._cache[at[0]].reshape(-1)[before]
        self._cache[at] = flat.view(len(at), *self._cache.shape[1:])
