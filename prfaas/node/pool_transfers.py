"""How a shard's objects cross: in chunks of one hash unit, since its memory is divided there, and at the positions of
the whole prompt, while the shard itself counts from the start of the segment. Pure.
"""

from collections.abc import Iterable, Sequence

from prfaas.kvcache.hashing import HASH_UNIT_TOKENS
from prfaas.kvcache.layout import Extent, KvLayout, TensorKind, Window


def extent_at(position: int, first: int, stop: int, states: Sequence[int]) -> Extent:
    """Of the prompt, what is `first:stop` with these states of the segment that begins at `position`."""
    return Extent(position + first, position + stop, tuple(position + state for state in states))


def windows_at(position: int, windows: Iterable[Window]) -> tuple[Window, ...]:
    return tuple(
        Window(position + window.first, position + window.stop, window.offset, window.state) for window in windows
    )


def part_count(layout: KvLayout, extent: Extent) -> int:
    """How many parts an extent has when its chunks are units."""
    kinds = [tensor.kind for layer in layout.layers for tensor in layer]
    units = (extent.stop - extent.first) // HASH_UNIT_TOKENS
    return kinds.count(TensorKind.TOKENS) * units + kinds.count(TensorKind.STATE) * len(extent.states)
