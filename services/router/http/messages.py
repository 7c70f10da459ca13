"""Requests and responses as handlers see them: parsed, complete, and without a socket."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Protocol

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """A whole request. `headers` have lower-case names; repeated ones are joined with commas.

    `received_s` is the monotonic time at which its last byte was parsed; time to first token counts from there.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""
    received_s: float
    http_10: bool = False
    keep_alive: bool = True


@dataclass(frozen=True, slots=True)
class Response:
    """A response with a known body."""

    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: Headers = ()

    def with_header(self, name: str, value: str) -> "Response":
        return replace(self, headers=(*self.headers, (name, value)))


class Outlet(Protocol):
    """The socket of a stream, for who has something to send between two chunks and does not wait."""

    @property
    def has_room(self) -> bool:
        """Whether the client has read enough of what was sent."""
        ...

    def put(self, before: bytes, text: bytes, after: bytes) -> None:
        """One more chunk of the stream, which is these three in a row."""
        ...


@dataclass(frozen=True, slots=True)
class StreamingResponse:
    """A response whose body is made while it is sent. Each chunk is written as soon as it is yielded; the generator is
    resumed when there is room for more, and is always closed, also when the client leaves. `opened` is told of the
    socket when the first chunk is on its way."""

    chunks: AsyncGenerator[bytes, None]
    content_type: str
    status: int = 200
    headers: Headers = ()
    opened: Callable[[Outlet], None] | None = None

    def with_header(self, name: str, value: str) -> "StreamingResponse":
        return replace(self, headers=(*self.headers, (name, value)))


#: Whether a request will be refused whatever its body is. Its body is empty still.
ByHead = Callable[[HttpRequest], bool]

#: Answers one request. It is cancelled when the client leaves. What it raises becomes a 500.
Handle = Callable[[HttpRequest], Awaitable[Response | StreamingResponse]]


def encode_head(response: Response | StreamingResponse, request: HttpRequest | None, *, keep_alive: bool) -> bytes:
    """Status line and headers. A stream is chunked, or ends with the connection for an HTTP/1.0 client."""
    lines = [_start(response.status, int(time.time())), f"content-type: {response.content_type}"]
    if isinstance(response, Response):
        lines.append(f"content-length: {len(response.body)}")
    elif request is not None and not request.http_10:
        lines.append("transfer-encoding: chunked")
    if not keep_alive:
        lines.append("connection: close")
    elif request is not None and request.http_10:
        lines.append("connection: keep-alive")
    lines.extend(f"{name}: {value}" for name, value in response.headers)
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


@lru_cache(maxsize=64)
def _start(status: int, second: int) -> str:
    """Status line and date, which are the same for a second."""
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ndate: {formatdate(second, usegmt=True)}"
