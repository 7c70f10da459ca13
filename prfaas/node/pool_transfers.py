"""How a shard's objects cross: in chunks of one hash unit, since its memory is divided there. Pure."""

from prfaas.kvcache.hashing import HASH_UNIT_TOKENS
from prfaas.kvcache.layout import Extent, KvLayout, TensorKind


def part_count(layout: KvLayout, extent: Extent) -> int:
    """How many parts an extent has when its chunks are units."""
    kinds = [tensor.kind for layer in layout.layers for tensor in layer]
    units = (extent.stop - extent.first) // HASH_UNIT_TOKENS
    return kinds.count(TensorKind.TOKENS) * units + kinds.count(TensorKind.STATE) * len(extent.states)
