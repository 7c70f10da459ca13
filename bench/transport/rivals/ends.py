"""What both ends of a rival have in common. Runs in the rivals' own Python, which has nothing of ours but this folder.

An end prints one line of JSON when it is ready (the target: where it is). Then it obeys, one command a line: go (the
source: move everything, and say when it has arrived), crc, and the end of its input.
"""

import json
import mmap
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

MIB = 1 << 20
POOL, BLOCK, BATCH = 128 * MIB, MIB, 16
Offsets = list[int]


class Pool:
    """Shared memory like that of a worker."""

    def __init__(self, filled: bool) -> None:
        self._map = mmap.mmap(-1, POOL)
        self.array = np.frombuffer(self._map, dtype=np.uint8)
        self.array[:] = np.random.default_rng(1).integers(0, 256, POOL, dtype=np.uint8) if filled else 0

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)


def batches(total: int) -> Iterator[Offsets]:
    """Where the blocks lie, over and over through the pool, some at a time."""
    offsets = [number * BLOCK % POOL for number in range(total // BLOCK)]
    for start in range(0, len(offsets), BATCH):
        yield offsets[start : start + BATCH]


def serve(pool: Pool, ready: Any, go: Callable[[], None] = lambda: None) -> None:
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        match line.split():
            case ["go"]:
                go()
                print("0", flush=True)
            case ["crc"]:
                print(zlib.crc32(pool.array.data), flush=True)
