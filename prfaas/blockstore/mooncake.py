"""Objects in Mooncake Store: the memory (and disks) of a cluster, for a pool that outgrows one machine.

Its client is a library of C++ with calls that block: they are made in threads. What it hands over is verified here, as
if it came from a disk. Objects go with the machine that holds them, and unless they are pinned Mooncake evicts them:
both show as objects that are not there.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator
from functools import partial

import numpy as np

from prfaas.blockstore.envelope import PRELUDE_BYTES, Head, head_bytes, intact, open_head, seal, tag_of
from prfaas.blockstore.hands import Bytes, Hands, Lent, Turns
from prfaas.blockstore.mooncake_calls import NAME, MooncakeCalls, MooncakeSettings, connect, keys_under
from prfaas.blockstore.port import ContentConflict, Stored, StoreFailed

#: Read first of an object; few heads are longer.
_FIRST_BYTES = 1024
_LISTED_AT_ONCE = 64


class MooncakeBlockStore:
    """Made by `open`. One process at a time uses a `shard` of a namespace."""

    def __init__(self, settings: MooncakeSettings, hands: Hands, calls: MooncakeCalls, prefix: str, tag: bytes) -> None:
        self._settings, self._hands, self._calls, self._prefix, self._tag = settings, hands, calls, prefix, tag
        #: What this process knows to be there. Mooncake may have evicted some of it.
        self._sizes: dict[bytes, int] = {}
        self._used_bytes = self._damaged = 0
        self._turns, self._books = Turns(), threading.Lock()

    @classmethod
    async def open(cls, settings: MooncakeSettings, namespace: str, shard: str) -> "MooncakeBlockStore":
        """Raises StoreFailed: the library is missing, or the master does not answer."""
        hands, tag = Hands(NAME, settings.threads, settings.deadline_s), tag_of(namespace)
        try:
            calls = await hands.run("open", partial(connect, settings))
        except BaseException:
            await asyncio.shield(hands.close(lambda: None))
            raise
        return cls(settings, hands, calls, f"prfaas/{tag.hex()}/{shard}/", tag)

    async def put(self, key: bytes, header: bytes, data: memoryview) -> None:
        assert len(data) <= self._settings.max_object_bytes
        lent = Lent(data)
        try:
            await self._hands.run("put", partial(self._put, key, header, lent))
        finally:
            lent.give_back()

    async def get(self, key: bytes, into: memoryview) -> bytes | None:
        lent = Lent(into)
        try:
            return await self._hands.run("get", partial(self._get, key, lent))
        finally:
            lent.give_back()

    async def delete(self, key: bytes) -> None:
        def delete() -> None:
            with self._turns.at(key):
                self._remove(key)

        await self._hands.run("delete", delete)

    async def stored(self) -> AsyncGenerator[Stored, None]:
        """Nothing, unless the settings name the master's admin port."""
        names = await self._hands.run("list", partial(keys_under, self._prefix, self._settings))
        for start in range(0, len(names), _LISTED_AT_ONCE):
            for head in await self._hands.run("list", partial(self._look_at, names[start : start + _LISTED_AT_ONCE])):
                yield Stored(head.key, head.header, head.data_bytes)

    @property
    def used_bytes(self) -> int:
        """Of what this process has put or listed."""
        return self._used_bytes

    @property
    def damaged(self) -> int:
        return self._damaged

    async def close(self) -> None:
        await self._hands.close(self._calls.close)

    # What follows runs in the threads.

    def _put(self, key: bytes, header: bytes, lent: Lent) -> None:
        data = np.empty(lent.nbytes, np.uint8)
        if not lent.read(data):
            return
        head = seal(self._tag, key, header, data.data)
        with self._turns.at(key), self._calls.buffer() as buffer:
            if lent.returned:  # nobody waits any more, and whoever did may have deleted it since
                return
            for _ in range(2):  # again when what was there was damaged, and is gone
                if self._write(key, head, data, buffer) or self._same(key, head, data, buffer):
                    self._note(key, len(head) + data.nbytes)
                    return
        raise StoreFailed(NAME, "put", "another put of it has not ended")

    def _write(self, key: bytes, head: bytes, data: Bytes, buffer: Bytes) -> bool:
        """False when something is there."""
        total_bytes = len(head) + data.nbytes
        buffer[: len(head)] = np.frombuffer(head, np.uint8)
        buffer[len(head) : total_bytes] = data
        return self._calls.write(self._name(key), buffer[:total_bytes])

    def _same(self, key: bytes, head: bytes, data: Bytes, buffer: Bytes) -> bool:
        """Whether what is there is this; what is damaged goes. Raises ContentConflict."""
        found = self._read(key, buffer)
        if found is None:
            return False
        held, content = found
        if bytes(buffer[: held.head_bytes]) != head or not np.array_equal(content, data):
            raise ContentConflict(NAME, key)
        return True

    def _get(self, key: bytes, lent: Lent) -> bytes | None:
        with self._calls.buffer() as buffer:
            found = self._read(key, buffer)
            if found is None:
                return None
            head, data = found
            if data.nbytes != lent.nbytes:
                raise StoreFailed(NAME, "get", f"{data.nbytes} bytes are stored, not {lent.nbytes}")
            lent.write(data)
            return head.header

    def _read(self, key: bytes, buffer: Bytes) -> tuple[Head, Bytes] | None:
        """The verified object, in the buffer; what is damaged goes."""
        name = self._name(key)
        total_bytes = self._calls.read(name, buffer)
        if total_bytes is None:
            self._note(key, 0)
            return None
        head = open_head(self._tag, _start_of(buffer[:total_bytes]))
        if head is not None and head.key == key:
            data = buffer[head.head_bytes : total_bytes]
            if intact(head, data.data):
                return head, data
        self._drop(key)
        return None

    def _look_at(self, names: list[str]) -> list[Head]:
        """The heads of those objects that are still there; what shows damage goes."""
        with self._calls.buffer() as buffer:
            return [head for name in names if (head := self._own_head(name, buffer)) is not None]

    def _own_head(self, name: str, buffer: Bytes) -> Head | None:
        key = bytes.fromhex(name.removeprefix(self._prefix))
        total_bytes = self._calls.size(name)
        if total_bytes is None:
            return None
        read_bytes = self._calls.read_start(name, buffer[: min(total_bytes, _FIRST_BYTES)])
        length = head_bytes(bytes(buffer[:read_bytes])) or 0
        if read_bytes < length <= total_bytes:
            read_bytes = self._calls.read_start(name, buffer[:length])
        if read_bytes == 0:
            return None
        head = open_head(self._tag, bytes(buffer[:read_bytes]))
        if head is None or head.key != key or head.total_bytes != total_bytes:
            self._drop(key)
            return None
        self._note(key, total_bytes)
        return head

    def _drop(self, key: bytes) -> None:
        self._remove(key)
        with self._books:
            self._damaged += 1

    def _remove(self, key: bytes) -> None:
        self._calls.remove(self._name(key))
        self._note(key, 0)

    def _note(self, key: bytes, nbytes: int) -> None:
        with self._books:
            self._used_bytes += nbytes - self._sizes.pop(key, 0)
            if nbytes:
                self._sizes[key] = nbytes

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()


def _start_of(content: Bytes) -> bytes:
    """As much of it as its head, if one begins there."""
    return bytes(content[: head_bytes(bytes(content[:PRELUDE_BYTES])) or 0])
