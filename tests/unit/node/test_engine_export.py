"""What an attempt has computed can be taken out at any time while it is here, and taking it out changes nothing."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from prfaas.engine.cost_model import CostModelEngine
from prfaas.engine.messages import (
    Cancel,
    Cancelled,
    Decode,
    Export,
    Exported,
    ExportFailed,
    Failed,
    Finished,
    Prefill,
    Prefilled,
)
from prfaas.kvcache.layout import Window, chunk_ends
from prfaas.node.engine_sequence import MAX_LINGERING
from tests.unit.node.engine_bench import (
    CHUNK,
    SPAN_BYTES,
    Bench,
    packed,
    prefill,
    prompt,
    truth,
    write_model,
)

UNIT = 4


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> CostModelEngine:
    directory: Path = tmp_path_factory.mktemp("model")
    write_model(directory)
    return CostModelEngine(directory)


@pytest.fixture
def bench(engine: CostModelEngine) -> Bench:
    return Bench(engine)


def whole_of(engine: CostModelEngine, tokens: bytes, first: int, stop: int) -> bytes:
    """A window of these rows and the states at their end, computed from nothing."""
    bench = Bench(engine)
    out = bench.place(first, stop, state=True)
    bench.do(Prefill(attempt="a", prompt=tokens, stop=stop, ends=chunk_ends(stop, CHUNK), out=out))
    return bench.content(out)


def decode(attempt: str, tokens: bytes, count: int, **more: object) -> Decode:
    held = len(tokens) // 4 - 1
    return Decode(attempt=attempt, prompt=tokens, tokens=held, max_tokens=count, **more)  # type: ignore[arg-type]


def lingering_prefill(bench: Bench, attempt: str = "a", checkpoints: Sequence[int] = ()) -> Prefill:
    """Of 29 tokens, which are sent on as well."""
    ends = tuple(sorted({*chunk_ends(29, CHUNK), *checkpoints}))
    out = bench.place(0, 29, state=True)
    return Prefill(
        attempt=attempt, prompt=prompt(30), stop=29, ends=ends, out=out, checkpoints=tuple(checkpoints), linger=True
    )


def test_a_checkpoint_is_the_state_that_a_prefill_to_there_has(bench: Bench) -> None:
    """Taken while passing (R8), and not touched by what is computed afterwards."""
    bench.do(lingering_prefill(bench, checkpoints=(4, 20, 29)))
    done = bench.one("a", Prefilled)
    assert isinstance(done, Prefilled) and done.snapshots == (4, 20, 29)
    windows = (bench.place(0, 4, state=True), bench.place(4, 20, state=True), bench.place(29, 29, state=True))
    bench.do(Export("a", windows))
    assert bench.of("a")[-1] == Exported("a")
    for window in windows:
        assert bench.content(window) == whole_of(bench.engine, prompt(30), window.first, window.stop)
    assert bench.loop.load().lingering_sequences == 1
    bench.do(Cancel("a"))
    assert bench.leaves_nothing()


def test_a_prefill_that_does_not_linger_is_gone(bench: Bench) -> None:
    bench.do(prefill("a", prompt(30), 29, out_at=SPAN_BYTES), Export("a", (bench.place(0, 4),)))
    assert isinstance(bench.of("a")[-1], ExportFailed) and bench.leaves_nothing()


def test_decode_keeps_one_snapshot_at_the_last_boundary(bench: Bench) -> None:
    """With it and the answer's rows the next turn begins past the answer, and draws what a cold run draws (R6)."""
    bench.do(
        prefill("a", prompt(30), 29),
        decode("a", prompt(30), 15, snapshot_tokens=UNIT, linger=True),
    )
    finished, answer = bench.one("a", Finished), bench.answer("a")
    assert isinstance(finished, Finished) and (finished.kept_tokens, finished.snapshots) == (44, (44,))
    turn = prompt(30) + packed(*answer) + prompt(10, first=3)
    rows, state = bench.place(0, 44), bench.place(44, 44, state=True)
    bench.do(Export("a", (rows, state)), Cancel("a"))
    again = Prefill(attempt="b", prompt=turn, stop=54, ends=(48, 54), held=(rows, state))
    bench.do(again, decode("b", turn, 8))
    assert bench.answer("b") == truth(bench, turn, 8) != []
    assert bench.leaves_nothing()


@pytest.mark.parametrize(("count", "boundary"), [(1, 28), (2, 28), (3, 32), (6, 32), (7, 36)])
def test_the_snapshot_moves_when_a_multiple_is_reached(bench: Bench, count: int, boundary: int) -> None:
    """The last token drawn takes no position, so it moves nothing. A checkpoint of the prefill stays beside it."""
    ends = (*chunk_ends(29, CHUNK)[:-1], 28, 29)
    bench.do(
        Prefill(attempt="a", prompt=prompt(30), stop=29, ends=ends, checkpoints=(28,)),
        decode("a", prompt(30), count, snapshot_tokens=UNIT, linger=True),
    )
    finished = bench.one("a", Finished)
    assert isinstance(finished, Finished) and finished.snapshots == tuple(sorted({28, boundary}))
    window = bench.place(0, boundary, state=True)
    bench.do(Export("a", (window,)))
    tokens = prompt(30) + packed(*bench.answer("a"))
    assert bench.content(window) == whole_of(bench.engine, tokens, 0, boundary)


