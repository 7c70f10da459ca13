"""What the command line needs of HTTP: fetch a page, and ask the OpenAI endpoint while its answer streams."""

import http.client
import json
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 120.0
#: Larger answers than any of ours.
MAX_ANSWER_BYTES = 64 << 20
_READ_BYTES = 1 << 16


def fetch(url: str) -> tuple[int, str]:
    """Status and body of a GET. Raises OSError."""
    return ask("GET", url)


def ask(method: str, url: str, *, key: str = "", body: Any = None, timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
    """Status and body of a request, with a JSON body and a bearer key where given. Raises OSError, also where the whole
    answer takes longer or is larger than any should be."""
    parts = urllib.parse.urlsplit(url)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    end_s = time.monotonic() + timeout_s
    with _connection(url, timeout_s) as connection:
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        connection.request(method, target, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, _whole(response, end_s).decode(errors="replace")


def error_message(answer: Any, status: int) -> str:
    """What an answer in JSON says of why it is not the one that was asked for."""
    match answer:
        case {"error": {"message": str(message)}}:
            return message
        case _:
            return f"it answers {status}"


def _whole(response: http.client.HTTPResponse, end_s: float) -> bytes:
    """The socket's timeout is for each read: a server that drips would be read for ever."""
    body = bytearray()
    while piece := response.read1(_READ_BYTES):
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise OSError(f"its answer is larger than {MAX_ANSWER_BYTES >> 20} MiB")
        if time.monotonic() > end_s:
            raise TimeoutError("timed out in the middle of an answer")
    return bytes(body)


@dataclass(slots=True)
class Answer:
    """A streamed chat answer. `receipt` is there once the stream has ended."""

    pieces: list[str] = field(default_factory=list)
    receipt: Mapping[str, Any] = field(default_factory=dict)
    usage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class AnswerFailed(Exception):
    """The endpoint answered with an error."""


def chat(
    endpoint: str, model: str, prompt: str, max_tokens: int, *, key: str = "", timeout_s: float = TIMEOUT_S
) -> Iterator[Answer]:
    """Ask, greedy, with a receipt; yields the growing answer at each piece, and once more when it is whole. The
    endpoint may be silent for `timeout_s`."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with _connection(endpoint, timeout_s) as connection:
        headers = {"Content-Type": "application/json", "x-prfaas-receipt": "1"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise AnswerFailed(response.read().decode())
        answer = Answer()
        for event in _events(response):
            if "error" in event:
                raise AnswerFailed(event["error"]["message"])
            answer.receipt = event.get("prfaas_receipt", answer.receipt)
            answer.usage = event.get("usage") or answer.usage
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    answer.pieces.append(piece)
                    yield answer
        yield answer


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: ") and (data := line.removeprefix(b"data: ").strip()) != b"[DONE]":
            yield json.loads(data)


@contextmanager
def _connection(url: str, timeout_s: float = TIMEOUT_S) -> Iterator[http.client.HTTPConnection]:
    """What goes wrong on it is an OSError."""
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        yield connection
    except http.client.HTTPException as error:
        if isinstance(error, OSError):
            raise
        raise ConnectionError(f"it does not answer as HTTP does: {error!r}") from error
    finally:
        connection.close()
