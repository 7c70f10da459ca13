"""The client of Mooncake Store: its calls, with its codes in our terms.

All block. The library must not be called once it is closed: that would end the process.
"""

import http.client
import importlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from prfaas.blockstore.envelope import MAX_HEAD_BYTES
from prfaas.blockstore.hands import Bytes
from prfaas.blockstore.port import StoreFailed, StoreFull

NAME = "Mooncake Store"
#: Its error codes, as far as they mean something else than a failure.
_NO_ROOM, _NOT_READY, _NOT_THERE, _THERE = -200, -703, -704, -705


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeSettings:
    #: host:port of the master.
    master: str
    #: host:port of the master's admin port (its `metrics_port`), the only place that lists keys. Without it nothing is
    #: recovered at a start, and Mooncake evicts by its own rules; with it objects stay until we delete them.
    admin: str = ""
    #: This machine's address, as other clients reach it.
    host: str
    #: The longest data of an object. Each thread holds a buffer of that size.
    max_object_bytes: int
    #: Memory that this process adds to the cluster's; it goes with the process. 0: clients elsewhere give it all.
    segment_bytes: int = 0
    #: tcp or rdma, and the cards for rdma (empty: all).
    protocol: str = "tcp"
    devices: str = ""
    #: Where clients find each other's addresses. P2PHANDSHAKE: they ask each other.
    metadata: str = "P2PHANDSHAKE"
    #: How many calls go on at once.
    threads: int = 4
    deadline_s: float = 10.0


class MooncakeCalls:
    """Transfers to and from `buffer`s only, which the library knows."""

    def __init__(self, client: Any, as_stored: Any, buffers: int, max_object_bytes: int) -> None:
        self._client, self._as_stored = client, as_stored
        self._buffers: SimpleQueue[Bytes] = SimpleQueue()
        for _ in range(buffers):
            buffer: Bytes = np.empty(MAX_HEAD_BYTES + max_object_bytes, np.uint8)
            _succeed("open", client.register_buffer(buffer.ctypes.data, buffer.nbytes))
            self._buffers.put(buffer)

    @contextmanager
    def buffer(self) -> Iterator[Bytes]:
        """One for each thread: no thread may hold two."""
        buffer = self._buffers.get()
        try:
            yield buffer
        finally:
            self._buffers.put(buffer)

    def write(self, name: str, content: Bytes) -> bool:
        """A new object; False when the name is taken. Raises StoreFull."""
        (code,) = self._client.batch_put_session_start([name], [content.nbytes], self._as_stored)
        if code == _THERE:
            return False
        if code == _NO_ROOM:
            raise StoreFull(NAME, content.nbytes)
        _succeed("put", code)
        (written,) = self._client.batch_put_from_multi_buffer_ranges(
            [name], [[content.ctypes.data]], [[content.nbytes]], [[0]]
        )
        if written != content.nbytes:
            self._client.batch_put_session_revoke([name])
            raise StoreFailed(NAME, "put", f"code {written}")
        _succeed("put", *self._client.batch_put_session_end([name]))
        return True

    def read(self, name: str, into: Bytes) -> int | None:
        """The whole object; how long it is, or None."""
        return _length("get", self._client.get_into(name, into.ctypes.data, into.nbytes))

    def read_start(self, name: str, into: Bytes) -> int:
        """The first bytes of an object that has as many; how many these are: none when it has gone."""
        answers = self._client.get_into_ranges([into.ctypes.data], [[name]], [[[0]]], [[[0]]], [[[into.nbytes]]])
        return _length("get", answers[0][0][0]) or 0

    def size(self, name: str) -> int | None:
        return _length("get", self._client.get_size(name))

    def remove(self, name: str) -> None:
        """Also while somebody's lease from reading it lasts."""
        _length("delete", self._client.remove(name, True))

    def close(self) -> None:
        self._client.close()


def connect(settings: MooncakeSettings) -> MooncakeCalls:
    # Otherwise much that goes well is told on stderr. The library reads it once.
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
    try:
        library = importlib.import_module("mooncake.store")
    except ImportError as error:
        raise StoreFailed(NAME, "open", f"{error} (it comes with the extra `mooncake`)") from error
    _reach(settings)
    client, as_stored = library.MooncakeDistributedStore(), library.ReplicateConfig()
    # Pinned objects go only when we delete them, which takes that we find them again after a restart.
    as_stored.with_hard_pin = bool(settings.admin)
    code = client.setup(
        settings.host,
        settings.metadata,
        settings.segment_bytes,
        0,
        settings.protocol,
        settings.devices,
        settings.master,
    )
    _succeed("open", code)
    return MooncakeCalls(client, as_stored, settings.threads, settings.max_object_bytes)


def _reach(settings: MooncakeSettings) -> None:
    """`setup` looks for a master for more than a minute, and keeps the interpreter to itself all the while."""
    host, _, port = settings.master.rpartition(":")
    try:
        socket.create_connection((host, int(port)), settings.deadline_s).close()
    except (OSError, ValueError) as error:
        raise StoreFailed(NAME, "open", f"no master at {settings.master!r}: {error}") from error


def keys_under(prefix: str, settings: MooncakeSettings) -> list[str]:
    """The names of all objects that begin so, as the master lists them."""
    if not settings.admin:
        return []
    connection = http.client.HTTPConnection(settings.admin, timeout=settings.deadline_s)
    try:
        connection.request("GET", "/get_all_keys")
        with connection.getresponse() as answer:
            if answer.status != http.HTTPStatus.OK:
                raise StoreFailed(NAME, "list", f"{settings.admin} answers {answer.status}")
            return [name for line in answer if (name := line.decode().strip()).startswith(prefix)]
    except (OSError, http.client.HTTPException) as error:
        raise StoreFailed(NAME, "list", f"{settings.admin}: {error}") from error
    finally:
        connection.close()


def _succeed(stage: str, code: int) -> None:
    if code != 0:
        raise StoreFailed(NAME, stage, f"code {code}")


def _length(stage: str, answer: int) -> int | None:
    """What a call says that returns a length; None: nothing is there, or not yet."""
    if answer in (_NOT_THERE, _NOT_READY):
        return None
    if answer < 0:
        raise StoreFailed(NAME, stage, f"code {answer}")
    return answer
