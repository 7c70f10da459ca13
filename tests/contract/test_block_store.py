"""The contract of `prfaas.blockstore.port.BlockStore`, the same for every implementation."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

import pytest

from prfaas.blockstore.disk import DiskBlockStore
from prfaas.blockstore.memory import MemoryBlockStore
from prfaas.blockstore.mooncake import MooncakeBlockStore
from prfaas.blockstore.mooncake_calls import MooncakeSettings
from prfaas.blockstore.port import BlockStore, ContentConflict, Stored, StoreFailed, StoreFull
from tests.mooncake_cluster import MooncakeCluster, missing, start_mooncake

MIB = 1 << 20
CAPACITY_BYTES = 16 * MIB
LARGEST_BYTES = 20 * MIB


class Backend(Protocol):
    """What a test may do to a store from outside."""

    store: BlockStore

    async def reopen(self) -> None:
        """As after a restart of the process that uses the store."""
        ...

    def damage(self, key: bytes) -> None:
        """Flip a bit of what is kept under the key."""
        ...


class InMemory:
    def __init__(self) -> None:
        self.store = MemoryBlockStore(CAPACITY_BYTES)

    async def reopen(self) -> None:
        pytest.skip("what is in this process goes with it")

    def damage(self, key: bytes) -> None:
        pytest.skip("nothing comes to the memory of this process but by its own hand")


class OnDisk:
    def __init__(self, root: Path, store: DiskBlockStore) -> None:
        self.root, self.store = root, store

    @classmethod
    async def open(cls, root: Path) -> "OnDisk":
        return cls(root, await DiskBlockStore.open(root, "model-a", CAPACITY_BYTES))

    async def reopen(self) -> None:
        await self.store.close()
        self.store = await DiskBlockStore.open(self.root, "model-a", CAPACITY_BYTES)

    def damage(self, key: bytes) -> None:
        (path,) = self.root.glob(f"??/{key.hex()}")
        path.write_bytes(flipped(path.read_bytes()))


class InMooncake:
    """Other processes hold the memory; this one adds none."""

    def __init__(self, cluster: MooncakeCluster, namespace: str, store: MooncakeBlockStore) -> None:
        self.cluster, self.namespace, self.store = cluster, namespace, store

    @staticmethod
    def settings(cluster: MooncakeCluster) -> MooncakeSettings:
        return MooncakeSettings(
            master=cluster.master, admin=cluster.admin, host="127.0.0.1", max_object_bytes=LARGEST_BYTES, threads=3
        )

    @classmethod
    async def open(cls, cluster: MooncakeCluster, namespace: str) -> "InMooncake":
        return cls(cluster, namespace, await MooncakeBlockStore.open(cls.settings(cluster), namespace, "shard-0"))

    async def reopen(self) -> None:
        await self.store.close()
        self.store = await MooncakeBlockStore.open(self.settings(self.cluster), self.namespace, "shard-0")

    def damage(self, key: bytes) -> None:
        name = self.store._name(key)
        kept = self.cluster.client.get(name)
        assert self.cluster.client.remove(name, True) == 0
        assert self.cluster.client.put(name, flipped(kept)) == 0


def flipped(kept: bytes) -> bytes:
    return kept[:-1] + bytes([kept[-1] ^ 1])


@pytest.fixture(scope="module")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeCluster]:
    if why := missing():
        pytest.skip(f"Mooncake Store is not here, the contract does not run against it: {why}")
    with start_mooncake(tmp_path_factory.mktemp("mooncake"), CAPACITY_BYTES) as cluster:
        yield cluster


@pytest.fixture(params=["memory", "disk", "mooncake"])
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    opened: Backend
    match request.param:
        case "memory":
            opened = InMemory()
        case "disk":
            opened = await OnDisk.open(tmp_path / "blocks")
        case _:
            cluster: MooncakeCluster = request.getfixturevalue("mooncake")
            cluster.client.remove_all(True)
            opened = await InMooncake.open(cluster, request.node.name)
    yield opened
    await opened.store.close()


@pytest.fixture
def store(backend: Backend) -> BlockStore:
    return backend.store


def key(number: int) -> bytes:
    return b"k" + number.to_bytes(16, "big")


def content(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


async def put(store: BlockStore, key: bytes, data: bytes, header: bytes = b"") -> None:
    await store.put(key, header, memoryview(data))


async def read(store: BlockStore, key: bytes, nbytes: int) -> tuple[bytes, bytes] | None:
    """Header and data."""
    into = bytearray(nbytes)
    header = await store.get(key, memoryview(into))
    return None if header is None else (header, bytes(into))


async def listed(store: BlockStore) -> dict[bytes, Stored]:
    async with aclosing(store.stored()) as all_stored:
        found = [stored async for stored in all_stored]
    by_key = {stored.key: stored for stored in found}
    assert len(by_key) == len(found), "an object is told once"
    return by_key


async def fill(store: BlockStore) -> int:
    """Put 2 MiB after 2 MiB until it is full; how many it took."""
    for number in range(64):
        try:
            await put(store, key(number), content(number, 2 * MIB))
        except StoreFull:
            return number
    raise AssertionError("it never was full")


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, 3 * MIB + 17])
async def test_what_was_put_is_read_back(store: BlockStore, nbytes: int):
    """Header and data come back byte for byte, of any length; a key never put is not there."""
    await put(store, key(1), content(1, nbytes), b"header of 1")
    assert await read(store, key(1), nbytes) == (b"header of 1", content(1, nbytes))
    assert await read(store, key(2), nbytes) is None


async def test_headers_may_be_empty_or_long(store: BlockStore):
    """A header is any bytes up to the limit."""
    await put(store, key(1), b"data", b"")
    await put(store, key(2), b"data", content(2, 60_000))
    assert await read(store, key(1), 4) == (b"", b"data")
    assert await read(store, key(2), 4) == (content(2, 60_000), b"data")
    assert (await listed(store))[key(2)] == Stored(key(2), content(2, 60_000), 4)


async def test_memory_is_the_callers_again_after_a_put(store: BlockStore):
    """What the caller writes there later does not get into the store."""
    memory = bytearray(content(1, 100_000))
    await store.put(key(1), b"", memoryview(memory))
    memory[:] = bytes(len(memory))
    assert await read(store, key(1), 100_000) == (b"", content(1, 100_000))


async def test_putting_the_same_again_changes_nothing(store: BlockStore):
    """The second put succeeds and takes no room."""
    await put(store, key(1), content(1, 10_000), b"h")
    used_bytes = store.used_bytes
    assert used_bytes >= 10_000
    await put(store, key(1), content(1, 10_000), b"h")
    assert store.used_bytes == used_bytes and len(await listed(store)) == 1


@pytest.mark.parametrize(
    ("header", "data"),
    [(b"h", content(2, 10_000)), (b"other", content(1, 10_000)), (b"h", content(1, 9_999)), (b"h", b"")],
    ids=["data", "header", "shorter", "empty"],
)
async def test_another_content_under_a_key_is_an_alarm(store: BlockStore, header: bytes, data: bytes):
    """R14: the old one is kept."""
    await put(store, key(1), content(1, 10_000), b"h")
    used_bytes = store.used_bytes
    with pytest.raises(ContentConflict):
        await put(store, key(1), data, header)
    assert await read(store, key(1), 10_000) == (b"h", content(1, 10_000))
    assert (store.used_bytes, store.damaged) == (used_bytes, 0)


async def test_of_two_who_put_different_contents_one_wins(store: BlockStore):
    """However they interleave, one content is stored, and all others are told."""
    for round_ in range(5):
        results = await asyncio.gather(
            *(put(store, key(round_), content(writer, 50_000)) for writer in range(6)), return_exceptions=True
        )
        (winner,) = (writer for writer, result in enumerate(results) if result is None)
        assert all(isinstance(result, ContentConflict) for result in results if result is not None), results
        assert await read(store, key(round_), 50_000) == (b"", content(winner, 50_000))


async def test_many_may_put_the_same_at_once(store: BlockStore):
    """All succeed and it takes the room of one."""
    await put(store, key(0), content(1, 50_000))
    one_bytes = store.used_bytes
    await asyncio.gather(*(put(store, key(1), content(1, 50_000)) for _ in range(6)))
    assert store.used_bytes == 2 * one_bytes


async def test_many_calls_at_once(store: BlockStore):
    """Puts, gets and deletes of many objects do not get into each other's way."""
    await asyncio.gather(*(put(store, key(n), content(n, 1000 + n), b"%d" % n) for n in range(60)))
    answers = await asyncio.gather(*(read(store, key(n), 1000 + n) for n in range(60)))
    assert answers == [(b"%d" % n, content(n, 1000 + n)) for n in range(60)]
    await asyncio.gather(*(store.delete(key(n)) for n in range(0, 60, 2)))
    assert set(await listed(store)) == {key(n) for n in range(1, 60, 2)}


