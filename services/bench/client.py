"""HTTP/1.1 for the load generator: POST a body, get each event of the answer's stream the moment it arrives.

Connections are kept and used again. A kept connection that the server has closed meanwhile is replaced, once, and only
if nothing of an answer had come on it.
"""

import asyncio
import ssl
import urllib.parse
from collections.abc import Callable
from http import HTTPStatus

import httptools

READ_BYTES = 1 << 16
#: Of an error's body, what is read.
MAX_ERROR_BYTES = 1 << 16
#: A stream that has gone on for so long without the end of a line is none of events.
MAX_LINE_BYTES = 16 << 20
_DATA = b"data:"


class BadAnswer(Exception):
    """An answer that is not the stream that was asked for. `kind` is a short name to count by."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


class _Answer:
    """What httptools calls while it parses."""

    def __init__(self, on_event: Callable[[bytes], None]) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.complete, self.begun = False, False
        self.error_body = bytearray()
        self._on_event, self._rest = on_event, bytearray()
        self._headers_came, self._has_length = False, False

    @property
    def ends_with_connection(self) -> bool:
        """It came without another word on where it ends."""
        return self._headers_came and not self._has_length

    @property
    def unfinished_bytes(self) -> int:
        return len(self._rest)

    def on_message_begin(self) -> None:
        self.begun, self._headers_came, self._has_length = True, False, False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_length |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._headers_came = True

    def on_body(self, body: bytes) -> None:
        if self.parser.get_status_code() != HTTPStatus.OK:
            self.error_body += body[: MAX_ERROR_BYTES - len(self.error_body)]
            return
        self._rest += body
        if b"\n" not in body:
            return
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                self._on_event(bytes(line[len(_DATA) :].strip()))

    def on_message_complete(self) -> None:
        """Of an answer like 100 (Continue) too, after which the one that counts is yet to come."""
        self.complete = self.parser.get_status_code() >= HTTPStatus.OK


class Connections:
    """To one server. `close` closes those that are kept."""

    def __init__(self, endpoint: str, key: str) -> None:
        parts = urllib.parse.urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{endpoint} is no http or https URL")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        self._head = f"Host: {parts.netloc.rpartition('@')[2]}\r\nContent-Type: application/json\r\n{authorization}"
        self._kept: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, path: str, body: bytes, on_event: Callable[[bytes], None]) -> None:
        """`on_event` gets what follows `data:`. Raises BadAnswer, OSError."""
        head = f"POST {self._base}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n".encode()
        answer = _Answer(on_event)
        if self._kept:
            try:
                await self._exchange(*self._kept.pop(), head + body, answer)
                return
            except OSError:
                if answer.begun:
                    raise
            answer = _Answer(on_event)
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        await self._exchange(reader, writer, head + body, answer)

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, answer: _Answer
    ) -> None:
        keep = False
        try:
            writer.write(request)
            await writer.drain()
            while not answer.complete:
                if not (piece := await reader.read(READ_BYTES)):
                    if answer.ends_with_connection:
                        break
                    raise ConnectionResetError("the server closed the connection")
                answer.parser.feed_data(piece)
                if answer.unfinished_bytes > MAX_LINE_BYTES:
                    raise BadAnswer("protocol", f"a line of more than {MAX_LINE_BYTES >> 20} MiB")
            keep = answer.complete and answer.parser.should_keep_alive()
        except httptools.HttpParserError as error:
            raise BadAnswer("protocol", repr(error)) from error
        finally:
            if keep:
                self._kept.append((reader, writer))
            else:
                writer.close()
        if (status := answer.parser.get_status_code()) != HTTPStatus.OK:
            raise BadAnswer(str(status), answer.error_body.decode(errors="replace"))

    def close(self) -> None:
        while self._kept:
            self._kept.pop()[1].close()
