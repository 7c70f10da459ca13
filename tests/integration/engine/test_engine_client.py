"""The node's end of a real engine process: a prompt is computed, taken out into blocks, and begun with again."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prfaas.engine import messages
from prfaas.engine.cost_model import write_config
from prfaas.engine.port import EngineInfo
from prfaas.errors import EngineFailed
from prfaas.kvcache.layout import Window, chunk_ends
from prfaas.node.children import children
from prfaas.node.engine_client import EngineClient
from prfaas.request import AttemptId, Sampling

POOL_BYTES = 16 << 20
LIVENESS_S = 20.0
TOKENS, UNIT, CHUNK = 1000, 64, 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_config(directory, time_scale=0.001)
    return directory


@asynccontextmanager
async def engine_on(model: Path) -> AsyncIterator[EngineClient]:
    async with children(model, POOL_BYTES) as (engine_child, _), asyncio.timeout(LIVENESS_S):
        client = EngineClient("w", engine_child.channel)
        running = asyncio.create_task(client.run())
        try:
            await client.info()
            yield client
        finally:
            running.cancel()


class Shelf:
    """Places in the pool, one after another."""

    def __init__(self, info: EngineInfo) -> None:
        self._layout, self._placed = info.layout, 0

    def place(self, first: int, stop: int, *, state: bool = False) -> Window:
        window = Window(first, stop, self._placed, state)
        self._placed += self._layout.window_bytes(stop - first, state)
        return window


def prompt(tokens: int) -> bytes:
    return struct.pack(f"<{tokens}I", *(3 + 31 * place % 500 for place in range(tokens)))


async def answer(
    client: EngineClient, attempt: AttemptId, tokens: bytes, held: tuple[Window, ...] = (), **more: int
) -> tuple[bytes, messages.Finished]:
    said = b""
    stop, sampling = len(tokens) // 4 - 1, Sampling(max_tokens=200)
    async for event in client.decode(attempt, tokens, stop, sampling, held, 0, **more):
        match event:
            case messages.Tokens():
                said += event.tokens
            case messages.Finished():
                return said, event
    raise AssertionError("no end")


async def test_a_prompt_and_its_answer_are_kept_and_begun_with_again(model: Path) -> None:
    """Prefill toward elsewhere lingers for its export; so does the decode. The next turn computes only what is new, and
    says what a prefill from nothing says."""
    async with engine_on(model) as client:
        shelf, text = Shelf(await client.info()), prompt(TOKENS + 1)
        out, rows, reads = shelf.place(0, TOKENS, state=True), list[tuple[int, int]](), list[str]()
        ends = (*chunk_ends(TOKENS, CHUNK)[:-1], 960, TOKENS)
        first, second, third = AttemptId("first"), AttemptId("second"), AttemptId("third")
        done = await client.prefill(
            first,
            text,
            TOKENS,
            ends,
            out=out,
            checkpoints=(960,),
            linger=True,
            on_rows=lambda layer, stop: rows.append((stop, layer)),
        )
        assert (done.tokens, done.snapshots) == (TOKENS, (960,))
        assert rows == sorted(rows) and {stop for stop, _ in rows} == set(ends)
        blocks = (*(shelf.place(at, at + UNIT) for at in range(0, 960, UNIT)), shelf.place(960, 960, state=True))
        await client.export(first, blocks)
        with pytest.raises(EngineFailed, match="no snapshot at 64"):
            await client.export(first, (shelf.place(64, 64, state=True),))
        await client.cancel(first)
        with pytest.raises(EngineFailed, match="no sequence"):
            await client.export(first, blocks)

        said, finished = await answer(client, second, text, (out,), snapshot_tokens=UNIT, linger=True)
        assert (finished.kept_tokens, finished.snapshots) == (TOKENS + 200, (1152,))
        more = tuple(shelf.place(at, at + UNIT) for at in range(960, 1152, UNIT))
        state = shelf.place(1152, 1152, state=True)
        await client.export(second, (*more, state))
        await client.cancel(second)

        turn = text + said + prompt(300)
        stop = len(turn) // 4 - 1
        later = tuple(end for end in chunk_ends(stop, CHUNK) if end > 1152)
        held = (*blocks[:-1], *more, state)
        done = await client.prefill(third, turn, stop, later, held=held, on_read=lambda: reads.append("read"))
        assert (done.tokens, reads) == (stop - 1152, ["read"])
        warm, _ = await answer(client, third, turn)
        cold = AttemptId("cold")
        await client.prefill(cold, turn, stop, chunk_ends(stop, CHUNK))
        assert (await answer(client, cold, turn))[0] == warm
        assert len(warm) == 4 * 200


async def test_a_cancel_ends_whoever_waits_for_an_export(model: Path) -> None:
    async with engine_on(model) as client:
        shelf, attempt = Shelf(await client.info()), AttemptId("a")
        await client.prefill(attempt, prompt(TOKENS), TOKENS, chunk_ends(TOKENS, CHUNK))
        windows = tuple(shelf.place(at % TOKENS, at % TOKENS + 1) for at in range(5000))
        waiting = asyncio.create_task(client.export(attempt, windows))
        await asyncio.sleep(0)
        await client.cancel(attempt)
        with pytest.raises(EngineFailed):
            await waiting
