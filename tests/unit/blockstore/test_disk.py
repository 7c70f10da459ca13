"""Files that are not exactly what was put are never served, whatever happened to them."""

import asyncio
import errno
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from prfaas.blockstore.directory import FOLDERS, INCOMING
from prfaas.blockstore.disk import DiskBlockStore
from prfaas.blockstore.port import StoreFailed, StoreFull

ROOM = 1 << 20
KEY, OTHER = b"k" + bytes(15) + b"\x01", b"s" + bytes(15) + b"\x02"
HEADER, DATA = b"header", bytes(range(40))
LIMIT_S = 20.0


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[DiskBlockStore]:
    store = await DiskBlockStore.open(tmp_path, "model-a", ROOM)
    yield store
    await store.close()


async def put(store: DiskBlockStore, key: bytes = KEY) -> None:
    await store.put(key, HEADER, memoryview(DATA))


async def get(store: DiskBlockStore, key: bytes = KEY) -> bytes | None:
    into = bytearray(len(DATA))
    header = await store.get(key, memoryview(into))
    assert header is None or (header, bytes(into)) == (HEADER, DATA)
    return header


async def listed(store: DiskBlockStore) -> list[bytes]:
    async with aclosing(store.stored()) as found:
        return sorted([stored.key async for stored in found])


def file_of(root: Path, key: bytes = KEY) -> Path:
    (path,) = root.glob(f"??/{key.hex()}")
    return path


async def test_every_flipped_byte_is_found(store: DiskBlockStore, tmp_path: Path):
    """In magic, tag, lengths, checksums, key, header or data: the object is dropped, counted, and can be put again."""
    await put(store)
    path = file_of(tmp_path)
    whole = path.read_bytes()
    for offset in range(len(whole)):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 0x10]) + whole[offset + 1 :])
        assert await get(store) is None
        assert not path.exists() and (store.damaged, store.used_bytes) == (offset + 1, 0)
        await put(store)
        assert await get(store) == HEADER


async def test_every_other_length_is_found(store: DiskBlockStore, tmp_path: Path):
    """Cut off anywhere, empty, or longer than it was: never served, neither by get nor by the listing."""
    await put(store)
    path = file_of(tmp_path)
    whole = path.read_bytes()
    lengths = [*range(0, len(whole), 4), len(whole) - 1]
    for kept in (*(whole[:length] for length in lengths), whole + bytes(1)):
        for served in (lambda: get(store), lambda: listed(store)):
            path.write_bytes(kept)
            damaged = store.damaged
            assert not await served()
            assert not path.exists() and store.damaged == damaged + 1
            await put(store)


async def test_the_listing_drops_what_shows_damage_in_its_head(store: DiskBlockStore, tmp_path: Path):
    """Damage in the data shows when it is read."""
    await put(store)
    await put(store, OTHER)
    for key, offset in ((KEY, 20), (OTHER, -1)):
        whole = bytearray(file_of(tmp_path, key).read_bytes())
        whole[offset] ^= 1
        file_of(tmp_path, key).write_bytes(whole)
    assert await listed(store) == [OTHER]
    assert store.damaged == 1
    assert await get(store, OTHER) is None
    assert store.damaged == 2


async def test_an_object_under_another_ones_name_is_not_served(store: DiskBlockStore, tmp_path: Path):
    """A file says which key it is of."""
    await put(store)
    await put(store, OTHER)
    shutil.copy(file_of(tmp_path, KEY), file_of(tmp_path, OTHER))
    assert await get(store, OTHER) is None
    assert await listed(store) == [KEY]
    assert store.damaged == 1


async def test_files_that_are_not_ours_are_dropped(store: DiskBlockStore, tmp_path: Path):
    """Whatever their names; folders and links are left alone, and not followed."""
    await put(store)
    (tmp_path / "00" / "readme.txt").write_text("hello")
    (tmp_path / "01" / KEY.hex()).write_bytes(file_of(tmp_path).read_bytes())
    (tmp_path / "02" / "folder").mkdir()
    (tmp_path / "03" / "link").symlink_to(tmp_path / "block-store")
    assert await listed(store) == [KEY]
    assert store.damaged == 2
    assert await get(store) == HEADER


async def test_the_directory_of_another_model_is_refused_and_keeps_all_it_has(store: DiskBlockStore, tmp_path: Path):
    """Both are named. Neither would know of the other's bytes, so they do not share one; emptied, it is for anybody."""
    await put(store)
    await put(store, OTHER)
    await store.close()
    with pytest.raises(StoreFailed, match=r"model-a.*model-b"):
        await DiskBlockStore.open(tmp_path, "model-b", ROOM)
    store = await DiskBlockStore.open(tmp_path, "model-a", ROOM)
    assert await listed(store) == [KEY, OTHER] and store.damaged == 0
    await store.close()
    shutil.rmtree(tmp_path)
    await (await DiskBlockStore.open(tmp_path, "model-b", ROOM)).close()


async def test_a_name_that_was_cut_short_is_nobodys(tmp_path: Path):
    """Killed while it took a new directory: nothing has been stored, and it is there for whoever comes."""
    (tmp_path / "block-store").write_text("model-")
    await (await DiskBlockStore.open(tmp_path, "model-b", ROOM)).close()
    with pytest.raises(StoreFailed, match=r"model-b.*model-a"):
        await DiskBlockStore.open(tmp_path, "model-a", ROOM)


async def test_an_object_of_another_model_is_not_served(store: DiskBlockStore, tmp_path: Path):
    """However its file got there."""
    await put(store)
    await store.close()
    (tmp_path / "block-store").write_text("model-b\n")
    store = await DiskBlockStore.open(tmp_path, "model-b", ROOM)
    assert await get(store) is None
    assert (store.damaged, store.used_bytes) == (1, 0)
    await store.close()


