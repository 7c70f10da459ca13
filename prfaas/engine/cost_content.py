"""The bytes of a simulated cache, as a function of the tokens alone: whatever the chunks were, the same prefix has the
same bytes on every node.

A *prefix hash* stands for all tokens up to a position. A row or a state is that hash, keyed by its place, times a run
of odd constants: one pass over the memory, and every word differs when the hash does. The first word of a state is the
hash itself, so that a restored sequence can be continued.
"""

from collections.abc import Mapping
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from prfaas.engine.cost_profile import WORD_BYTES
from prfaas.engine.gathering import Place
from prfaas.kvcache.layout import KvLayout

Words = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_TOKEN_BITS = np.uint64(32)


def prefix_hashes(before: int, start: int, chunk: bytes) -> Words:
    """The hash after each token of a chunk that begins at position `start`; `before` is the hash of all before it."""
    ids = np.frombuffer(chunk, "<u4").astype(np.uint64)
    positions = np.arange(start, start + len(ids), dtype=np.uint64)
    return np.cumsum(_mixed(positions << _TOKEN_BITS | ids), dtype=np.uint64) + np.uint64(before)


class Content:
    """What each tensor of a layout holds at a prefix hash."""

    def __init__(self, layout: KvLayout) -> None:
        self._words = {
            (layer, number): tensor.nbytes // WORD_BYTES
            for layer, tensors in enumerate(layout.layers)
            for number, tensor in enumerate(tensors)
        }
        numbers = np.arange(max(self._words.values()) + len(self._words), dtype=np.uint64)
        constants = _mixed(numbers)
        self._keys = dict(zip(self._words, constants, strict=False))
        self._odd = constants[len(self._words) :] | np.uint64(1)
        self._inverse = np.uint64(pow(int(self._odd[0]), -1, 1 << 64))

    def rows(self, place: Place, hashes: Words, into: memoryview | None = None) -> Words:
        """The rows at `hashes`, written into `into` when it is given."""
        width = self._words[place]
        rows = np.empty((len(hashes), width), np.uint64) if into is None else _words(into).reshape(-1, width)
        np.multiply((hashes ^ self._keys[place])[:, None], self._odd[:width], out=rows)
        return rows

    def read_rows(self, place: Place, memory: memoryview) -> tuple[Words, list[int]]:
        """The hashes that rows stand for by their first word, and which of the rows are not what that hash makes."""
        rows = _words(memory).reshape(-1, self._words[place])
        hashes = rows[:, 0] * self._inverse ^ self._keys[place]
        damaged = np.flatnonzero((rows != self.rows(place, hashes)).any(axis=1))
        return hashes, [int(row) for row in damaged]

    def state(self, place: Place, prefix_hash: int, into: memoryview | None = None) -> Words:
        """The state at a hash, written into `into` when it is given."""
        width = self._words[place]
        state = np.empty(width, np.uint64) if into is None else _words(into)
        state[0] = prefix_hash
        np.multiply(state[:1] ^ self._keys[place], self._odd[1:width], out=state[1:])
        return state

    def hash_of(self, states: Mapping[Place, memoryview]) -> int:
        """The prefix hash that these states stand for. Damaged ones stand for a hash of their own, as a real model goes
        on from a damaged state without noticing."""
        prefix_hash = int(_words(next(iter(states.values())))[0])
        if all(np.array_equal(_words(memory), self.state(place, prefix_hash)) for place, memory in states.items()):
            return prefix_hash
        damaged = blake2b(digest_size=WORD_BYTES)
        for memory in states.values():
            damaged.update(memory)
        return prefix_hash ^ int.from_bytes(damaged.digest(), "little")


def _words(memory: memoryview) -> Words:
    return np.frombuffer(memory, np.uint64)


def _mixed(words: Words) -> Words:
    """splitmix64: a bijection that spreads every bit over all others."""
    words = words + _GOLDEN
    words = (words ^ (words >> _SHIFTS[0])) * _MULTIPLIERS[0]
    words = (words ^ (words >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return words ^ (words >> _SHIFTS[2])
