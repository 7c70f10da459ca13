"""How the threads of a pump talk: a queue with a file descriptor, so that one poll waits for it and for a socket.

What is in a mailbox is bounded by its protocol: a lane says a fixed number of things, and one per part it was granted.
"""

import contextlib
import os
import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Any thread puts, one takes. Things put after the mailbox was closed are dropped: nobody is there to read them."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        #: A closed descriptor's number is soon another file's: no write may race with the close.
        self._lock = threading.Lock()
        self._closed = False

    def fileno(self) -> int:
        return self._fd

    def put(self, item: T, *, wake: bool = True) -> None:
        """Without `wake` it is read with whatever comes next."""
        self._items.append(item)
        if wake:
            self.wake()

    def wake(self) -> None:
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._fd, 1)

    def take(self) -> list[T]:
        """All there is, in order. The mark is cleared first, so that nothing put meanwhile is slept on."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._fd)
