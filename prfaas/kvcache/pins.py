"""Leases on what a shard found, and what may not go because of them (R15, R18)."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from prfaas.kvcache.objects import ObjectKey


class Pins:
    """How many have a use for an object to stay where it is, by key."""

    def __init__(self) -> None:
        self._counts: Counter[ObjectKey] = Counter()

    def __contains__(self, key: ObjectKey) -> bool:
        return key in self._counts

    def __len__(self) -> int:
        return len(self._counts)

    def pin(self, keys: Iterable[ObjectKey]) -> None:
        self._counts.update(keys)

    def unpin(self, keys: Iterable[ObjectKey]) -> None:
        for key in keys:
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]

    def check(self, expected: Counter[ObjectKey]) -> None:
        assert self._counts == expected, "pins that nobody holds, or too few"


@dataclass(slots=True, eq=False)
class Lease:
    """`broken`: something that it pins was lost all the same."""

    holder: str
    tenant: str
    keys: bytes
    kv_tokens: int
    state_tokens: int
    pinned: tuple[ObjectKey, ...]
    expires_at: float
    broken: bool = False
