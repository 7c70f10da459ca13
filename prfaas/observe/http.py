"""A small HTTP listener for `/metrics`, `/live` and `/ready` of processes that serve no other HTTP.

Every answer is made on the spot by a function that must not wait, and the connection is closed after it. Heads,
connections and reading time are bounded, since scrapers and probes are not the only ones who may connect.
"""

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus

#: Answers with status, content type and body.
TextRoute = Callable[[], tuple[int, str, bytes]]

MAX_HEAD_BYTES = 8 << 10
MAX_CONNECTIONS = 64
EXCHANGE_S = 5.0

TEXT = "text/plain; charset=utf-8"


async def serve_text(host: str, port: int, routes: Mapping[str, TextRoute]) -> asyncio.Server:
    """Listen and answer GET and HEAD of exactly these paths until the returned server is closed."""
    connections = 0

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        try:
            if connections <= MAX_CONNECTIONS:
                async with asyncio.timeout(EXCHANGE_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(_answer(head, routes))
                    await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, ConnectionError):
            pass  # a visitor that does not speak in time, in bounds or to the end gets no answer
        finally:
            connections -= 1
            writer.close()

    return await asyncio.start_server(accept, host, port, limit=MAX_HEAD_BYTES)


def _answer(head: bytes, routes: Mapping[str, TextRoute]) -> bytes:
    method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
    route = routes.get(rest.partition(" ")[0].partition("?")[0])
    if method not in ("GET", "HEAD"):
        status, kind, body = 405, TEXT, b"only GET and HEAD\n"
    elif route is None:
        status, kind, body = 404, TEXT, b"not here\n"
    else:
        status, kind, body = route()
    start = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return start.encode("latin-1") + (b"" if method == "HEAD" else body)
