"""A prefill or decode that begins with what a cache pool holds is, byte for byte and token for token, one that began
from nothing. The model is one whose cache tells every byte apart."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.engine.cost_model import CostModelEngine
from prfaas.engine.messages import Cancel, Decode, Export, Exported, Failed, PoolRead, Prefill, Prefilled, RowsReady
from prfaas.kvcache.layout import Window, chunk_ends
from tests.unit.node.engine_bench import CHUNK, SPAN_BYTES, Bench, prompt, truth, write_model

UNIT = 4
TOKENS = 41
BOUNDARIES = tuple(range(UNIT, TOKENS, UNIT))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> CostModelEngine:
    directory: Path = tmp_path_factory.mktemp("model")
    write_model(directory)
    return CostModelEngine(directory)


def ends_after(start: int, stop: int) -> tuple[int, ...]:
    return tuple(end for end in chunk_ends(stop, CHUNK) if end > start)


class Cached(Bench):
    """A pool that has blocks of the prompt and states at all their ends, as an earlier prefill has exported them."""

    def __init__(self, engine: CostModelEngine, tokens: int = TOKENS) -> None:
        super().__init__(engine)
        self.blocks = [self.place(at - UNIT, at) for at in BOUNDARIES]
        self.states = {at: self.place(at, at, state=True) for at in BOUNDARIES}
        ends = tuple(sorted({*BOUNDARIES, *chunk_ends(tokens, CHUNK)}))
        self.do(
            Prefill(attempt="first", prompt=prompt(60), stop=tokens, ends=ends, checkpoints=BOUNDARIES),
            Export("first", (*self.blocks, *self.states.values())),
            Cancel("first"),
        )
        assert self.one("first", Exported) and self.leaves_nothing()

    def held(self, boundary: int) -> tuple[Window, ...]:
        return (*self.blocks[: boundary // UNIT], self.states[boundary]) if boundary else ()

    def resume(self, boundary: int, stop: int, out: Window | None = None) -> Prefill:
        return Prefill(
            attempt="again",
            prompt=prompt(60),
            stop=stop,
            ends=ends_after(boundary, stop),
            held=self.held(boundary),
            out=out,
        )


def span_of(engine: CostModelEngine, first: int, stop: int) -> bytes:
    """What a run from nothing writes into a window of these rows and the states at their end."""
    bench = Bench(engine)
    out = bench.place(first, stop, state=True)
    bench.do(Prefill(attempt="a", prompt=prompt(60), stop=stop, ends=chunk_ends(stop, CHUNK), out=out))
    return bench.content(out)


@pytest.mark.parametrize("stop", [39, 40, 41, 47, 48, 49])
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_resumed_prefill_draws_what_a_cold_one_draws(engine: CostModelEngine, boundary: int, stop: int) -> None:
    """From every boundary, to lengths around the end of a chunk and of a block; only the rest is computed."""
    bench = Cached(engine)
    if boundary > stop:
        return
    bench.do(
        bench.resume(boundary, stop),
        Decode(attempt="again", prompt=prompt(60)[: 4 * (stop + 1)], tokens=stop, max_tokens=6),
    )
    done = bench.one("again", Prefilled)
    assert isinstance(done, Prefilled) and done.tokens == stop - boundary
    assert isinstance(bench.of("again")[0], PoolRead)
    assert bench.answer("again") == truth(bench, prompt(60)[: 4 * (stop + 1)], 6)


@pytest.mark.parametrize("tokens", BOUNDARIES)
def test_a_decode_begins_with_blocks_and_a_state(engine: CostModelEngine, tokens: int) -> None:
    bench = Cached(engine)
    bench.do(Decode(attempt="again", prompt=prompt(60)[: 4 * 48], tokens=tokens, max_tokens=6, held=bench.held(tokens)))
    assert bench.answer("again") == truth(bench, prompt(60)[: 4 * 48], 6)


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_what_is_sent_on_is_the_same_wherever_it_came_from(engine: CostModelEngine, data: st.DataObject) -> None:
    """Any part of the rows may be wanted, below, across or above the boundary, down to the states alone."""
    boundary = data.draw(st.sampled_from((0, *BOUNDARIES)))
    stop = data.draw(st.integers(max(boundary, 1), 50))
    first = data.draw(st.integers(0, stop))
    bench = Cached(engine)
    out = bench.place(first, stop, state=True)
    bench.do(bench.resume(boundary, stop, out))
    assert bench.content(out) == span_of(engine, first, stop)
    assert bench.leaves_nothing()


def test_what_was_restored_is_announced_first_and_layer_by_layer(engine: CostModelEngine) -> None:
    """Then each chunk's rows with its layer, and the states with the last; nothing is announced that is not wanted."""
    bench = Cached(engine)
    layers = engine.info.layout.layers
    rows = [layer for layer, (tensor,) in enumerate(layers) if tensor.name == "kv"]
    bench.do(bench.resume(12, 21, bench.place(6, 21, state=True)))
    announced = [(event.stop, event.layer) for event in bench.of("again") if isinstance(event, RowsReady)]
    expected = [(12, layer) for layer in rows] + [(16, layer) for layer in rows]
    assert announced == expected + [(21, layer) for layer in range(len(layers))]
    assert isinstance(bench.of("again")[0], PoolRead) and isinstance(bench.of("again")[-1], Prefilled)