@pytest.fixture
def broken_file(store: DiskBlockStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Every read of KEY's file ends with an error, as on a disk with a bad place. No disk here can be made to."""

    def break_it(number: int) -> None:
        broken, pread = file_of(tmp_path).stat().st_ino, os.pread

        def failing(fd: int, count: int, offset: int) -> bytes:
            if os.fstat(fd).st_ino == broken:
                raise OSError(number, os.strerror(number))
            return pread(fd, count, offset)

        monkeypatch.setattr(os, "pread", failing)

    return break_it


@pytest.mark.parametrize(("number", "stays"), [(errno.EIO, False), (errno.EUCLEAN, False), (errno.EMFILE, True)])
async def test_a_file_that_cannot_be_read_costs_no_other(
    store: DiskBlockStore, tmp_path: Path, broken_file: Callable[[int], None], number: int, stays: bool
):
    """It counts as damaged, and the listing goes on. What the disk has lost is dropped; what could not be read for
    another reason stays."""
    await put(store)
    await put(store, OTHER)
    path = file_of(tmp_path)
    broken_file(number)
    assert await listed(store) == [OTHER]
    assert store.damaged == 1
    assert path.exists() == stays
    assert await get(store, OTHER) == HEADER


async def test_a_file_that_cannot_be_read_is_put_again(
    store: DiskBlockStore, tmp_path: Path, broken_file: Callable[[int], None]
):
    await put(store)
    used_bytes = store.used_bytes
    broken_file(errno.EIO)
    await put(store)
    assert (store.damaged, store.used_bytes) == (1, used_bytes)


async def test_what_was_cut_short_is_gone_after_a_restart(store: DiskBlockStore, tmp_path: Path):
    """It takes no room, and is no object."""
    await put(store)
    used_bytes = store.used_bytes
    await store.close()
    (tmp_path / "incoming" / "1").write_bytes(file_of(tmp_path).read_bytes()[:-1])
    store = await DiskBlockStore.open(tmp_path, "model-a", ROOM)
    assert list((tmp_path / "incoming").iterdir()) == []
    assert store.used_bytes == used_bytes and await listed(store) == [KEY]
    await store.close()


async def test_a_put_leaves_one_file(store: DiskBlockStore, tmp_path: Path):
    """Of the size that is counted, and nothing beside it."""
    await put(store)
    await put(store)
    assert list((tmp_path / "incoming").iterdir()) == []
    assert file_of(tmp_path).stat().st_size == store.used_bytes


async def test_one_process_at_a_time(store: DiskBlockStore, tmp_path: Path):
    """A second is refused until the first has closed."""
    with pytest.raises(StoreFailed, match="in use"):
        await DiskBlockStore.open(tmp_path, "model-a", ROOM)
    await store.close()
    await (await DiskBlockStore.open(tmp_path, "model-a", ROOM)).close()


async def test_a_directory_with_other_things_is_left_alone(tmp_path: Path):
    """A wrong path in the configuration must not cost files."""
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(StoreFailed, match="other things"):
        await DiskBlockStore.open(tmp_path, "model-a", ROOM)
    assert os.listdir(tmp_path) == ["thesis.txt"]


async def test_a_path_that_is_no_directory_is_refused(tmp_path: Path):
    """As the store's own error."""
    (tmp_path / "file").touch()
    with pytest.raises(StoreFailed):
        await DiskBlockStore.open(tmp_path / "file" / "blocks", "model-a", ROOM)


async def test_a_smaller_capacity_than_what_is_there_takes_nothing_more(store: DiskBlockStore, tmp_path: Path):
    """It says so until enough is deleted."""
    await put(store)
    await store.close()
    store = await DiskBlockStore.open(tmp_path, "model-a", store.used_bytes)
    with pytest.raises(StoreFull):
        await put(store, OTHER)
    await store.delete(KEY)
    await put(store, OTHER)
    await store.close()


async def test_a_directory_that_vanishes_fails_puts_and_misses_gets(store: DiskBlockStore, tmp_path: Path):
    """Nothing else breaks."""
    await put(store)
    for folder in (*FOLDERS, INCOMING):
        shutil.rmtree(tmp_path / folder)
    assert await get(store) is None
    with pytest.raises(StoreFailed):
        await put(store, OTHER)
    with pytest.raises(StoreFailed):
        await listed(store)


async def test_a_disk_that_hangs_costs_no_more_than_the_deadline(tmp_path: Path):
    """A file whose reading never ends (here a pipe that nobody writes) fails its call and leaves the others alone; when
    every thread hangs all fail in time, and when the disk answers again the store does too."""
    store = await DiskBlockStore.open(tmp_path, "model-a", ROOM, threads=2, deadline_s=0.2)
    await put(store)
    await put(store, OTHER)
    path = file_of(tmp_path)
    path.unlink()
    os.mkfifo(path)
    into = bytearray(len(DATA))
    with pytest.raises(StoreFailed, match="get"):
        await store.get(KEY, memoryview(into))
    assert await get(store, OTHER) == HEADER
    with pytest.raises(StoreFailed):
        await store.get(KEY, memoryview(into))
    with pytest.raises(StoreFailed):
        await get(store, OTHER)
    os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))  # both readers get a writer, which goes at once
    path.unlink(missing_ok=True)
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                assert await get(store, OTHER) == HEADER
                break
            except StoreFailed:
                continue
    assert into == bytes(len(DATA))
    await store.close()
