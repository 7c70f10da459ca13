"""The port to the cluster's small shared store: keys with revisions, leases that delete keys, and watches.

`MemoryStore` and `EtcdStore` implement it and pass one contract suite. What must hold: a write returns the revision
at which it became visible; a key put under a lease is gone once the lease is; a watch never loses an event silently:
either every change after the listing arrives, in revision order, or a new `Resync` replaces everything said before. A
store that cannot be reached raises `PeerUnavailable`.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import NewType, Protocol

from prfaas.errors import PrfaasError

Lease = NewType("Lease", int)


@dataclass(frozen=True, slots=True)
class Entry:
    """One key as it stands. `mod_revision` is the revision of its last change."""

    key: str
    value: bytes
    mod_revision: int
    lease: Lease | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All keys under a prefix at one revision, in key order."""

    revision: int
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True)
class Put:
    entry: Entry


@dataclass(frozen=True, slots=True)
class Deleted:
    """The key is gone: deleted, or its lease ended."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Resync:
    """Everything under the prefix; whatever was said before is replaced. Its revision may be lower than any seen
    before: then the store has lost its data and started again."""

    snapshot: Snapshot


StoreEvent = Put | Deleted | Resync
Batch = list[StoreEvent]


class LeaseExpired(PrfaasError):
    """The lease is unknown to the store, and with it the keys put under it are gone."""

    def __init__(self, lease: Lease) -> None:
        super().__init__(f"lease {lease:x} has expired")
        self.lease = lease


class Store(Protocol):
    async def get(self, key: str) -> Entry | None: ...

    async def list(self, prefix: str) -> Snapshot: ...

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """The revision of the write. Raises LeaseExpired."""
        ...

    async def compare_and_put(
        self, key: str, value: bytes, expected_mod_revision: int, lease: Lease | None = None
    ) -> int | None:
        """Write only if the key's mod_revision is the expected one (0: the key does not exist). The new revision, or
        None when the key has changed: read it again. Raises LeaseExpired.

        The value must name its writer: after a lost answer the key is read, and our value there counts as our success.
        """
        ...

    async def delete(self, key: str) -> None:
        """Idempotent."""
        ...

    def watch(self, prefix: str) -> AsyncGenerator[Batch, None]:
        """Batches without end, the first a single Resync; outages only pause it. Close it with `aclosing`."""
        ...

    async def grant(self, ttl_s: int) -> Lease: ...

    async def keep_alive(self, lease: Lease) -> int:
        """Start the lease's time again; the seconds it now has. Raises LeaseExpired."""
        ...

    async def revoke(self, lease: Lease) -> None:
        """End the lease and delete its keys at once. Idempotent."""
        ...

    async def close(self) -> None: ...