def test_rows_that_were_restored_are_sent_on_as_they_came(engine: CostModelEngine) -> None:
    """A damaged row stays the damaged row: nobody may mend by guessing what a checksum is to find."""
    bench = Cached(engine)
    bench.pool[bench.blocks[1].offset + 13] ^= 0x40
    out = bench.place(0, 21, state=True)
    bench.do(bench.resume(12, 21, out))
    damaged, sound = bench.content(out), span_of(engine, 0, 21)
    changed = [at for at, (ours, theirs) in enumerate(zip(damaged, sound, strict=True)) if ours != theirs]
    assert len(changed) == 1 and damaged[changed[0]] == sound[changed[0]] ^ 0x40


@pytest.mark.parametrize("lost", ["block", "state"])
def test_a_window_full_of_zeros_changes_the_answer(engine: CostModelEngine, lost: str) -> None:
    """So that equal answers mean something."""
    bench = Cached(engine)
    window = bench.blocks[3] if lost == "block" else bench.states[24]
    bench.pool[window.offset : window.offset + 64] = bytes(64)
    bench.do(bench.resume(24, 41), Decode(attempt="again", prompt=prompt(42), tokens=41, max_tokens=6))
    assert bench.answer("again") != truth(bench, prompt(42), 6)


def test_windows_may_be_reused_once_they_were_read(engine: CostModelEngine) -> None:
    """Restore copies: what the pool does with its blocks afterwards does not reach the sequence, nor the other way."""
    bench = Cached(engine)
    before = bytes(bench.pool)
    bench.do(bench.resume(24, 41))
    assert bytes(bench.pool) == before
    bench.pool[:] = bytes(len(bench.pool))
    bench.do(Decode(attempt="again", prompt=prompt(42), tokens=41, max_tokens=6))
    assert bench.answer("again") == truth(bench, prompt(42), 6)
    assert bytes(bench.pool) == bytes(len(bench.pool))


@pytest.mark.parametrize(
    ("held", "ends", "changes"),
    [
        ((Window(0, 8, 0), Window(12, 16, 128), Window(16, 16, 256, True)), (24,), {}),
        ((Window(4, 16, 0), Window(16, 16, 256, True)), (24,), {}),
        ((Window(0, 16, 0),), (24,), {}),
        ((Window(0, 16, 0), Window(12, 12, 256, True)), (24,), {}),
        ((Window(0, 16, 0), Window(16, 16, 64, True)), (24,), {}),
        ((Window(0, 16, 32), Window(16, 16, 512, True)), (24,), {}),
        ((Window(0, 16, -64), Window(16, 16, 512, True)), (24,), {}),
        ((Window(0, 16, 8 * SPAN_BYTES), Window(16, 16, 512, True)), (24,), {}),
        ((Window(0, 16, 0, True),), (16, 24), {}),
        ((Window(0, 16, 0, True),), (), {}),
        ((Window(0, 16, 0, True),), (20,), {}),
        ((Window(0, 16, 0, True),), (24, 20, 24), {}),
        ((Window(0, 32, 0, True),), (), {}),
        ((Window(0, 16, 0, True),), (24,), {"held_tokens": 17}),
        ((Window(0, 16, 0, True),), (16, 24), {"held_tokens": 12}),
        ((), (8, 16, 24), {"held_tokens": 0}),
        ((), (24,), {}),
        ((), (8, 16, 24), {"checkpoints": (12,)}),
        ((), (8, 16, 24), {"out": Window(0, 16, 0, True)}),
        ((), (8, 16, 24), {"out": Window(-8, 24, 0, True)}),
        ((), (8, 16, 24), {"out": Window(0, 24, 32, True)}),
    ],
)
def test_what_cannot_be_resumed_is_refused(
    engine: CostModelEngine, held: Sequence[Window], ends: Sequence[int], changes: dict[str, object]
) -> None:
    """Holes, missing states, windows outside the pool or upon each other; chunk ends that lead elsewhere, go back or
    are too far apart; checkpoints within a chunk; rows to be sent that do not end where the prefill does."""
    bench = Bench(engine)
    command = Prefill(attempt="a", prompt=prompt(30), stop=24, ends=tuple(ends), held=tuple(held), **changes)  # type: ignore[arg-type]
    bench.loop.handle(command)
    (failed,) = bench.events
    assert isinstance(failed, Failed) and failed.detail and bench.leaves_nothing()
    bench.run()
    assert bench.events == [failed]


@pytest.mark.parametrize("tokens", [8, 20])
def test_a_decode_that_is_given_more_or_less_than_it_asks_for_is_refused(engine: CostModelEngine, tokens: int) -> None:
    bench = Cached(engine)
    bench.do(Decode(attempt="again", prompt=prompt(30), tokens=tokens, max_tokens=2, held=bench.held(16)))
    assert isinstance(bench.of("again")[-1], Failed)