async def test_a_deleted_object_is_gone(store: BlockStore):
    """Deleting is idempotent, gives the room back, and frees the key for any content."""
    assert store.used_bytes == 0
    await put(store, key(1), content(1, 10_000))
    assert await read(store, key(1), 10_000) is not None
    await store.delete(key(1))
    await store.delete(key(1))
    assert await read(store, key(1), 10_000) is None
    assert (store.used_bytes, store.damaged) == (0, 0)
    await put(store, key(1), content(2, 500))
    assert await read(store, key(1), 500) == (b"", content(2, 500))


async def test_a_length_that_is_not_the_objects_is_refused(store: BlockStore):
    """Neither the object nor the memory offered for it changes."""
    await put(store, key(1), content(1, 1000))
    for nbytes in (999, 1001, 0):
        into = bytearray(b"\x77" * nbytes)
        with pytest.raises(StoreFailed):
            await store.get(key(1), memoryview(into))
        assert into == b"\x77" * nbytes
    assert await read(store, key(1), 1000) == (b"", content(1, 1000))


async def test_an_object_larger_than_the_store_does_not_fit(store: BlockStore):
    """It is refused, nothing of it stays, and others go on."""
    await put(store, key(1), content(1, MIB))
    used_bytes = store.used_bytes
    with pytest.raises(StoreFull):
        await put(store, key(2), bytes(LARGEST_BYTES))
    assert await read(store, key(2), LARGEST_BYTES) is None
    assert store.used_bytes == used_bytes and set(await listed(store)) == {key(1)}
    await put(store, key(3), content(3, MIB))
    assert await read(store, key(1), MIB) == (b"", content(1, MIB))


