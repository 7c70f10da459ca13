"""The sending half of a connection: responses out, no faster than the client reads them."""

import asyncio
from contextlib import aclosing

from services.router.http.messages import HttpRequest, Response, StreamingResponse, encode_head

#: What precedes a chunk of so many bytes.
_KNOWN_SIZES = 1024
_SIZES = tuple(b"%x\r\n" % size for size in range(_KNOWN_SIZES))


class SlowReader(Exception):
    """The client has read nothing for too long."""


class ResponseWriter:
    """Used by one task at a time. `pause` and `resume` come from the transport."""

    __slots__ = ("_room", "_timeout_s", "_transport", "has_room")

    def __init__(self, transport: asyncio.Transport, timeout_s: float) -> None:
        self._transport, self._timeout_s = transport, timeout_s
        self._room = asyncio.Event()
        self._room.set()
        self.has_room = True

    def pause(self) -> None:
        self._room.clear()
        self.has_room = False

    def resume(self) -> None:
        self._room.set()
        self.has_room = True

    def refuse(self, response: Response) -> None:
        self._transport.write(encode_head(response, None, keep_alive=False) + response.body)

    def go_ahead(self) -> None:
        self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def send(self, request: HttpRequest, response: Response | StreamingResponse, *, keep_alive: bool) -> None:
        head = encode_head(response, request, keep_alive=keep_alive)
        match response:
            case Response():
                self._transport.write(head if request.method == "HEAD" else head + response.body)
                await self._wait_for_room()
            case StreamingResponse():
                await self._stream(head, response, chunked=not request.http_10)

    def put(self, before: bytes, text: bytes, after: bytes) -> None:
        """One more chunk of the stream that is being sent."""
        size = len(before) + len(text) + len(after)
        head = _SIZES[size] if size < _KNOWN_SIZES else b"%x\r\n" % size
        self._transport.write(b"".join((head, before, text, after, b"\r\n")))

    async def _stream(self, head: bytes, response: StreamingResponse, *, chunked: bool) -> None:
        """The head leaves with the first chunk, in one packet."""
        async with aclosing(response.chunks) as chunks:
            async for chunk in chunks:
                if chunk:
                    self._transport.write(head + (_chunk(chunk) if chunked else chunk))
                    if head and chunked and response.opened is not None:
                        response.opened(self)
                    head = b""
                    await self._wait_for_room()
        self._transport.write(head + (b"0\r\n\r\n" if chunked else b""))
        await self._wait_for_room()

    async def _wait_for_room(self) -> None:
        if self._room.is_set():
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._room.wait()
        except TimeoutError:
            raise SlowReader from None


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
