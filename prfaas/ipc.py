"""Framed messages between the processes of one worker: 4 bytes of little-endian length, then msgpack.

`Channel` is for a process that blocks (engine, pump), `AsyncChannel` for the node's event loop. Both ends trust each
other, yet a frame is bounded so that a torn stream is noticed instead of allocated.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from typing import Any, Generic, Self, TypeVar

import msgspec

MAX_FRAME_BYTES = 64 << 20

In = TypeVar("In")
_LENGTH = struct.Struct("<I")


class Channel(Generic[In]):
    """A blocking end. `send` may be called from any thread, `receive` from one."""

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        self._sock = sock
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: msgspec.Struct) -> None:
        """Raises OSError when the other end is gone."""
        body = self._encoder.encode(message)
        with self._lock:
            self._sock.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self, timeout_s: float | None = None) -> list[In] | None:
        """All messages that are there, waiting up to `timeout_s` (None: without end) for the first; [] on time-out,
        None once the other end has closed."""
        self._sock.settimeout(timeout_s)
        while not (messages := self._split()):
            try:
                data = self._sock.recv(1 << 20)
            except (TimeoutError, BlockingIOError):
                return []
            if not data:
                return None
            self._buffer += data
        return messages

    def _split(self) -> list[In]:
        messages, position = [], 0
        while len(self._buffer) - position >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, position)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {length} bytes")
            end = position + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(self._decoder.decode(bytes(self._buffer[position + _LENGTH.size : end])))
            position = end
        del self._buffer[:position]
        return messages

    def shut(self) -> None:
        """Nothing more comes or goes; whoever waits in `receive` sees that. From any thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


class AsyncChannel(Generic[In]):
    """The event loop's end. `send` never waits: the peers are our own children and what is in flight is bounded by
    admission."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, incoming: Any) -> None:
        self._reader, self._writer = reader, writer
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    async def over(cls, sock: socket.socket, incoming: Any) -> Self:
        reader, writer = await asyncio.open_unix_connection(sock=sock, limit=1 << 22)
        return cls(reader, writer, incoming)

    def send(self, message: msgspec.Struct) -> None:
        body = self._encoder.encode(message)
        self._writer.write(_LENGTH.pack(len(body)) + body)

    async def receive(self) -> In | None:
        """The next message, or None once the other end has closed."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {length} bytes")
            return self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        self._writer.close()
