"""Pieces: the parts of a transfer cut small enough to be sent again without regret, numbered in the order of parts.

Both ends derive them, so that a frame, an acknowledgement or a resume names pieces and nothing else. Sets of pieces are
kept as ranges: an attempt may have many thousands, and nothing here costs more for that.
"""

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from prfaas.kvcache.layout import Part

PIECE_BYTES = 256 << 10
#: Parts of a frame. Each may be a place of its own, at either end: with the header these have to fit one call, and the
#: kernel allows 1,024 buffers.
FRAME_PARTS = 256


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive pieces: what a DATA frame carries. `offset`: how many bytes of the transfer come before them.
    `places` (offset in the pool, bytes): where they lie here, in their order; parts that follow each other are one
    place."""

    first: int
    count: int
    offset: int
    nbytes: int
    places: tuple[tuple[int, int], ...]

    @property
    def stop(self) -> int:
        return self.first + self.count


class Pieces:
    """All pieces of an attempt."""

    def __init__(self, parts: tuple[Part, ...], piece_bytes: int = PIECE_BYTES) -> None:
        self.parts, self.piece_bytes = parts, piece_bytes
        counts = [-(-part.nbytes // piece_bytes) for part in parts]
        #: First piece of each part and then the end; first byte of each part if they lay in a row, and then the end.
        self._firsts = list(itertools.accumulate(counts, initial=0))
        self._starts = list(itertools.accumulate((part.nbytes for part in parts), initial=0))

    @property
    def count(self) -> int:
        return self._firsts[-1]

    @property
    def nbytes(self) -> int:
        return self._starts[-1]

    def of_part(self, index: int) -> tuple[int, int]:
        """Its pieces (first, stop); none of an empty part."""
        return self._firsts[index], self._firsts[index + 1]

    def run(self, first: int, stop: int, parts: int = FRAME_PARTS, apart_bytes: int | None = None) -> Run:
        """The run of `first:stop`, cut where it would need more parts, so that it is one frame at both ends wherever
        they have them; and where another place would begin when it has `apart_bytes` already."""
        index, at, nbytes = self._part(first), first, 0
        found: list[tuple[int, int]] = []
        while at < stop:
            part, part_first, end = self.parts[index], self._firsts[index], min(stop, self._firsts[index + 1])
            begin = (at - part_first) * self.piece_bytes
            length = min(part.nbytes, (end - part_first) * self.piece_bytes) - begin
            begin += part.offset
            if length and not parts:
                break
            if found and found[-1][0] + found[-1][1] == begin:
                found[-1] = (found[-1][0], found[-1][1] + length)
            elif found and apart_bytes is not None and nbytes >= apart_bytes:
                break
            elif length:
                found.append((begin, length))
            parts -= length > 0
            at, nbytes, index = end, nbytes + length, index + 1
        return Run(first, at - first, self._byte(first), nbytes, tuple(found))

    def within(self, first: int, nbytes: int) -> int:
        """Where the pieces from `first` on end that have no more than so many bytes together."""
        end = self._byte(first) + nbytes
        index = bisect.bisect_right(self._starts, end) - 1
        if index >= len(self.parts):
            return self.count
        return self._firsts[index] + (end - self._starts[index]) // self.piece_bytes

    def bytes_of(self, first: int, stop: int) -> int:
        return self._byte(stop) - self._byte(first)

    def _part(self, piece: int) -> int:
        """Of several parts that begin there, all but the last are empty."""
        return bisect.bisect_right(self._firsts, piece, hi=len(self.parts)) - 1

    def _byte(self, piece: int) -> int:
        if piece >= self.count:
            return self.nbytes
        index = self._part(piece)
        return self._starts[index] + (piece - self._firsts[index]) * self.piece_bytes


class Ranges:
    """A set of whole numbers as sorted ranges that never touch."""

    __slots__ = ("_starts", "_stops", "count")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.count = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._stops, strict=True)

    def __contains__(self, number: int) -> bool:
        return self.end(number) is not None

    def end(self, number: int) -> int | None:
        """Where the range ends that holds the number."""
        index = bisect.bisect_right(self._starts, number) - 1
        return self._stops[index] if index >= 0 and number < self._stops[index] else None

    def covers(self, first: int, stop: int) -> bool:
        end = self.end(first)
        return first >= stop or (end is not None and end >= stop)

    def meets(self, first: int, stop: int) -> bool:
        """Whether any of `first:stop` is in the set."""
        index = bisect.bisect_left(self._starts, stop) - 1
        return first < stop and index >= 0 and self._stops[index] > first

    def add(self, first: int, stop: int) -> None:
        """Nothing of `first:stop` may be in the set."""
        assert not self.meets(first, stop), f"{first}:{stop} is there already"
        if first >= stop:
            return
        self.count += stop - first
        at = bisect.bisect_left(self._starts, first)
        if at and self._stops[at - 1] == first:
            at -= 1
            first = self._starts[at]
            del self._starts[at], self._stops[at]
        if at < len(self._starts) and self._starts[at] == stop:
            stop = self._stops[at]
            del self._starts[at], self._stops[at]
        self._starts.insert(at, first)
        self._stops.insert(at, stop)
