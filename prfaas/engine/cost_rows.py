"""The rows of one token tensor of a simulated sequence, at eight bytes each: a row can be made again from the prefix
hash of its position. Restored rows that no tokens have, damaged ones, are kept as they came.
"""

import hashlib

import numpy as np

from prfaas.engine.cost_content import Content, Words
from prfaas.engine.gathering import Place

FIRST_ROWS, GROWTH = 64, 2


class Rows:
    """Appended to, never changed. The digest of their bytes runs behind: only drawing tokens needs it, and a sequence
    that is shipped away never draws any."""

    def __init__(self, content: Content, place: Place) -> None:
        self._content, self._place = content, place
        self._hashes: Words = np.empty(FIRST_ROWS, np.uint64)
        self._damaged: dict[int, bytes] = {}
        self._tokens = self._digested = 0
        self._digest = hashlib.blake2b()

    def append(self, hashes: Words) -> None:
        """The rows at these hashes."""
        start, self._tokens = self._tokens, self._tokens + len(hashes)
        if self._tokens > len(self._hashes):
            grown = np.empty(max(self._tokens, GROWTH * start), np.uint64)
            grown[:start] = self._hashes[:start]
            self._hashes = grown
        self._hashes[start : self._tokens] = hashes

    def load(self, memory: memoryview) -> None:
        """Rows as they came."""
        assert self._digested == self._tokens, "what was restored comes before what is computed"
        hashes, damaged = self._content.read_rows(self._place, memory)
        width = memory.nbytes // len(hashes)
        for row in damaged:
            self._damaged[self._tokens + row] = bytes(memory[row * width : (row + 1) * width])
        self.append(hashes)
        self._digest.update(memory)
        self._digested = self._tokens

    def export(self, start: int, stop: int, into: memoryview) -> None:
        assert stop <= self._tokens, "rows that were not computed yet"
        self._content.rows(self._place, self._hashes[start:stop], into)
        width = into.nbytes // (stop - start)
        for row, came in self._damaged.items():
            if start <= row < stop:
                into[(row - start) * width : (row - start + 1) * width] = came

    def digest(self) -> bytes:
        """Of all their bytes."""
        if self._digested < self._tokens:
            self._digest.update(self._content.rows(self._place, self._hashes[self._digested : self._tokens]).data)
            self._digested = self._tokens
        return self._digest.digest()
