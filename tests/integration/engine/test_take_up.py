"""A prefill that goes on where a lost transfer ended, on real models: the span has room for all of it, and of a dense
model any first part of it will do."""

import pytest

from prfaas.engine.hf import HfEngine
from prfaas.engine.messages import Failed, PoolRead, Prefill, Prefilled
from prfaas.kvcache.layout import Window, chunk_ends
from tests.integration.engine.desk import Desk, drawn, same
from tests.integration.engine.engine_scenes import packed, prompt, ship

TOKENS = 700


@pytest.mark.parametrize("held", [100, 256, 512, TOKENS])
def test_what_is_held_is_not_computed_again_and_changes_nothing(engine: HfEngine, held: int) -> None:
    """Bit for bit the answer of a prefill from the start, where chunks end alike. The rest of the span may hold
    anything. With states only a span that is whole will do."""
    ids, desk = prompt(TOKENS + 1), Desk(engine)
    window = desk.place(0, TOKENS, state=True)
    span = ship(engine, ids[:-1])
    for part in engine.info.layout.parts(TOKENS, tuple(sorted({*chunk_ends(TOKENS, 256), held}))):
        if part.stop > held:
            span[part.offset : part.offset + part.nbytes] = b"\xff" * part.nbytes
    desk.region(window)[:] = span
    ends = tuple(end for end in chunk_ends(TOKENS, 256) if end > held)
    command = Prefill(attempt="a", prompt=packed(ids), stop=TOKENS, ends=ends, held=(window,), held_tokens=held)
    said = desk.do(command)
    if held < TOKENS and engine.info.layout.state_bytes:
        assert isinstance(said[0], Failed) and "states" in said[0].detail
        return
    assert isinstance(said[0], PoolRead) and isinstance(said[1], Prefilled)
    assert said[1].tokens == TOKENS - held
    warm, cold = drawn(desk.do(desk.decode("a", ids, 4))), desk.cold(ids, 4)
    assert warm == cold or (held % 256 and held < TOKENS and same(cold, warm))


def test_what_cannot_be_taken_up_is_refused(engine: HfEngine) -> None:
    """Beyond what is held, from before its start, or from a span outside the pool."""
    desk = Desk(engine)
    size, pool_bytes = desk.layout.window_bytes(TOKENS, state=True), len(desk.pool)
    for held, offset in ((TOKENS + 1, 0), (-256, 0), (TOKENS, (pool_bytes - size) // 64 * 64 + 64)):
        window = Window(0, TOKENS, offset, state=True)
        ends = tuple(end for end in chunk_ends(TOKENS, 256) if end > held)
        command = Prefill(
            attempt="a", prompt=packed(prompt(TOKENS)), stop=TOKENS, ends=ends, held=(window,), held_tokens=held
        )
        (failed,) = desk.do(command)
        assert isinstance(failed, Failed)
