"""A process that puts objects into a disk store, several at once, until it is killed:
python -m tests.integration.disk_store_writer DIRECTORY FIRST. It says the number of each that is stored."""

import asyncio
import itertools
import random
import sys
from pathlib import Path

from prfaas.blockstore.disk import DiskBlockStore

CAPACITY_BYTES = 1 << 30
AT_ONCE = 8
_KIB = 1 << 10


def key_of(number: int) -> bytes:
    return b"k" + number.to_bytes(16, "big")


def header_of(number: int) -> bytes:
    return b"header of %06d" % number


def content(number: int) -> bytes:
    """Of sizes that take one write and many."""
    chance = random.Random(number)
    return chance.randbytes(chance.choice([100, 70 * _KIB, 900 * _KIB]))


async def write(root: Path, first: int) -> None:
    store = await DiskBlockStore.open(root, "model-a", CAPACITY_BYTES, threads=AT_ONCE)
    numbers = itertools.count(first)

    async def put_on() -> None:
        while True:
            number = next(numbers)
            await store.put(key_of(number), header_of(number), memoryview(content(number)))
            sys.stdout.write(f"{number}\n")
            sys.stdout.flush()

    await asyncio.gather(*(put_on() for _ in range(AT_ONCE)))


if __name__ == "__main__":
    asyncio.run(write(Path(sys.argv[1]), int(sys.argv[2])))
