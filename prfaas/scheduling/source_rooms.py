"""How many prefills each source may have under way.

A source that does not keep up may have ever fewer, so that the decode nodes do not fill up with reservations that wait
for it: each late one halves what it has, each that ends in time adds one.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from prfaas.cluster import NodeId


@dataclass(slots=True)
class Room:
    """`taken` of `limit`; `finished_at`: when the last came to its end as it should."""

    limit: float
    taken: int = 0
    finished_at: float = -math.inf

    @property
    def is_full(self) -> bool:
        return self.taken >= int(self.limit)


class SourceRooms:
    """Each source has `most` in the beginning, and never fewer than `least`. `changes` counts how often the set of full
    ones has changed."""

    def __init__(self, most: int, least: int) -> None:
        self._most, self._least = float(most), float(least)
        self._rooms: dict[NodeId, Room] = {}
        self._full: dict[NodeId, None] = {}
        self.changes = 0

    @property
    def full(self) -> Collection[NodeId]:
        return self._full.keys()

    def entered(self, source: NodeId) -> None:
        self._room(source).taken += 1
        self._settle(source)

    def left(self, source: NodeId) -> None:
        self._room(source).taken -= 1
        self._settle(source)

    def finished(self, source: NodeId, now: float, *, in_time: bool) -> None:
        room = self._room(source)
        room.finished_at = now
        if in_time:
            room.limit = min(self._most, room.limit + 1)
            self._settle(source)

    def fell_behind(self, source: NodeId) -> None:
        room = self._room(source)
        room.limit = max(self._least, min(room.limit, room.taken) / 2)
        self._settle(source)

    def finished_at(self, source: NodeId) -> float:
        """Long ago when it never has."""
        return self._room(source).finished_at

    def forget(self, sources: Iterable[NodeId]) -> None:
        """Those that have nothing under way."""
        for name in sources:
            if (room := self._rooms.get(name)) is not None and not room.taken:
                del self._rooms[name]
                self._settle(name)

    def __iter__(self) -> Iterator[tuple[NodeId, int, int]]:
        """Of each source that has or had prefills: how many are under way, of how many."""
        for name, room in self._rooms.items():
            yield name, room.taken, int(room.limit)

    def check(self, under_way: Counter[NodeId]) -> None:
        assert {name: room.taken for name, room in self._rooms.items() if room.taken} == dict(under_way)
        assert all(1 <= room.limit <= self._most for room in self._rooms.values())
        assert self._full.keys() == {name for name, room in self._rooms.items() if room.is_full}

    def _room(self, source: NodeId) -> Room:
        if (found := self._rooms.get(source)) is None:
            found = self._rooms[source] = Room(self._most)
        return found

    def _settle(self, source: NodeId) -> None:
        room = self._rooms.get(source)
        full = room is not None and room.is_full
        if full == (source in self._full):
            return
        self.changes += 1
        if full:
            self._full[source] = None
        else:
            del self._full[source]
