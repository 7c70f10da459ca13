"""What a vLLM server is asked for a tenant's prompt, and what of its answer a node is told: over a real socket, with a
server and a connector that say what vLLM's would."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from prfaas.engine.messages import Event, PoolRead, Prefill, Prefilled
from prfaas.engine.vllm.adapter import Adapter
from prfaas.engine.vllm.bridge import Begun, Grant, Granted, Hello, News, Order, Revoke, Revoked, Saved
from prfaas.engine.vllm.cache_salt import cache_salt
from prfaas.engine.vllm.connection import Bridge
from prfaas.engine.vllm.geometry import Geometry, attention_layer
from prfaas.ipc import AsyncChannel
from prfaas.kvcache.layout import Window

PATIENCE_S = 20.0
GEOMETRY = Geometry((attention_layer("model.layers.0.attn", 0, 16, "float32", 1, 8, 8),))


class Server:
    """It has `cached` tokens of each prompt, and `says` so in its usage or not."""

    connector: AsyncChannel[Order]

    def __init__(self, cached: int, *, says: bool) -> None:
        self._cached, self._says = cached, says
        self.bodies: list[dict[str, Any]] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        [length] = [int(line.split(b":")[1]) for line in head.splitlines() if line.startswith(b"Content-Length")]
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        attempt = body["kv_transfer_params"]["prfaas"]["attempt"]
        for news in (Begun(attempt, self._cached, 1.0), Saved(attempt, 2.0)):
            self.connector.send(news)
        details = {"prompt_tokens_details": {"cached_tokens": self._cached}} if self._says else {}
        usage = {"prompt_tokens": len(body["prompt"]), **details}
        events = ({"choices": [{"token_ids": [7], "finish_reason": "length"}]}, {"choices": [], "usage": usage})
        text = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(text)
        writer.write(head + text)
        writer.close()

    async def grant(self, connector: AsyncChannel[Order]) -> None:
        while (order := await connector.receive()) is not None:
            match order:
                case Grant():
                    connector.send(Granted(order.attempt))
                case Revoke():
                    connector.send(Revoked(order.attempt))


@asynccontextmanager
async def adapter(server: Server, folder: Path, said: list[Event]) -> AsyncIterator[Adapter]:
    ours, theirs = socket.socketpair()
    server.connector = await AsyncChannel[Order].over(theirs, Order)
    found = Adapter(folder / "api", 1 << 20, said.append)
    bridge = Bridge(Hello(GEOMETRY, "0.32"), await AsyncChannel[News].over(ours, News), found.heard)
    found.connect(bridge)
    tasks = [asyncio.create_task(bridge.run()), asyncio.create_task(server.grant(server.connector))]
    async with await asyncio.start_unix_server(server.answer, folder / "api"):
        try:
            yield found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            server.connector.close()


async def prefilled(server: Server, folder: Path, said: list[Event], **fields: Any) -> Prefilled:
    async with adapter(server, folder, said) as found:
        found.handle(Prefill(attempt="a", prompt=bytes(400), stop=99, ends=(99,), **fields))
        async with asyncio.timeout(PATIENCE_S):
            while not (done := [each for each in said if isinstance(each, Prefilled)]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    return done[0]


@pytest.mark.parametrize("says", [True, False])
async def test_what_the_server_had_of_a_prompt_is_told(says: bool, tmp_path: Path) -> None:
    """By its usage; from a server that leaves that out, by what its scheduler told the connector. The salt goes with
    the prompt."""
    server, said = Server(64, says=says), list[Event]()
    done = await prefilled(server, tmp_path, said, salt=b"\x01\x02", out=Window(0, 99, 0, state=True))
    assert (done.cached, done.tokens) == (64, 35)
    [body] = server.bodies
    assert (body["cache_salt"], len(body["prompt"])) == (cache_salt(b"\x01\x02"), 99)


async def test_a_prompt_of_nobody_shares_nothing(tmp_path: Path) -> None:
    """Each has a salt of its own, as each attempt has a name of its own."""
    server = Server(0, says=True)
    await prefilled(server, tmp_path, [], out=Window(0, 99, 0, state=True))
    assert server.bodies[0]["cache_salt"] == "alone:a"


@pytest.mark.parametrize(("cached", "beyond"), [(64, 0), (80, 16)])
async def test_what_was_held_is_not_counted_twice(cached: int, beyond: int, tmp_path: Path) -> None:
    """Only what the server had beyond it; and what was held is free again, also where the server needed none of it."""
    said = list[Event]()
    server, held = Server(cached, says=True), (Window(0, 64, 4096, state=True),)
    done = await prefilled(server, tmp_path, said, held=held, out=Window(0, 99, 0, state=True))
    assert done.cached == beyond
    assert [each for each in said if isinstance(each, PoolRead)] == [PoolRead("a")]
