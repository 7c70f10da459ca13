"""The connector's end of the bridge: one connection after another, if the server is to outlive its worker.

A server that a worker of ours starts ends with it, and so has one connection. One that somebody else starts serves
without a worker, and takes the next one that comes; what a worker was granted ends with its connection.
"""

import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from prfaas.engine.vllm.bridge import Hello, News, Order
from prfaas.ipc import Channel

#: Long enough for an engine process that has been started a moment before.
CONNECT_S = 60.0
#: Between two looks for a worker.
PAUSE_S = 0.5
#: A worker that reads nothing for so long is gone, for a server that has others to serve.
STALLED_S = 10.0


@dataclass(frozen=True, slots=True)
class Memory:
    """A worker's pool and its shelf, as bytes. The shelf's offsets go on where the pool ends."""

    pool: torch.Tensor
    shelf: torch.Tensor

    def at(self, offset: int, nbytes: int) -> torch.Tensor:
        pool_bytes = self.pool.numel()
        if offset < pool_bytes:
            return self.pool[offset : offset + nbytes]
        return self.shelf[offset - pool_bytes : offset - pool_bytes + nbytes]


class Line:
    """`came` is called with a worker's memory before its first order, `take` with each order, and `left` when it is
    gone; all on one thread."""

    def __init__(
        self,
        bridge: str,
        hello: Hello,
        came: Callable[[Memory], None],
        take: Callable[[Order], None],
        left: Callable[[], None],
        *,
        stays: bool,
    ) -> None:
        """Without `stays` it returns when the worker is there. Raises OSError when that does not come."""
        self._bridge, self._hello, self._stays = bridge, hello, stays
        self._came, self._take, self._left = came, take, left
        self._channel: Channel[Order] | None = None
        first = None if stays else self._connected()
        threading.Thread(target=self._run, args=(first,), name="prfaas bridge", daemon=True).start()

    def tell(self, news: News) -> None:
        """Without a worker there is nobody to tell."""
        channel = self._channel
        if channel is None:
            return
        try:
            channel.send(news)
        except OSError:
            # The thread that takes orders is to see it as well; half of a message may have gone.
            channel.shut()

    def _run(self, channel: Channel[Order] | None) -> None:
        while True:
            try:
                channel = channel or self._connected()
                self._serve(channel)
            except (OSError, ValueError, msgspec.MsgspecError):
                pass  # a worker of another version, too, is gone with what it says
            self._channel = None
            self._left()
            if channel is not None:
                channel.close()
                channel = None
            if not self._stays:
                return
            time.sleep(PAUSE_S)

    def _connected(self) -> Channel[Order]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(CONNECT_S)
            sock.connect(self._bridge)
            channel = Channel[Order](sock, Order)
            channel.send(self._hello)
            self._came(_memory_from(sock))
            sock.settimeout(None)
            if self._stays:
                limit = struct.pack("@ll", int(STALLED_S), int(STALLED_S % 1 * 1e6))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        except BaseException:
            sock.close()
            raise
        self._channel = channel
        return channel

    def _serve(self, channel: Channel[Order]) -> None:
        while (orders := channel.receive()) is not None:
            for order in orders:
                self._take(order)


def _memory_from(sock: socket.socket) -> Memory:
    _, descriptors, _, _ = socket.recv_fds(sock, 1, 2)
    if len(descriptors) != 2:
        raise OSError("the worker gave no memory")
    pool, shelf = (_mapped(descriptor) for descriptor in descriptors)
    return Memory(pool, shelf)


def _mapped(descriptor: int) -> torch.Tensor:
    try:
        return torch.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size), dtype=torch.uint8)
    finally:
        os.close(descriptor)
