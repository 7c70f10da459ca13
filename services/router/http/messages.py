"""Requests and responses as handlers see them: parsed, complete, and without a socket."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus

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


@dataclass(frozen=True, slots=True)
class StreamingResponse:
    """A response whose body is made while it is sent. Each chunk is written as soon as it is yielded; the generator is
    resumed when there is room for more, and is always closed, also when the client leaves."""

    chunks: AsyncGenerator[bytes, None]
    content_type: str
    status: int = 200
    headers: Headers = ()

    def with_header(self, name: str, value: str) -> "StreamingResponse":
        return replace(self, headers=(*self.headers, (name, value)))


#: Answers one request. It is cancelled when the client leaves. What it raises becomes a 500.
Handle = Callable[[HttpRequest], Awaitable[Response | StreamingResponse]]


def encode_head(response: Response | StreamingResponse, request: HttpRequest | None, *, keep_alive: bool) -> bytes:
    """Status line and headers. A stream is chunked, or ends with the connection for an HTTP/1.0 client."""
    lines = [f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}"]
    lines.append(f"content-type: {response.content_type}")
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
