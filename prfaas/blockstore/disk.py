"""Objects in files of one directory: written whole under a temporary name, synced, then renamed to their key's name.

What `stored` names is on the disk whole, also after a crash. A file that is damaged, cut off, unreadable or not ours at
all is removed and counted when it is met. A directory is one namespace's, and refused to others.
"""

import asyncio
import errno
import os
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from prfaas.blockstore.directory import FOLDERS, INCOMING, files_in, folder_of, fsync_folder, take
from prfaas.blockstore.envelope import Head, open_head, seal, tag_of
from prfaas.blockstore.files import Content, read_head, read_whole, write_whole
from prfaas.blockstore.hands import Hands, Lent, Turns
from prfaas.blockstore.port import ContentConflict, Stored, StoreFailed, StoreFull

T = TypeVar("T")
_NAME = "disk store"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: How many files one call of a recovery looks at.
_LISTED_AT_ONCE = 64


class DiskBlockStore:
    """Made by `open`. `threads` is how many calls go on at once; each keeps a copy of its object in memory."""

    def __init__(self, root: Path, lock: int, hands: Hands, tag: bytes, capacity_bytes: int, used_bytes: int) -> None:
        self._root, self._lock, self._hands, self._tag = root, lock, hands, tag
        self._capacity_bytes, self._used_bytes = capacity_bytes, used_bytes
        self._damaged, self._names = 0, 0
        self._turns, self._books = Turns(), threading.Lock()

    @classmethod
    async def open(
        cls, root: Path, namespace: str, capacity_bytes: int, *, threads: int = 4, deadline_s: float = 10.0
    ) -> "DiskBlockStore":
        """Take the directory, which is made or already ours. Raises StoreFailed: somebody else uses it, it holds other
        things or is another namespace's, or cannot be used. Finding out what it holds has no deadline but the
        caller's."""
        lock, used_bytes = await asyncio.to_thread(_open, root, namespace)
        return cls(root, lock, Hands(_NAME, threads, deadline_s), tag_of(namespace), capacity_bytes, used_bytes)

    async def put(self, key: bytes, header: bytes, data: memoryview) -> None:
        lent = Lent(data)
        try:
            await self._run("put", lambda: self._put(key, header, lent))
        finally:
            lent.give_back()

    async def get(self, key: bytes, into: memoryview) -> bytes | None:
        lent = Lent(into)
        try:
            return await self._run("get", lambda: self._get(key, lent))
        finally:
            lent.give_back()

    async def delete(self, key: bytes) -> None:
        def remove() -> None:
            with self._turns.at(key):
                self._remove(self._path(key))

        await self._run("delete", remove)

    async def stored(self) -> AsyncGenerator[Stored, None]:
        for folder in FOLDERS:
            paths = await self._run("list", partial(files_in, self._root / folder))
            for start in range(0, len(paths), _LISTED_AT_ONCE):
                for head in await self._run("list", partial(self._look_at, paths[start : start + _LISTED_AT_ONCE])):
                    yield Stored(head.key, head.header, head.data_bytes)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def damaged(self) -> int:
        return self._damaged

    async def close(self) -> None:
        await self._hands.close(partial(os.close, self._lock))

    async def _run(self, stage: str, call: Callable[[], T]) -> T:
        try:
            return await self._hands.run(stage, call)
        except OSError as error:
            raise StoreFailed(_NAME, stage, str(error)) from error

    # What follows runs in the threads.

    def _put(self, key: bytes, header: bytes, lent: Lent) -> None:
        data = np.empty(lent.nbytes, np.uint8)
        if not lent.read(data):
            return
        content = Content(seal(self._tag, key, header, data.data), data)
        with self._turns.at(key):
            if lent.returned:  # nobody waits any more, and whoever did may have deleted it since
                return
            held = self._held(key)
            if held is None:
                self._write(key, content)
            elif held.head != content.head or not np.array_equal(held.data, content.data):
                raise ContentConflict(_NAME, key)

    def _get(self, key: bytes, lent: Lent) -> bytes | None:
        content = self._read(key)
        if content is None and self._path(key).exists():
            with self._turns.at(key):  # looked at again, since it may just have been written anew
                content = self._held(key)
        if content is None:
            return None
        if content.data.nbytes != lent.nbytes:
            raise StoreFailed(_NAME, "get", f"{content.data.nbytes} bytes are stored, not {lent.nbytes}")
        lent.write(content.data)
        head = open_head(self._tag, content.head)
        assert head is not None
        return head.header

    def _held(self, key: bytes) -> Content | None:
        """What is stored, verified; what is damaged goes. In turn."""
        content = self._read(key)
        if content is None:
            self._drop(self._path(key))
        return content

    def _read(self, key: bytes) -> Content | None:
        return read_whole(self._path(key), lambda raw: self._own(raw, key))

    def _own(self, raw: bytes, key: bytes) -> Head | None:
        head = open_head(self._tag, raw)
        return head if head is not None and head.key == key else None

    def _write(self, key: bytes, content: Content) -> None:
        path, room = self._path(key), content.nbytes
        with self._books:
            if self._used_bytes + room > self._capacity_bytes:
                raise StoreFull(_NAME, room)
            self._used_bytes += room
            self._names += 1
            temporary = self._root / INCOMING / str(self._names)
        try:
            write_whole(temporary, content)
            temporary.rename(path)
        except BaseException as error:
            self._give_back(room)
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in _FULL:
                raise StoreFull(_NAME, room) from error
            raise
        fsync_folder(path.parent)

    def _look_at(self, paths: list[Path]) -> list[Head]:
        """The heads of our objects among these files, as far as it shows without reading the data; others go."""
        return [head for path in paths if (head := self._look_at_one(path)) is not None]

    def _look_at_one(self, path: Path) -> Head | None:
        try:
            return self._own_head(path) or self._own_head_or_drop(path)
        except OSError:  # it stays, and what the directory has besides it is found
            self._found_damaged()
            return None

    def _own_head(self, path: Path) -> Head | None:
        head = read_head(path, self._tag)
        return head if head is not None and self._path(head.key) == path else None

    def _own_head_or_drop(self, path: Path) -> Head | None:
        with self._turns.at(_key_of(path)):  # looked at again, since it may just have been written anew
            head = self._own_head(path)
            if head is None:
                self._drop(path)
            return head

    def _drop(self, path: Path) -> None:
        if self._remove(path):
            self._found_damaged()

    def _found_damaged(self) -> None:
        with self._books:
            self._damaged += 1

    def _remove(self, path: Path) -> bool:
        try:
            nbytes = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return False
        self._give_back(nbytes)
        return True

    def _give_back(self, nbytes: int) -> None:
        with self._books:
            # A file that something else has lengthened gives back more than it took.
            self._used_bytes = max(0, self._used_bytes - nbytes)

    def _path(self, key: bytes) -> Path:
        return self._root / folder_of(key) / key.hex()


def _key_of(path: Path) -> bytes:
    try:
        return bytes.fromhex(path.name)
    except ValueError:
        return b""  # no key has this file, and any turn will do


def _open(root: Path, namespace: str) -> tuple[int, int]:
    try:
        return take(root, namespace)
    except OSError as error:
        raise StoreFailed(_NAME, "open", str(error)) from error
