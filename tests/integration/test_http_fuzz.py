"""Whatever bytes come over a socket, however they are cut: the server answers as the parser says, and serves on."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from itertools import pairwise

import httptools
import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.router.http.limits import Limits
from services.router.http.messages import HttpRequest, Response
from services.router.http.parser import Continue, RequestParser
from services.router.http.server import HttpServer

LIVENESS_S = 20.0
LIMITS = Limits(max_head_bytes=2000, max_headers=20, max_body_bytes=2000, linger_s=0.2)


async def handle(request: HttpRequest) -> Response:
    return Response(200, b"%d" % len(request.body), headers=(("x-path", request.path.encode().hex()),))


@pytest.fixture(scope="module", params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """Of a running server, which at the end has complained of nothing and holds nothing."""
    with asyncio.Runner(loop_factory=request.param) as runner:
        loop, complaints = runner.get_loop(), list[object]()
        loop.set_exception_handler(lambda _, complaint: complaints.append(complaint))
        server = HttpServer(handle, LIMITS)
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield asyncio.run_coroutine_threadsafe(server.start("127.0.0.1", 0), loop).result(LIVENESS_S)
            asyncio.run_coroutine_threadsafe(server.drain(LIVENESS_S), loop).result(LIVENESS_S)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
    assert (server.connections, server.counters.body_bytes, complaints) == (0, 0, [])


class Answers:
    """What a strict client makes of the bytes that came."""

    def __init__(self, data: bytes) -> None:
        self.statuses: list[int] = []
        self._parser = httptools.HttpResponseParser(self)
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        if (status := self._parser.get_status_code()) != 100:
            self.statuses.append(status)


def exchange(port: int, pieces: list[bytes]) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=LIVENESS_S) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionError):  # it may have closed already
            for piece in pieces:
                client.sendall(piece)
            client.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while data := client.recv(65536):
                answer += data
        return answer


def expected(data: bytes) -> list[int]:
    statuses = []
    for item in RequestParser(LIMITS, now=lambda: 0.0).feed(data, room=LIMITS.max_pipelined):
        match item:
            case Continue():
                continue
            case Response(status=status):
                statuses.append(status)
            case HttpRequest(keep_alive=keep_alive):
                statuses.append(200)
                if not keep_alive:
                    break
    return statuses


REQUEST_LINES = b"GET / HTTP/1.1", b"POST /a%20b HTTP/1.1", b"PUT http://x/y?z HTTP/1.0"
HEADERS = (
    *(b"Host: x", b"Host: y", b"Content-Length: 3", b"Content-Length: 3000", b"Connection: close", b"X:", b"X\0: \xff"),
    *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip", b"Expect: 100-continue", b"X: a\r\n b"),
    *(b"Connection: upgrade\r\nUpgrade: h2c", b"Connection: keep-alive"),
)
CHUNKS = b"3\r\nabc", b"0\r\n", b"0", b"ffffffffffffffff", b"3;a=b", b"-1"
WHOLE = (
    b"GET /whole HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /whole HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc",
    b"POST /whole HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
)
LINES = st.sampled_from(
    [
        *(line + b"\r\n" for line in (*REQUEST_LINES, *HEADERS, *CHUNKS, b"")),
        *(b"\n", b"\r", b"abc", b"X" * 700, *WHOLE),
    ]
)


@given(
    parts=st.lists(st.one_of(LINES, LINES, LINES, st.binary(max_size=30)), max_size=14),
    cuts=st.lists(st.integers(0, 3000), max_size=6),
)
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_answered_as_they_are_parsed(port: int, parts: list[bytes], cuts: list[int]):
    """In order, each request once, with at most one refusal at the end. The next connection is served as ever."""
    data = b"".join(parts)
    borders = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in pairwise(borders)]
    assert Answers(exchange(port, pieces)).statuses == expected(data)
    assert Answers(exchange(port, [b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"])).statuses == [200]
