"""Bytes of one connection to requests, without the connection: `feed` takes bytes as they come and says what they mean.

llhttp does the grammar in its strict mode: it refuses both Content-Length and Transfer-Encoding, repeated lengths, bare
line feeds and folded headers. Added here: limits, HTTP versions, and that offers to upgrade are passed over.

What must hold: the items do not depend on how the bytes were split; memory is bounded by the limits; after a refusal
nothing more is parsed.
"""

from collections.abc import Callable
from enum import Enum, auto
from urllib.parse import unquote

import httptools

from services.router.http.errors import error_response
from services.router.http.limits import Limits
from services.router.http.messages import HttpRequest, Response


class Phase(Enum):
    """IDLE: between requests. HEAD: a request line or headers have begun. BODY: headers are complete. OVER: refused."""

    IDLE = auto()
    HEAD = auto()
    BODY = auto()
    OVER = auto()


class Continue:
    """The client waits for `100 Continue` before it sends its body."""


#: A Response refuses what was sent; the connection ends after it.
Item = HttpRequest | Response | Continue


class RequestParser:
    """One connection's requests. `begun` counts them from 1, so that a caller can tell them apart."""

    def __init__(self, limits: Limits, now: Callable[[], float]) -> None:
        self._limits, self._now = limits, now
        self._parser = httptools.HttpRequestParser(self)
        self._items: list[Item] = []
        self._room = 0
        #: Bytes since the grammar last came to an end of anything: unfinished headers, chunk extensions, trailers.
        self._silent_bytes = 0
        self.phase = Phase.IDLE
        self.begun = 0
        self._reset()

    def feed(self, data: bytes, room: int) -> list[Item]:
        """What `data` completes, in order; at most `room` requests, more are refused."""
        self._items, self._room = [], room
        self._silent_bytes += len(data)
        if self.phase is not Phase.OVER:
            self._parse(data)
        if self.phase is not Phase.OVER and self._silent_bytes > self._limits.max_head_bytes:
            self._refuse(431, "The headers are too large")
        return self._items

    def stop(self) -> None:
        """Parse nothing more."""
        self.phase = Phase.OVER
        self._reset()

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._pass_over_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._silent_bytes = 0
            if self.phase is not Phase.OVER:  # else a callback has refused
                self._refuse(400, f"This is not a valid HTTP request: {error}")

    def _pass_over_upgrade(self, rest: bytes) -> None:
        """Read the same request as if it had not offered to upgrade. A server may ignore the offer, but llhttp treats
        everything after the headers as the other protocol."""
        if self._parser.get_method() == b"CONNECT":
            self._refuse(405, "CONNECT is not supported")
            return
        lines = [b"%s %s HTTP/1.1" % (self._parser.get_method(), self._url)]
        lines += [b"%s: %s" % header for header in self._raw_headers if header[0].lower() != b"upgrade"]
        self._parser = httptools.HttpRequestParser(self)
        self.begun -= 1
        self._parse(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def _reset(self) -> None:
        self._url = b""
        self._raw_headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._body_bytes = 0

    def _refuse(self, status: int, message: str) -> None:
        self.stop()
        self._items.append(error_response(status, message))

    def _stop(self, status: int, message: str) -> None:
        """Refuse from within a callback, where raising is the only way to stop llhttp."""
        self._refuse(status, message)
        raise ValueError(message)

    # What follows is called by httptools.

    def on_message_begin(self) -> None:
        self._reset()
        self.phase = Phase.HEAD
        self.begun += 1
        if self._room == 0:
            self._stop(503, "Too many requests sent ahead on one connection")

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + len(": \r\n"))
        if self.phase is Phase.HEAD:  # else a trailer
            self._raw_headers.append((name, value))
        if len(self._raw_headers) > self._limits.max_headers:
            self._stop(431, "There are too many headers")

    def _count_head(self, size: int) -> None:
        self._silent_bytes = 0
        self._head_bytes += size
        if self._head_bytes > self._limits.max_head_bytes:
            self._stop(431, "The headers are too large")

    def on_headers_complete(self) -> None:
        self._silent_bytes = 0
        if self._parser.should_upgrade():
            return  # `_pass_over_upgrade` comes next
        self._headers = _by_name(self._raw_headers)
        self._check_headers()
        self.phase = Phase.BODY
        if self._parser.get_http_version() == "1.1" and "expect" in self._headers:
            if self._headers["expect"].lower() != "100-continue":
                self._stop(417, "This expectation is not supported")
            self._items.append(Continue())

    def _check_headers(self) -> None:
        if self._parser.get_http_version() not in ("1.0", "1.1"):
            self._stop(505, "Only HTTP/1.0 and HTTP/1.1 are supported")
        if "host" not in self._headers and self._parser.get_http_version() == "1.1":
            self._stop(400, "The Host header is missing")
        if self._headers.get("transfer-encoding", "chunked").lower() != "chunked":
            self._stop(501, "Only the transfer encoding 'chunked' is supported")
        if int(self._headers.get("content-length", "0")) > self._limits.max_body_bytes:
            self._stop(413, f"The body is larger than {self._limits.max_body_bytes} bytes")

    def on_chunk_header(self) -> None:
        self._silent_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._silent_bytes = 0
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.max_body_bytes:
            self._stop(413, f"The body is larger than {self._limits.max_body_bytes} bytes")
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._silent_bytes = 0
        if self._parser.should_upgrade():
            return
        self.phase = Phase.IDLE
        self._room -= 1
        request = HttpRequest(
            method=self._parser.get_method().decode("ascii"),
            path=_path(self._url),
            headers=self._headers,
            body=b"".join(self._body),
            received_s=self._now(),
            http_10=self._parser.get_http_version() == "1.0",
            keep_alive=self._parser.should_keep_alive(),
        )
        self._reset()
        self._items.append(request)


def _by_name(raw_headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for raw_name, raw_value in raw_headers:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _path(url: bytes) -> str:
    """The decoded path of a request target, which may also be a whole address, as sent to a proxy."""
    target = url.decode("latin-1").partition("?")[0]
    scheme, separator, rest = target.partition("://")
    if separator and "/" not in scheme:
        target = "/" + rest.partition("/")[2]
    return unquote(target, errors="replace")
