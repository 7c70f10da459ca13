"""What a vLLM server publishes of its prefix cache, as it is on the wire: msgpack, field by field as in vLLM 0.32.

A batch is an array of time, events and rank; an event is a map with its kind in `type`. Maps may have fields that we do
not know, and batches kinds of events that we do not know: these are left out. A hash stands for a whole prefix: its
tokens, the salt, and whatever else vLLM hashes with them. It is vLLM's own and means nothing to us.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

#: A number of 64 bits, or with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0 the whole digest.
BlockHash = int | bytes

#: The server's own memory; what it offloads elsewhere it cannot use at once.
OWN_MEDIUM = "GPU"


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Of ZMQ, as `ipc:///path` or `tcp://host:port`: where batches are published, and where they are asked for again
    (empty: nowhere)."""

    events: str
    replay: str = ""


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Blocks of one cache group that follow each other on the parent. `token_ids` are all tokens of the span; where a
    group keeps some of its blocks only, as a recurrent one does, there are more of them than the hashes are for, and
    which hash ends where is not said."""

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    #: One entry for each hash: what was hashed besides tokens. The salt is in that of a prompt's first block.
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    block_hashes: tuple[BlockHash, ...]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    pass


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: tuple[msgspec.Raw, ...]
    data_parallel_rank: int | None = None


class _Kind(msgspec.Struct, frozen=True):
    type: str = ""


_batch = msgspec.msgpack.Decoder(_Batch)
_kind = msgspec.msgpack.Decoder(_Kind)
_event: msgspec.msgpack.Decoder[KvEvent] = msgspec.msgpack.Decoder(KvEvent)
_KNOWN = frozenset(kind.__name__ for kind in (BlockStored, BlockRemoved, AllBlocksCleared))


def decode(payload: bytes) -> Sequence[KvEvent]:
    """The events of a batch. Raises ValueError for what is no batch."""
    return [_event.decode(raw) for raw in _batch.decode(payload).events if _kind.decode(raw).type in _KNOWN]
