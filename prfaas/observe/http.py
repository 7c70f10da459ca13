"""A small HTTP listener for `/metrics`, `/live` and `/ready` of processes that serve no other HTTP.

A command is a POST to a path with its arguments in the query.

Every answer is made on the spot by a function that must not wait, and the connection is closed after it. Heads,
connections and reading time are bounded, since scrapers and probes are not the only ones who may connect.
"""

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus
from types import MappingProxyType

#: Answers with status, content type and body.
TextRoute = Callable[[], tuple[int, str, bytes]]
#: The same for a command, which is given its query string.
TextCommand = Callable[[str], tuple[int, str, bytes]]

MAX_HEAD_BYTES = 8 << 10
MAX_CONNECTIONS = 64
EXCHANGE_S = 5.0

TEXT = "text/plain; charset=utf-8"


NO_COMMANDS: Mapping[str, TextCommand] = MappingProxyType({})


async def serve_text(
    host: str, port: int, routes: Mapping[str, TextRoute], commands: Mapping[str, TextCommand] = NO_COMMANDS
) -> asyncio.Server:
    """Listen and answer GET and HEAD of exactly these paths, and POST of the commands, until the returned server is
    closed."""
    connections = 0

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        try:
            if connections <= MAX_CONNECTIONS:
                async with asyncio.timeout(EXCHANGE_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(_answer(head, routes, commands))
                    await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, ConnectionError):
            pass  # a visitor that does not speak in time, in bounds or to the end gets no answer
        finally:
            connections -= 1
            writer.close()

    return await asyncio.start_server(accept, host, port, limit=MAX_HEAD_BYTES)


def _answer(head: bytes, routes: Mapping[str, TextRoute], commands: Mapping[str, TextCommand]) -> bytes:
    method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
    path, _, query = rest.partition(" ")[0].partition("?")
    route, command = routes.get(path), commands.get(path)
    if method == "POST" and command is not None:
        status, kind, body = command(query)
    elif method not in ("GET", "HEAD"):
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
