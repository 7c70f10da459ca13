"""The tier below a shard's memory: whole objects under a key, each a small header and its data.

Memory, files and Mooncake Store implement it and pass one contract suite. What must hold: an object is there whole or
not at all; what `get` fills in is byte for byte what was put under that key, or `get` says that nothing is there; a key
never changes its content. A store may lose an object at any time, but never serve a wrong one. It makes no room by
itself: when it is full it says so, and its user deletes.

Every call ends within the store's deadline. Once it has ended, however it did, the store neither reads nor writes the
memory that it was given: what was put may still come to be stored, from a copy.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from prfaas.errors import PrfaasError

#: The longest key and header that a store takes.
MAX_KEY_BYTES = 64
MAX_HEADER_BYTES = 256 * 1024


class StoreFull(PrfaasError):
    """The object does not fit: by the store's own bound, or because what is below is full. Nothing is left of it."""

    def __init__(self, store: str, needed_bytes: int) -> None:
        super().__init__(f"{store} has no room for {needed_bytes} bytes")
        self.store, self.needed_bytes = store, needed_bytes


class StoreFailed(PrfaasError):
    """The store could not do it, or not within its deadline. Whether the object is there afterwards is unknown; if it
    is, it is whole."""

    def __init__(self, store: str, stage: str, detail: str) -> None:
        super().__init__(f"{store} failed to {stage}: {detail}")
        self.store, self.stage, self.detail = store, stage, detail


class ContentConflict(PrfaasError):
    """Another content is stored under this key. It is kept (R14): keys are hashes of what the content follows from, so
    one of the two is wrong."""

    def __init__(self, store: str, key: bytes) -> None:
        super().__init__(f"{store} holds another content under {key.hex()}")
        self.store, self.key = store, key


@dataclass(frozen=True, slots=True)
class Stored:
    """An object that a store has brought over a restart. `nbytes` is the length of its data."""

    key: bytes
    header: bytes
    nbytes: int


class BlockStore(Protocol):
    async def put(self, key: bytes, header: bytes, data: memoryview) -> None:
        """Store it whole and durably. Putting the same again is no error. Raises StoreFull, StoreFailed, and
        ContentConflict when the key has another header or data."""
        ...

    async def get(self, key: bytes, into: memoryview) -> bytes | None:
        """Fill `into` with the data, whose length it has, and return the header. None when nothing is stored, or what
        is stored is damaged: then it has been dropped and counted, and `into` is as it was. Raises StoreFailed, also
        when the data is of another length."""
        ...

    async def delete(self, key: bytes) -> None:
        """Idempotent. Raises StoreFailed."""
        ...

    def stored(self) -> AsyncGenerator[Stored, None]:
        """What is there, in no order, for recovery; objects put or deleted meanwhile may be told or not. Headers are
        verified and what is damaged in its header or length is dropped and counted; damage in the data shows at `get`.
        Close it with `aclosing`. Raises StoreFailed."""
        ...

    @property
    def used_bytes(self) -> int:
        """What objects take of the capacity, with what is being put."""
        ...

    @property
    def damaged(self) -> int:
        """Objects found damaged, and dropped, since the store was opened."""
        ...

    async def close(self) -> None:
        """Bounded. Calls under way fail with StoreFailed."""
        ...
