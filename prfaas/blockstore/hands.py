"""Threads for calls that block, memory lent to them, and turns at a key.

A call that does not come back within the deadline is given up: its thread stays taken until it does come back, so a
dead disk takes all threads and no more, and every later call fails by its deadline. The threads are daemons: a process
can end although one of them never will.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from prfaas.blockstore.port import StoreFailed

T = TypeVar("T")
Bytes = NDArray[np.uint8]
_STRIPES = 64


class Hands:
    """`store` is the name in errors. Made and used on one event loop."""

    def __init__(self, store: str, threads: int, deadline_s: float) -> None:
        assert threads > 0 and deadline_s > 0
        self._store, self._deadline_s = store, deadline_s
        self._loop = asyncio.get_running_loop()
        self._free = asyncio.Semaphore(threads)
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._threads, self._closed = threads, False
        for number in range(threads):
            threading.Thread(target=self._serve, name=f"{store}-{number}", daemon=True).start()

    async def run(self, stage: str, call: Callable[[], T]) -> T:
        """What `call` returns or raises. Raises StoreFailed at the deadline and when the store is closed."""
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._free.acquire()
                if self._closed:
                    self._free.release()
                    raise StoreFailed(self._store, stage, "it is closed")
                return await self._hand_over(call)
        except TimeoutError:
            raise StoreFailed(self._store, stage, f"not done after {self._deadline_s} s") from None

    async def close(self, last: Callable[[], object]) -> None:
        """Calls under way fail. `last` is called once no thread is at work any more, if that is before the deadline:
        else what it would take away stays."""
        if self._closed:
            return
        self._closed = True
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(StoreFailed(self._store, "go on", "it was closed"))
        with suppress(TimeoutError):
            async with asyncio.timeout(self._deadline_s):
                for _ in range(self._threads):
                    await self._free.acquire()
                await self._hand_over(last)
        for _ in range(self._threads):
            self._calls.put(None)

    async def _hand_over(self, call: Callable[[], T]) -> T:
        """To a thread that is free."""
        result: asyncio.Future[T] = self._loop.create_future()

        def settle(value: T | None, error: BaseException | None) -> None:
            self._free.release()
            if result.done():
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(value)  # type: ignore[arg-type]  # a call without error has its value

        def work() -> None:
            value, error = None, None
            try:
                value = call()
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(settle, value, error)

        self._waiting.add(result)
        try:
            self._calls.put(work)
            return await result
        finally:
            self._waiting.discard(result)

    def _serve(self) -> None:
        while (work := self._calls.get()) is not None:
            work()


class Lent:
    """A caller's memory in the hands of a thread, which copies it whole or, once the caller has it back, not at all.
    Taking it back waits for no more than such a copy."""

    def __init__(self, memory: memoryview) -> None:
        assert memory.format == "B" and memory.contiguous
        self._memory: Bytes = np.asarray(memory)
        self._lock, self._returned = threading.Lock(), False

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    @property
    def returned(self) -> bool:
        return self._returned

    def read(self, into: Bytes) -> bool:
        """Copy it into `into`; False when it has gone back. NumPy copies without the interpreter's lock."""
        with self._lock:
            if not self._returned:
                into[:] = self._memory
            return not self._returned

    def write(self, data: Bytes) -> None:
        """Fill it with `data`, unless it has gone back."""
        with self._lock:
            if not self._returned:
                self._memory[:] = data

    def give_back(self) -> None:
        with self._lock:
            self._returned = True
            self._memory = np.empty(0, np.uint8)


class Turns:
    """Threads that change what is stored under one key take turns; those of other keys seldom meet."""

    def __init__(self) -> None:
        self._locks = tuple(threading.Lock() for _ in range(_STRIPES))

    def at(self, key: bytes) -> threading.Lock:
        return self._locks[crc32c(key) % _STRIPES]
