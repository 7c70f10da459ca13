"""A block store in this process: for tests and the smallest set-ups. Nothing outlives the process."""

from collections.abc import AsyncGenerator

from prfaas.blockstore.port import ContentConflict, Stored, StoreFailed, StoreFull

_NAME = "memory store"


class MemoryBlockStore:
    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes, self._used_bytes = capacity_bytes, 0
        self._objects: dict[bytes, tuple[bytes, bytes]] = {}
        self._closed = False

    async def put(self, key: bytes, header: bytes, data: memoryview) -> None:
        self._must_be_open("put")
        content = header, bytes(data)
        held = self._objects.get(key)
        if held is not None:
            if held != content:
                raise ContentConflict(_NAME, key)
            return
        needed = _bytes_of(key, content)
        if self._used_bytes + needed > self._capacity_bytes:
            raise StoreFull(_NAME, needed)
        self._objects[key] = content
        self._used_bytes += needed

    async def get(self, key: bytes, into: memoryview) -> bytes | None:
        self._must_be_open("get")
        held = self._objects.get(key)
        if held is None:
            return None
        header, data = held
        if len(data) != len(into):
            raise StoreFailed(_NAME, "get", f"{len(data)} bytes are stored, not {len(into)}")
        into[:] = data
        return header

    async def delete(self, key: bytes) -> None:
        self._must_be_open("delete")
        held = self._objects.pop(key, None)
        if held is not None:
            self._used_bytes -= _bytes_of(key, held)

    async def stored(self) -> AsyncGenerator[Stored, None]:
        self._must_be_open("list")
        for key, (header, data) in list(self._objects.items()):
            yield Stored(key, header, len(data))

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def damaged(self) -> int:
        return 0

    async def close(self) -> None:
        self._closed = True

    def _must_be_open(self, stage: str) -> None:
        if self._closed:
            raise StoreFailed(_NAME, stage, "it is closed")


def _bytes_of(key: bytes, content: tuple[bytes, bytes]) -> int:
    return len(key) + sum(map(len, content))
