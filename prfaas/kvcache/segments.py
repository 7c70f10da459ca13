"""Prompts in segments: which shard of a region keeps which stretch of a prompt.

A prompt's keys are cut every 8,192 tokens, and each segment lives on one shard, so that one long prompt is spread and
its start stays where other prompts with that start look for it. Keys are chained, so the first key of a segment names
all before it too. A state at a cut belongs to the segment that ends there.
"""

import hashlib
from collections.abc import Iterator, Sequence

from prfaas.cluster import NodeId
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS, KEY_BYTES

SEGMENT_TOKENS = 8192
SEGMENT_UNITS = SEGMENT_TOKENS // HASH_UNIT_TOKENS
_SEGMENT_BYTES = SEGMENT_UNITS * KEY_BYTES


def segments(keys: bytes) -> Iterator[tuple[int, bytes]]:
    """Where each segment of a prompt begins, in tokens, and its keys."""
    for number, start in enumerate(range(0, len(keys), _SEGMENT_BYTES)):
        yield number * SEGMENT_TOKENS, keys[start : start + _SEGMENT_BYTES]


def shard_of(segment: bytes, shards: Sequence[NodeId]) -> NodeId:
    """The shard of a region that keeps a segment, by rendezvous: every shard draws a number for the segment, and the
    largest wins. So where a shard comes or goes, only the segments that it wins or had move. Whoever asks must know the
    same shards."""
    first = segment[:KEY_BYTES]
    return max(shards, key=lambda shard: hashlib.sha256(first + shard.encode()).digest())


def unit_ends(first_tokens: int, stop_tokens: int) -> tuple[int, ...]:
    """Where the chunks of a transfer from or to a shard end: its memory is divided at every unit."""
    return tuple(range(first_tokens + HASH_UNIT_TOKENS, stop_tokens + 1, HASH_UNIT_TOKENS))
