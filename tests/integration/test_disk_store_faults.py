"""A disk store through what disks and processes go through: killed while it writes, and no room left."""

import asyncio
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from prfaas.blockstore.disk import DiskBlockStore
from prfaas.blockstore.port import StoreFull
from tests.integration.disk_store_writer import AT_ONCE, CAPACITY_BYTES, content, header_of, key_of

KIB = 1 << 10


def objects_in(root: Path) -> list[Path]:
    return [path for path in root.glob("??/*") if path.is_file()]


def leftovers_in(root: Path) -> int:
    return sum(1 for _ in (root / "incoming").iterdir())


@asynccontextmanager
async def opened(root: Path, capacity_bytes: int = CAPACITY_BYTES) -> AsyncIterator[DiskBlockStore]:
    store = await DiskBlockStore.open(root, "model-a", capacity_bytes)
    try:
        yield store
    finally:
        await store.close()


async def numbers_in(store: DiskBlockStore) -> set[int]:
    """What the store names, each read back and found right."""
    numbers = set()
    async with aclosing(store.stored()) as found:
        async for stored in found:
            number = int.from_bytes(stored.key[1:], "big")
            into = bytearray(stored.nbytes)
            assert stored.header == header_of(number) == await store.get(stored.key, memoryview(into))
            assert into == content(number)
            numbers.add(number)
    return numbers


def write_until_killed(root: Path, first: int, puts: int) -> set[int]:
    """Kill the writer when it has said so many puts; all that it said."""
    command = [sys.executable, "-m", "tests.integration.disk_store_writer", str(root), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        said = [writer.stdout.readline() for _ in range(puts)]
        writer.send_signal(signal.SIGKILL)
        said += writer.stdout.readlines()
    assert writer.returncode == -signal.SIGKILL
    return {int(line) for line in said if line.endswith("\n")}


async def test_nothing_is_half_stored_when_the_process_is_killed(tmp_path: Path):
    """kill -9 in the middle of puts, again and again: what was said to be stored is, all that the store names reads
    back right, what was being written does not count, and the bytes add up."""
    there, cut_short = set[int](), 0
    for turn in range(5):
        said = await asyncio.to_thread(write_until_killed, tmp_path, 10_000 * turn, 1 + 9 * turn)
        cut_short += leftovers_in(tmp_path)
        async with opened(tmp_path) as store:
            found = await numbers_in(store)
            assert said | there <= found
            assert len(found - said - there) <= AT_ONCE, "only what was on its way at the end may be there unsaid"
            files = objects_in(tmp_path)
            assert store.used_bytes == sum(path.stat().st_size for path in files)
            assert len(files) == len(found) and leftovers_in(tmp_path) == 0
            assert store.damaged == 0
            there = found
    assert cut_short > 0, "no kill came while a file was being written"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "small", str(tmp_path)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, timeout=10, check=False)
    except OSError as error:
        pytest.skip(f"cannot mount a small file system: {error}")
    if done.returncode:
        pytest.skip(f"may not mount a small file system: {done.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], timeout=10, check=True)


async def fill(store: DiskBlockStore) -> int:
    """Put until it is full; how many it took."""
    for number in range(100):
        try:
            await store.put(key_of(number), header_of(number), memoryview(bytes([number]) * (300 * KIB)))
        except StoreFull:
            return number
    raise AssertionError("it never was full")


async def same(store: DiskBlockStore, number: int) -> bool:
    into = bytearray(300 * KIB)
    header = await store.get(key_of(number), memoryview(into))
    return header == header_of(number) and into == bytes([number]) * (300 * KIB)


async def test_a_full_disk_is_a_full_store(small_disk: Path):
    """The put that does not fit leaves nothing behind, what is there can be read, and deleting makes room."""
    async with opened(small_disk / "blocks") as store:
        count = await fill(store)
        used_bytes = store.used_bytes
        assert count >= 8
        assert leftovers_in(small_disk / "blocks") == 0
        for number in range(count):
            assert await same(store, number)
        assert not await same(store, count) and store.used_bytes == used_bytes
        for _ in range(20):
            with pytest.raises(StoreFull):
                await store.put(key_of(count), b"", memoryview(bytes(900 * KIB)))
        await store.delete(key_of(0))
        await store.put(key_of(count), header_of(count), memoryview(bytes([count]) * (300 * KIB)))
        assert await same(store, count) and store.damaged == 0
    async with opened(small_disk / "blocks") as store:
        assert store.used_bytes == used_bytes
        for number in range(1, count + 1):
            assert await same(store, number)


async def test_a_file_that_may_not_grow_is_a_full_store(tmp_path: Path):
    """A limit on the size of files cuts the write short: the part that was written goes."""
    async with opened(tmp_path) as store:
        await store.put(key_of(1), header_of(1), memoryview(b"\1" * (300 * KIB)))
        used_bytes, (soft, hard) = store.used_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200 * KIB, hard))
        try:
            with pytest.raises(StoreFull):
                await store.put(key_of(2), header_of(2), memoryview(b"\2" * (300 * KIB)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert leftovers_in(tmp_path) == 0 and store.used_bytes == used_bytes
        assert await same(store, 1) and not await same(store, 2)
        await store.put(key_of(2), header_of(2), memoryview(b"\2" * (300 * KIB)))
        assert await same(store, 2)
