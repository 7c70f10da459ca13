"""Where rows of a sequence lie in the blocks of a cache group."""

from collections.abc import Sequence
from typing import NamedTuple


class Pages(NamedTuple):
    """The blocks that hold the rows, in order, and how many rows of the first one come before them."""

    blocks: tuple[int, ...]
    skipped: int


def pages(blocks: Sequence[int], block_tokens: int, start: int, stop: int) -> Pages:
    """Raises ValueError when the blocks end before `stop`."""
    first, end = start // block_tokens, -(-stop // block_tokens)
    if not 0 <= start < stop or end > len(blocks):
        raise ValueError(f"rows {start}:{stop} are not in {len(blocks)} blocks of {block_tokens}")
    return Pages(tuple(blocks[first:end]), start - first * block_tokens)
