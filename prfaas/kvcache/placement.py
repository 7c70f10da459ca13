"""Which shard of a region keeps a prompt, and how much of it moves at once.

All of a prompt lies on one shard, in one tree: so a beginning never leaves the cache before what follows it. What moves
is cut, since a transfer has a bounded number of parts.
"""

import hashlib
from collections.abc import Iterator, Sequence

from prfaas.cluster import NodeId
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS, KEY_BYTES

#: Units of one prompt that can be in the cache.
PROMPT_UNITS = 16_384
#: The most that one transfer moves.
TRANSFER_TOKENS = 8192
TRANSFER_UNITS = TRANSFER_TOKENS // HASH_UNIT_TOKENS


def shard_of(keys: bytes, shards: Sequence[NodeId]) -> NodeId:
    """The shard of a region that keeps a prompt, by rendezvous: every shard draws a number for its first key, and the
    largest wins. So where a shard comes or goes, only the prompts that it wins or had move. Whoever asks must know the
    same shards."""
    first = keys[:KEY_BYTES]
    return max(shards, key=lambda shard: hashlib.sha256(first + shard.encode()).digest())


def transfers(first_tokens: int, stop_tokens: int) -> Iterator[tuple[int, int]]:
    """A stretch of a prompt as it is moved: cut at multiples of TRANSFER_TOKENS."""
    while first_tokens < stop_tokens:
        end = min(stop_tokens, (first_tokens // TRANSFER_TOKENS + 1) * TRANSFER_TOKENS)
        yield first_tokens, end
        first_tokens = end


def unit_ends(first_tokens: int, stop_tokens: int) -> tuple[int, ...]:
    """Where the chunks of a transfer from or to a shard end: its memory is divided at every unit."""
    return tuple(range(first_tokens + HASH_UNIT_TOKENS, stop_tokens + 1, HASH_UNIT_TOKENS))
