"""Streams of tokens from a vLLM server's OpenAI API, over its Unix socket or over TCP.

Every request has a connection of its own: to close it is how a request is aborted.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from prfaas.engine.vllm.scores import Logprobs

#: Longest event of a stream, in bytes; one holds a few tokens.
MAX_EVENT_BYTES = 1 << 20
#: Longest answer in one piece: counters, or where the blocks of the longest prompts are.
MAX_ANSWER_BYTES = 16 << 20

#: A Unix socket, or host and port.
Address = Path | tuple[str, int]


class ServerError(Exception):
    """The server refused a request, or broke off its answer."""


class Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class PromptTokens(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """What the server says of the whole request, at its end. `cached_tokens` are all that it did not compute, those
    that its connector loaded included."""

    prompt_tokens: int = 0
    prompt_tokens_details: PromptTokens | None = None

    @property
    def cached_tokens(self) -> int | None:
        """None from a server that was not started with --enable-prompt-tokens-details."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details is not None else None


class Event(msgspec.Struct):
    """One event of the stream; `error` has what the server says of its own failure."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_event = msgspec.json.Decoder(Event)
_encode = msgspec.json.encode


def address_of(text: str) -> Address:
    """`/path/of/a/socket` or `http://host:port`. Raises ValueError."""
    if text.startswith("/"):
        return Path(text)
    url = urlsplit(text)
    if url.scheme != "http" or not url.hostname or url.path not in ("", "/"):
        raise ValueError(f"{text!r} is neither http://host:port nor the path of a socket")
    return url.hostname, url.port or 80


async def complete(api: Address, body: dict[str, Any]) -> AsyncIterator[Choice | Usage]:
    """POST /v1/completions as a stream, the usage last. Raises ServerError, OSError."""
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with _connection(api) as (reader, writer):
        writer.write(_request("POST", "/v1/completions", _encode(body)))
        answer, pending = _Answer(), b""
        while not answer.complete:
            data = await reader.read(1 << 16)
            if not data:
                raise ServerError("the server closed the connection")
            answer.feed(data)
            if answer.status not in (0, 200):
                if answer.nbytes > MAX_EVENT_BYTES:
                    break
                continue
            pending += answer.take()
            *events, pending = pending.split(b"\n\n")
            if len(pending) > MAX_EVENT_BYTES:
                raise ServerError("an event has no end")
            for event in events:
                text = event.removeprefix(b"data: ")
                if text == b"[DONE]":
                    return
                decoded = _event.decode(text)
                if decoded.error is not None:
                    raise ServerError(str(decoded.error))
                for choice in decoded.choices:
                    yield choice
                if decoded.usage is not None:
                    yield decoded.usage
        raise ServerError(f"status {answer.status}: {answer.take()[:500]!r}")


async def answered(api: Address, body: dict[str, Any]) -> bytes:
    """POST /v1/completions in one piece: the JSON of the whole answer. Raises ServerError, OSError."""
    return await _whole(api, _request("POST", "/v1/completions", _encode(body)))


async def get(api: Address, path: str) -> bytes:
    """The body of a page. Raises ServerError, OSError."""
    return await _whole(api, _request("GET", path, b""))


async def _whole(api: Address, request: bytes) -> bytes:
    async with _connection(api) as (reader, writer):
        writer.write(request)
        answer = _Answer()
        while not answer.complete:
            data = await reader.read(1 << 16)
            if not data:
                raise ServerError("the server closed the connection")
            answer.feed(data)
            if answer.nbytes > MAX_ANSWER_BYTES:
                raise ServerError("an answer has no end")
        if answer.status != 200:
            raise ServerError(f"status {answer.status}: {answer.take()[:500]!r}")
        return answer.take()


class _Answer:
    """Callbacks of the parser."""

    def __init__(self) -> None:
        self.status, self.complete = 0, False
        self._body = bytearray()
        self._parser = httptools.HttpResponseParser(self)

    @property
    def nbytes(self) -> int:
        """Of the body, that wait to be taken."""
        return len(self._body)

    def feed(self, data: bytes) -> None:
        """Raises ServerError for what is no HTTP."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ServerError(f"no HTTP: {error}") from error
        self.status = self._parser.get_status_code()

    def take(self) -> bytes:
        body, self._body = bytes(self._body), bytearray()
        return body

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self.complete = True


@asynccontextmanager
async def _connection(api: Address) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    if isinstance(api, Path):
        reader, writer = await asyncio.open_unix_connection(api)
    else:
        reader, writer = await asyncio.open_connection(*api)
    try:
        yield reader, writer
    finally:
        writer.close()


def _request(method: str, path: str, body: bytes) -> bytes:
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: vllm\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    return f"{head}\r\n".encode() + body
