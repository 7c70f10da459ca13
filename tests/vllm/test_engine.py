"""What a node relies on, of one vLLM server behind the messages of an engine process."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from prfaas.engine.messages import (
    Cancel,
    Cancelled,
    Decode,
    Failed,
    Finished,
    PoolRead,
    Prefill,
    Prefilled,
)
from prfaas.kvcache.layout import TensorKind, Window, chunk_ends
from tests.vllm.conftest import EXACT, StartEngine
from tests.vllm.engine import Engine, RowsReady
from tests.vllm.prompts import packed, token_ids

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200), pytest.mark.asyncio(loop_scope="module")]

LENGTH, OUTPUT = 1300, 24


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=EXACT)
async def engine(request: pytest.FixtureRequest, alone: StartEngine) -> AsyncIterator[Engine]:
    async with alone(request.param) as running:
        yield running


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> bytes:
    """One that no other test has: the server may have a cache."""
    return packed(token_ids(LENGTH, seed=sum(request.node.name.encode())))


async def prefilled(engine: Engine, prompt: bytes, window: Window | None, attempt: str) -> Prefilled:
    ends = chunk_ends(LENGTH - 1, engine.info.chunk_tokens)
    told = await engine.told(Prefill(attempt=attempt, prompt=prompt, stop=LENGTH - 1, ends=ends, out=window))
    assert isinstance(told.end, Prefilled), told.end
    expected = engine.info.layout.parts(LENGTH - 1, ends) if window else ()
    announced = {(event.layer, event.stop) for event in told.events if isinstance(event, RowsReady)}
    assert announced == {(part.layer, part.stop) for part in expected}
    return told.end


async def decoded(engine: Engine, prompt: bytes, *held: Window, attempt: str, tokens: int = 0) -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt were computed for it."""
    command = Decode(attempt=attempt, prompt=prompt, tokens=tokens, max_tokens=OUTPUT, held=held)
    told = await engine.told(command)
    assert isinstance(told.end, Finished), told.end
    assert bool(held) == any(isinstance(event, PoolRead) for event in told.events)
    assert told.end.output_tokens == len(told.tokens) == OUTPUT
    return told.tokens, told.end.recomputed_tokens


async def test_what_was_prefilled_is_decoded(engine: Engine, prompt: bytes) -> None:
    """From a window of the pool, and, where it stays, from what the engine has kept: the same answer, with one token
    of the prompt computed for it."""
    window = Window(0, LENGTH - 1, 4096, state=True)
    alone, _ = await decoded(engine, prompt, attempt="alone")
    await prefilled(engine, prompt, window, "there")
    assert await decoded(engine, prompt, window, attempt="from the pool", tokens=LENGTH - 1) == (alone, 1)
    await prefilled(engine, prompt, None, "here")
    assert await decoded(engine, prompt, attempt="here", tokens=LENGTH - 1) == (alone, 1)


async def test_what_is_damaged_shows(engine: Engine, prompt: bytes) -> None:
    """Rows or states of zeros give another answer: what is loaded is what is decoded from."""
    window, layout = Window(0, LENGTH - 1, 0, state=True), engine.info.layout
    alone, _ = await decoded(engine, prompt, attempt="alone")
    await prefilled(engine, prompt, window, "whole")
    whole = engine.pool[:]
    for kind in {tensor.kind for layer in layout.layers for tensor in layer}:
        engine.pool[:] = whole
        for part in layout.parts(LENGTH - 1, (LENGTH - 1,)):
            if layout.layers[part.layer][part.tensor].kind is kind:
                engine.pool[part.offset : part.offset + part.nbytes] = bytes(part.nbytes)
        answer, _ = await decoded(engine, prompt, window, attempt=f"without {kind.value}", tokens=LENGTH - 1)
        assert answer != alone, kind
    assert layout.bytes_per_token and (TensorKind.STATE.value in str(layout)) == bool(layout.state_bytes)


async def test_goes_on_from_what_is_held(engine: Engine, prompt: bytes) -> None:
    """A prefill that is given its first tokens computes the others, and writes all that it is asked for."""
    start, stop = 512, LENGTH - 1
    first, rest = Window(0, start, 0, state=True), Window(0, stop, 8 << 20, state=True)
    alone, _ = await decoded(engine, prompt, attempt="alone")
    told = await engine.told(Prefill(attempt="first", prompt=prompt, stop=start, ends=(start,), out=first))
    assert isinstance(told.end, Prefilled), told.end
    ends = tuple(end for end in chunk_ends(stop, engine.info.chunk_tokens) if end > start)
    told = await engine.told(Prefill(attempt="rest", prompt=prompt, stop=stop, ends=ends, held=(first,), out=rest))
    assert isinstance(told.end, Prefilled), told.end
    assert told.end.tokens <= stop - start
    assert await decoded(engine, prompt, rest, attempt="decode", tokens=stop) == (alone, 1)


async def test_cancelled_is_cancelled(engine: Engine, prompt: bytes) -> None:
    """An attempt that was kept is gone after its Cancel; one that never was is cancelled all the same."""
    await prefilled(engine, prompt, None, "kept")
    assert isinstance((await engine.told(Cancel("kept"))).end, Cancelled)
    assert isinstance((await engine.told(Cancel("never heard of"))).end, Cancelled)
    told = await engine.told(Decode(attempt="kept", prompt=prompt, tokens=LENGTH - 1, max_tokens=OUTPUT))
    assert isinstance(told.end, Failed), told.end
