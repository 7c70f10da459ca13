"""What a node hears when a request to a vLLM server goes wrong: of that request alone, and only when nothing touches
its windows any more."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from prfaas.engine.messages import Cancel, Cancelled, Decode, Event, Failed, Load, Prefill
from prfaas.engine.vllm.adapter import Adapter
from prfaas.engine.vllm.books import Orders, Save
from prfaas.kvcache.layout import Window
from tests.unit.engine.vllm.conftest import ATTENTION, LIVENESS_S, POOL_BYTES, until

LENGTH = 41
PROMPT = np.arange(LENGTH, dtype="<u4").tobytes()
WINDOW = Window(0, LENGTH - 1, 0, state=True)
TO_A_WINDOW = Prefill(attempt="a", prompt=PROMPT, stop=LENGTH - 1, ends=(LENGTH - 1,), out=WINDOW)
TO_KEEP = Prefill(attempt="a", prompt=PROMPT, stop=LENGTH - 1, ends=(LENGTH - 1,))
DECODE = Decode(attempt="a", prompt=PROMPT, tokens=LENGTH - 1, max_tokens=4, held=(WINDOW,))
COMMANDS = pytest.mark.parametrize("command", [TO_A_WINDOW, TO_KEEP, DECODE], ids=["to a window", "to keep", "decode"])
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
REFUSAL = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\nno"
ANSWERS = {
    "nothing": b"",
    "not HTTP": b"\0\1\2\r\n\r\n",
    "a refusal": REFUSAL,
    "half a stream": STREAM + b'data: {"choices": []}\n\n',
    "no JSON": STREAM + b"data: {]\n\n",
    "another shape": STREAM + b'data: {"choices": 7}\n\n',
    "a failure of its own": STREAM + b'data: {"error": {"message": "out of memory"}}\n\n',
    "a stream without an end": STREAM + b'data: {"choices": []}\n\ndata: [DONE]\n\n',
    "an end before its time": STREAM + b'data: {"choices": [{"finish_reason": "abort"}]}\n\ndata: [DONE]\n\n',
}

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def at(folder: Path, handler: Handler) -> AsyncIterator[Path]:
    """Somebody who answers in a vLLM server's place."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            await handler(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_unix_server(answer, folder / "api")
    try:
        yield folder / "api"
    finally:
        server.close()


class Node:
    """An adapter, and what it has told."""

    def __init__(self, api: Path, joined) -> None:
        self.joined, self.told = joined, list[Event]()
        self.adapter = Adapter(api, POOL_BYTES, self.told.append)
        self.adapter.connect(joined.bridge)
        joined.heard = self.adapter.heard

    async def until(self, *kinds: type[Event]) -> Event:
        await until(lambda: any(isinstance(event, kinds) for event in self.told))
        return next(event for event in self.told if isinstance(event, kinds))

    async def granted(self) -> None:
        await until(lambda: self.joined.copies._grants)

    def check_idle(self) -> None:
        assert not self.joined.copies._grants
        assert len(self.adapter._shelf) == 0
        load = self.adapter.load()
        assert isinstance(load, Load)
        held = (load.queued_prefill_tokens, load.queued_sequences, load.active_sequences, load.kept_sequences)
        assert held == (0, 0, 0, 0)


@COMMANDS
@pytest.mark.parametrize("answer", ANSWERS)
async def test_what_a_server_should_not_answer_fails_the_request(tmp_path, join, command, answer):
    async def handler(_, writer: asyncio.StreamWriter) -> None:
        writer.write(ANSWERS[answer])

    async with join() as joined, at(tmp_path, handler) as api:
        node = Node(api, joined)
        node.adapter.handle(command)
        assert isinstance(await node.until(Failed), Failed)
        node.check_idle()


@pytest.mark.parametrize("command", [TO_A_WINDOW, TO_KEEP], ids=["to a window", "to keep"])
async def test_a_prefill_that_was_not_saved_has_failed(tmp_path, join, command):
    """However well the request ended."""

    async def handler(_, writer: asyncio.StreamWriter) -> None:
        writer.write(ANSWERS["an end before its time"])

    async with join() as joined, at(tmp_path, handler) as api:
        node = Node(api, joined)
        node.adapter.handle(command)
        assert "before its prompt was computed" in (await node.until(Failed)).detail
        node.check_idle()


@COMMANDS
async def test_a_request_that_is_cancelled_is_closed(tmp_path, join, command):
    """The server sees the connection end, which is how it aborts."""
    asked, closed = asyncio.Event(), asyncio.Event()

    async def handler(reader: asyncio.StreamReader, _) -> None:
        asked.set()
        await reader.read()
        closed.set()

    async with join() as joined, at(tmp_path, handler) as api:
        node = Node(api, joined)
        node.adapter.handle(command)
        async with asyncio.timeout(LIVENESS_S):
            await asked.wait()
        node.adapter.handle(Cancel("a"))
        assert await node.until(Cancelled, Failed) == Cancelled("a")
        async with asyncio.timeout(LIVENESS_S):
            await closed.wait()
        node.check_idle()


async def test_cancelled_is_told_when_nothing_is_copied_any_more(tmp_path, join):
    """Also when the request was on its way out already, and waited for the same."""

    async def handler(_, writer: asyncio.StreamWriter) -> None:
        await going_on.wait()
        writer.write(REFUSAL)

    going_on = asyncio.Event()
    async with join() as joined, at(tmp_path, handler) as api:
        node = Node(api, joined)
        node.adapter.handle(TO_A_WINDOW)
        await node.granted()
        joined.rows.may.clear()
        orders = Orders(saves=[Save("a", ((4, 1, 3), (5,)), 0, LENGTH - 1, last=True)])
        saving = asyncio.create_task(asyncio.to_thread(joined.copies.layer_done, ATTENTION, orders))
        assert await asyncio.to_thread(joined.rows.reading.wait, LIVENESS_S)
        going_on.set()
        await until(lambda: joined.bridge._revokes)
        node.adapter.handle(Cancel("a"))
        await asyncio.sleep(0.2)
        assert not node.told
        joined.rows.may.set()
        await saving
        await node.until(Cancelled)
        node.check_idle()


@COMMANDS
async def test_nothing_waits_for_a_server_that_is_gone(tmp_path, join, command):
    """The process ends instead, and with it the worker: no task is left that would keep it."""

    async def handler(reader: asyncio.StreamReader, _) -> None:
        await reader.read()

    async with join() as joined, at(tmp_path, handler) as api:
        node = Node(api, joined)
        node.adapter.handle(command)
        await node.granted()
        task = node.adapter._requests["a"].task
        joined.close()
        await asyncio.wait({joined.running}, timeout=LIVENESS_S)
        assert task is not None
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=LIVENESS_S)
        assert done
        node.adapter.handle(Cancel("a"))
        await until(lambda: not node.adapter._endings)
        assert not node.told
