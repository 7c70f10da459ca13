"""Values that follow from their keys alone, so that they are never outdated: worked out when first asked for."""

from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")
#: What is kept at most. It suffices for what a cluster has of a kind; beyond it all is worked out again.
MOST = 1024


class Remembered(dict[K, V]):
    """Read by subscript only, which costs no more than with a dict. `work_out` must depend on nothing that changes, and
    not on whoever holds this: that would be a cycle for the garbage collector."""

    __slots__ = ("_work_out",)

    def __init__(self, work_out: Callable[[K], V]) -> None:
        self._work_out = work_out

    def __missing__(self, key: K) -> V:
        if len(self) >= MOST:
            self.clear()
        found = self[key] = self._work_out(key)
        return found

    def check(self) -> None:
        assert len(self) <= MOST
        assert all(self._work_out(key) == value for key, value in self.items()), "what was remembered is outdated"
