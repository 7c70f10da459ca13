"""A client that reads streams to their last byte and knows what they must say.

The load generator counts events; this one compares the text. Prompts are lists of tokens, so that the answer, which
follows from the prompt's tokens, can be told without rendering a chat.
"""

import asyncio
import json
from dataclasses import dataclass

from bench.router.engine import first_word
from bench.router.model import NAME, plain_words
from prfaas.tokenizer.text import TextTokenizer, pack

HOST = "127.0.0.1"
#: A connection is made and its first token is there within this, however many others do the same.
FIRST_S = 120.0


class Expected:
    """What the mock workers answer."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._ids = plain_words(tokenizer)
        self._words = [tokenizer.token_bytes(token_id).decode() for token_id in self._ids]

    def prompt(self, number: int) -> list[int]:
        return [self._ids[(number * 31 + at * 7) % len(self._ids)] for at in range(8 + number % 9)]

    def text(self, prompt: list[int], count: int) -> list[str]:
        first = first_word(pack(prompt), len(self._words))
        return [self._words[(first + at) % len(self._words)] for at in range(count)]


@dataclass(slots=True)
class Stream:
    """One answer on its way. `wrong` says what was not as it had to be."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    expected: list[str]
    seen: int = 0
    wrong: str = ""

    async def first(self) -> None:
        """Until the first token is there."""
        await self.reader.readuntil(b"\r\n\r\n")
        while not self.seen and not self.wrong:
            await self._event()

    async def rest(self) -> None:
        while await self._event():
            pass
        if not self.wrong and self.seen != len(self.expected):
            self.wrong = f"{self.seen} tokens of {len(self.expected)}"
        self.writer.close()

    async def _event(self) -> bool:
        """Take one chunk, of one event or several; False when it was the last."""
        size = int(await self.reader.readline(), 16)
        chunk = (await self.reader.readexactly(size + 2))[:size]
        for event in chunk.decode().split("\n\n"):
            if event.startswith("data: {"):
                self._take(json.loads(event[6:]))
        return size > 0

    def _take(self, event: dict[str, object]) -> None:
        if "error" in event:
            self.wrong = self.wrong or str(event["error"])
            return
        choices = event["choices"]
        assert isinstance(choices, list)
        for choice in choices:
            if text := choice["text"]:
                at, wanted = self.seen, self.expected[self.seen : self.seen + 1]
                self.seen += 1
                if [text] != wanted and not self.wrong:
                    self.wrong = f"token {at} is {text!r}, not {wanted}"


async def opened(port: int, expected: Expected, number: int, tokens: int, pace_us: int) -> Stream:
    prompt = expected.prompt(number)
    body = json.dumps({"model": NAME, "prompt": prompt, "max_tokens": tokens, "stream": True, "seed": pace_us}).encode()
    reader, writer = await asyncio.open_connection(HOST, port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return Stream(reader, writer, expected.text(prompt, tokens))


async def read_whole(port: int, expected: Expected, number: int, tokens: int, pace_us: int) -> str:
    """What was wrong with one stream; empty if nothing was."""
    try:
        stream = await opened(port, expected, number, tokens, pace_us)
        await stream.first()
        await stream.rest()
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        return repr(error)
    return stream.wrong