def test_a_hand_off_at_a_boundary_can_be_kept_even_if_the_answer_is_short(bench: Bench) -> None:
    """The state with which the decode begins is the one at the last boundary there is."""
    out = bench.place(0, 28, state=True)
    bench.do(Prefill(attempt="a", prompt=prompt(29), stop=28, ends=chunk_ends(28, CHUNK), out=out))
    bench.do(decode("b", prompt(29), 2, held=(out,), snapshot_tokens=UNIT, linger=True))
    finished = bench.one("b", Finished)
    assert isinstance(finished, Finished) and finished.snapshots == (28,)


def test_what_decode_recomputes_has_its_snapshots_too(bench: Bench) -> None:
    command = Decode(attempt="a", prompt=prompt(30), tokens=0, max_tokens=1, snapshot_tokens=CHUNK, linger=True)
    bench.do(command)
    finished = bench.one("a", Finished)
    assert isinstance(finished, Finished) and finished.snapshots == (24,)


def test_exports_do_not_change_what_is_drawn(bench: Bench) -> None:
    """At every turn of prefill and decode, of all rows that exist by then; each holds what a cold run makes."""
    bench.loop.handle(prefill("a", prompt(30), 29))
    windows, exported = list[Window](), 0
    while not any(isinstance(event, Finished) for event in bench.of("a")):
        if bench.loop.load().kept_sequences:
            bench.loop.handle(decode("a", prompt(30), 12))
        computed = bench.loop.load().prefill_tokens_total + max(0, len(bench.answer("a")) - 1)
        if computed and len(windows) == exported:
            windows.append(bench.place(0, computed))
            bench.loop.handle(Export("a", (windows[-1],)))
        bench.loop.turn()
        exported = bench.of("a").count(Exported("a"))
    bench.run()
    assert bench.answer("a") == truth(bench, prompt(30), 12)
    assert exported >= 12
    for window in windows[:exported]:
        rows = bench.content(window)[: 8 * window.stop]
        assert whole_of(bench.engine, prompt(30) + packed(*bench.answer("a")), 0, window.stop).endswith(
            rows.ljust(-(-len(rows) // 64) * 64, b"\0")
        )


def test_an_export_writes_one_window_between_two_steps(bench: Bench) -> None:
    """So that a large one delays a stream by no more than a window."""
    bench.do(lingering_prefill(bench))
    bench.loop.handle(Decode(attempt="stream", prompt=prompt(2), tokens=0, max_tokens=15))
    bench.loop.turn()
    bench.loop.handle(Export("a", tuple(bench.place(at, at + 4) for at in range(0, 24, 4))))
    drawn = len(bench.answer("stream"))
    while not isinstance(bench.events[-1], Exported):
        bench.loop.turn()
    assert len(bench.answer("stream")) - drawn == 6


def test_an_export_that_cannot_be_done_leaves_the_attempt_alone(bench: Bench) -> None:
    """No such rows yet, no snapshot there, no place in the pool, no such attempt: it says so, the answer goes on."""
    bench.do(prefill("a", prompt(30), 29))
    for window in (
        Window(0, 30, 0),
        Window(28, 28, 0, True),
        Window(0, 8, 8 * SPAN_BYTES),
        Window(0, 8, -64),
        Window(0, 8, 4),
        Window(8, 0, 0),
    ):
        bench.do(Export("a", (window,)))
        assert isinstance(bench.of("a")[-1], ExportFailed), window
    bench.do(Export("nobody", (Window(0, 8, 0),)))
    assert isinstance(bench.of("nobody")[-1], ExportFailed)
    bench.do(decode("a", prompt(30), 6))
    assert bench.answer("a") == truth(bench, prompt(30), 6) and bench.leaves_nothing()


def test_an_export_of_an_attempt_that_ends_meanwhile_fails(bench: Bench) -> None:
    """However it ends: by itself or by a second command. Cancelled, it is not answered and nothing is written."""
    for ending in ("itself", "second"):
        bench.do(prefill(ending, prompt(30), 29))
        bench.loop.handle(Export(ending, tuple(bench.place(at, at + 4) for at in range(0, 24, 4))))
        bench.loop.handle(decode(ending, prompt(30), 2))
        if ending == "second":
            bench.loop.handle(decode(ending, prompt(30), 2))
            assert isinstance(bench.one(ending, Failed), Failed)
        bench.run()
        assert bench.one(ending, ExportFailed) and bench.leaves_nothing()
    bench.do(prefill("a", prompt(30), 29))
    bench.loop.handle(Export("a", (bench.place(0, 8),)))
    bench.loop.handle(Cancel("a"))
    written = bytes(bench.pool)
    bench.run()
    assert bench.of("a")[-1] == Cancelled("a") and bytes(bench.pool) == written


def test_of_too_many_that_linger_the_oldest_is_dropped(bench: Bench) -> None:
    commands = [
        Prefill(
            attempt=f"a{number}",
            prompt=prompt(9),
            stop=8,
            ends=(8,),
            out=Window(0, 8, 0, True),
            checkpoints=(8,),
            linger=True,
        )
        for number in range(MAX_LINGERING + 1)
    ]
    bench.do(*commands)
    assert bench.loop.load().lingering_sequences == MAX_LINGERING
    window = bench.place(0, 8, state=True)
    bench.do(Export("a0", (window,)), Export("a1", (window,)))
    assert isinstance(bench.of("a0")[-1], ExportFailed) and bench.of("a1")[-1] == Exported("a1")
    bench.do(*(Cancel(command.attempt) for command in commands))
    assert bench.leaves_nothing()


def test_a_command_for_an_attempt_that_lingers_ends_it(bench: Bench) -> None:
    bench.do(lingering_prefill(bench))
    bench.do(prefill("a", prompt(30), 29))
    assert isinstance(bench.of("a")[-1], Failed) and bench.leaves_nothing()