async def test_a_full_store_takes_more_after_a_delete(store: BlockStore):
    """Its bound holds and is said; deleting is what makes room."""
    count = await fill(store)
    assert 4 <= count <= 8, "most of the capacity could be used, and no more than it"
    assert store.used_bytes <= CAPACITY_BYTES
    await store.delete(key(0))
    await put(store, key(count), content(count, 2 * MIB))
    assert await read(store, key(count), 2 * MIB) == (b"", content(count, 2 * MIB))


async def test_all_objects_are_listed_with_their_headers(store: BlockStore):
    """Any number of them, each once."""
    assert await listed(store) == {}
    for number in range(150):
        await put(store, key(number), content(number, number), b"header %d" % number)
    assert await listed(store) == {key(n): Stored(key(n), b"header %d" % n, n) for n in range(150)}


async def test_objects_outlive_the_process_that_put_them(backend: Backend):
    """After a restart they are listed, take the same room, and are read back."""
    for number in range(20):
        await put(backend.store, key(number), content(number, 5000 + number), b"h%d" % number)
    await backend.store.delete(key(0))
    used_bytes = backend.store.used_bytes
    await backend.reopen()
    found = await listed(backend.store)
    assert found == {key(n): Stored(key(n), b"h%d" % n, 5000 + n) for n in range(1, 20)}
    assert backend.store.used_bytes == used_bytes
    for number in range(1, 20):
        assert await read(backend.store, key(number), 5000 + number) == (
            b"h%d" % number,
            content(number, 5000 + number),
        )
    with pytest.raises(ContentConflict):
        await put(backend.store, key(1), b"x")


async def test_a_damaged_object_is_dropped_and_counted(backend: Backend):
    """It is never served; the memory offered for it stays as it is, and the key is free again."""
    store = backend.store
    await put(store, key(1), content(1, 10_000))
    await put(store, key(2), content(2, 10_000))
    backend.damage(key(1))
    into = bytearray(b"\x77" * 10_000)
    assert await store.get(key(1), memoryview(into)) is None
    assert into == b"\x77" * 10_000 and store.damaged == 1
    assert set(await listed(store)) == {key(2)}
    await put(store, key(1), content(3, 10_000))
    assert await read(store, key(1), 10_000) == (b"", content(3, 10_000))
    assert store.damaged == 1


async def test_a_put_replaces_what_is_damaged(backend: Backend):
    """Damage is not another content: it raises no alarm."""
    store = backend.store
    await put(store, key(1), content(1, 10_000))
    used_bytes = store.used_bytes
    backend.damage(key(1))
    await put(store, key(1), content(1, 10_000))
    assert await read(store, key(1), 10_000) == (b"", content(1, 10_000))
    assert (store.damaged, store.used_bytes) == (1, used_bytes)


async def test_a_closed_store_refuses(store: BlockStore):
    """Every call fails with the store's error, and closing again does nothing."""
    await put(store, key(1), b"x")
    await store.close()
    await store.close()
    with pytest.raises(StoreFailed):
        await put(store, key(1), b"x")
    with pytest.raises(StoreFailed):
        await read(store, key(1), 1)
    with pytest.raises(StoreFailed):
        await store.delete(key(1))
    with pytest.raises(StoreFailed):
        await listed(store)


async def test_closing_ends_calls_under_way(store: BlockStore):
    """Each comes to an end: done, or failed with the store's error."""
    puts = [asyncio.create_task(put(store, key(n), content(n, 100_000))) for n in range(30)]
    await asyncio.sleep(0)
    await store.close()
    results = await asyncio.gather(*puts, return_exceptions=True)
    assert all(result is None or isinstance(result, StoreFailed) for result in results), results
