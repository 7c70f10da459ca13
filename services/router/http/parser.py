"""Bytes of one connection to requests, without the connection: `feed` takes bytes as they come and says what they mean.

llhttp does the grammar in its strict mode: it refuses both Content-Length and Transfer-Encoding, repeated lengths, bare
line feeds and folded headers. Added here: limits, HTTP versions, what else a proxy before us could read in another way
(several hosts, codings other than `chunked`, any in HTTP/1.0), and that offers to upgrade are passed over.

What must hold: the items do not depend on how the bytes were split; memory is bounded by the limits; after a refusal
nothing more is parsed.
"""

import re
from collections.abc import Callable
from enum import Enum, auto
from urllib.parse import unquote

import httptools

from services.router.http.errors import error_response
from services.router.http.limits import Limits
from services.router.http.messages import ByHead, HttpRequest, Response

#: A body in chunks of one byte each has five others around every byte.
CHUNKING = 8


class Phase(Enum):
    """IDLE: between requests. HEAD: a request line or headers have begun. BODY: headers are complete. OVER: refused."""

    IDLE = auto()
    HEAD = auto()
    BODY = auto()
    OVER = auto()


class Continue:
    """The client waits for `100 Continue` before it sends its body."""


#: A host with or without a port; not two of them.
HOST = re.compile(r"[A-Za-z0-9._~!$&'()*+;=%:\[\]-]*")

#: A Response refuses what was sent; the connection ends after it.
Item = HttpRequest | Response | Continue


class RequestParser:
    """One connection's requests. `begun` counts them from 1, so that a caller can tell them apart."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_by_head",
        "_chunking_bytes",
        "_head_bytes",
        "_headers",
        "_http_10",
        "_items",
        "_limits",
        "_now",
        "_parser",
        "_raw_headers",
        "_room",
        "_silent_bytes",
        "_take_room",
        "_url",
        "begun",
        "phase",
    )

    def __init__(
        self,
        limits: Limits,
        now: Callable[[], float],
        take_room: Callable[[int], bool] = lambda size: True,
        by_head: ByHead = lambda head: False,
    ) -> None:
        """`take_room` says whether there is room for so many more bytes of a body, which then are taken. A request with
        a long body, or one of unknown length, is complete with its headers if it can be answered `by_head`; it is the
        last one then."""
        self._limits, self._now, self._take_room, self._by_head = limits, now, take_room, by_head
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
        begun, body_bytes = self.begun, self._body_bytes
        if self.phase is not Phase.OVER:
            self._parse(data)
        if self.phase is Phase.BODY and self.begun == begun:
            self._chunking_bytes += len(data) - (self._body_bytes - body_bytes)
        if self.phase is not Phase.OVER and self._wordy():
            self._refuse(431, "The headers are too large")
        return self._items

    def _wordy(self) -> bool:
        """More is said about the request than is allowed, be it in silence or around a body in chunks."""
        room = self._limits.max_head_bytes
        return self._silent_bytes > room or self._chunking_bytes > room + CHUNKING * self._body_bytes

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
        self._http_10 = False
        #: In one piece, however it comes: pieces would take more, and be in the way of each other when they are freed.
        self._body: bytes | bytearray = b""
        self._body_bytes = self._chunking_bytes = 0

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
        if self._takes_much() and self._by_head(head := self._request(b"", keep_alive=False)):
            self.stop()
            self._items.append(head)
            raise ValueError("answered by its head")
        if not self._http_10 and "expect" in self._headers:
            if self._headers["expect"].lower() != "100-continue":
                self._stop(417, "This expectation is not supported")
            self._items.append(Continue())

    def _check_headers(self) -> None:
        headers, version = self._headers, self._parser.get_http_version()
        self._http_10 = version == "1.0"
        if not self._http_10 and version != "1.1":
            self._stop(505, "Only HTTP/1.0 and HTTP/1.1 are supported")
        host = headers.get("host")
        if host is None and not self._http_10:
            self._stop(400, "The Host header is missing")
        if host and not HOST.fullmatch(host):
            self._stop(400, "The Host header does not name one host")
        if "transfer-encoding" in headers:
            if self._http_10:
                self._stop(400, "HTTP/1.0 has no transfer encodings")
            if headers["transfer-encoding"].lower() != "chunked":
                self._stop(501, "Only the transfer encoding 'chunked' is supported")
        elif int(headers.get("content-length", "0")) > self._limits.max_body_bytes:
            self._stop(413, f"The body is larger than {self._limits.max_body_bytes} bytes")

    def _takes_much(self) -> bool:
        """More room for its body, or more time, than a client that nobody knows should be given."""
        headers = self._headers
        open_end = "transfer-encoding" in headers or "expect" in headers
        return open_end or int(headers.get("content-length", "0")) > self._limits.max_head_bytes

    def _request(self, body: bytes, *, keep_alive: bool) -> HttpRequest:
        return HttpRequest(
            method=self._parser.get_method().decode("ascii"),
            path=_path(self._url),
            headers=self._headers,
            body=body,
            received_s=self._now(),
            http_10=self._http_10,
            keep_alive=keep_alive,
        )

    def on_chunk_header(self) -> None:
        self._silent_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._silent_bytes = 0
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.max_body_bytes:
            self._stop(413, f"The body is larger than {self._limits.max_body_bytes} bytes")
        if not self._take_room(len(body)):
            self._stop(503, "There is no room for more request bodies now")
        if not self._body:
            self._body = body
        elif isinstance(self._body, bytearray):
            self._body += body
        else:
            self._body = bytearray(self._body) + body

    def on_message_complete(self) -> None:
        self._silent_bytes = 0
        if self._parser.should_upgrade():
            return
        self.phase = Phase.IDLE
        self._room -= 1
        request = self._request(bytes(self._body), keep_alive=self._parser.should_keep_alive())
        self._reset()
        self._items.append(request)


def _by_name(raw_headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for raw_name, raw_value in raw_headers:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1").strip(" \t")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _path(url: bytes) -> str:
    """The decoded path of a request target, which may also be a whole address, as sent to a proxy."""
    target = url.decode("latin-1").partition("?")[0]
    scheme, separator, rest = target.partition("://")
    if separator and "/" not in scheme:
        target = "/" + rest.partition("/")[2]
    return unquote(target, errors="replace")
