"""The small listener answers scrapers and probes, and nothing else."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from prfaas.observe import http
from prfaas.observe.http import TEXT, serve_text

ready = True


@pytest.fixture
async def port() -> AsyncIterator[int]:
    routes = {
        "/metrics": lambda: (200, TEXT, b"a 1\n"),
        "/ready": lambda: (200, TEXT, b"ok\n") if ready else (503, TEXT, b"draining\n"),
    }
    server = await serve_text("127.0.0.1", 0, routes, {"/rate": lambda query: (200, TEXT, query.encode())})
    yield server.sockets[0].getsockname()[1]
    server.close()


async def exchange(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_a_route_is_asked_at_each_request(port: int, monkeypatch: pytest.MonkeyPatch):
    """Readiness is what holds now, not what held when the listener started."""
    assert (await exchange(port, b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
    monkeypatch.setitem(globals(), "ready", False)
    answer = await exchange(port, b"GET /ready?verbose=1 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert answer.endswith(b"\r\n\r\ndraining\n")


async def test_head_has_the_length_and_no_body(port: int):
    """HEAD answers as GET would, without the body."""
    answer = await exchange(port, b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"Content-Length: 4\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("request_line", "status"), [(b"GET /etc/passwd", b"404"), (b"POST /metrics", b"405"), (b"\xff\xfe", b"405")]
)
async def test_anything_else_is_refused(port: int, request_line: bytes, status: bytes):
    """Only GET and HEAD of the paths that were given."""
    assert (await exchange(port, request_line + b" HTTP/1.1\r\n\r\n")).split(b" ")[1] == status


async def test_a_command_is_a_post_with_its_arguments_in_the_query(port: int):
    """And is not to be had with GET, which scrapers and browsers send unasked."""
    answer = await exchange(port, b"POST /rate?mbit=5 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"\r\n\r\nmbit=5")
    assert (await exchange(port, b"GET /rate?mbit=5 HTTP/1.1\r\n\r\n")).split(b" ")[1] == b"404"


async def test_an_endless_head_is_not_collected(port: int):
    """A head beyond the bound ends the connection without an answer."""
    assert await exchange(port, b"GET /metrics HTTP/1.1\r\nX: " + b"y" * (64 << 10)) == b""


async def test_a_silent_visitor_is_sent_away(port: int, monkeypatch: pytest.MonkeyPatch):
    """A connection that asks nothing is closed after a bounded time, so that it cannot hold a place for ever."""
    monkeypatch.setattr(http, "EXCHANGE_S", 0.05)
    assert await exchange(port, b"") == b""
