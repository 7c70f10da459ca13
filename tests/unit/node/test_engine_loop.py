"""The engine's work is ordered so that streams keep flowing; whatever happens, attempts end once and leave nothing.

The engine is a real one: a cost model that does not wait.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.engine.cost_model import CostModelEngine
from prfaas.engine.messages import (
    Cancel,
    Cancelled,
    Decode,
    Failed,
    Finished,
    PoolRead,
    Prefill,
    Prefilled,
    RowsReady,
    SetShare,
    Tokens,
)
from prfaas.engine.port import Cache, LayerHook, StepInput, StepOutput
from prfaas.kvcache.layout import chunk_ends
from prfaas.request import Score
from tests.unit.node.engine_bench import (
    CHUNK,
    SPAN_BYTES,
    Bench,
    packed,
    prefill,
    prompt,
    truth,
    unpacked,
    whole,
    write_model,
)

#: A token on which `FragileEngine` raises.
POISON = 63


class FragileEngine(CostModelEngine):
    """A cost model with one token that it cannot bear."""

    def prefill(self, cache: Cache, chunk: bytes, on_layer: LayerHook | None) -> None:
        if POISON in unpacked(chunk):
            raise RuntimeError("poisoned chunk")
        super().prefill(cache, chunk, on_layer)

    def step(self, batch: Sequence[StepInput]) -> list[StepOutput]:
        if any(each.token_id == POISON for each in batch):
            raise RuntimeError("poisoned step")
        return super().step(batch)


class ScoringEngine(CostModelEngine):
    """A cost model that makes up scores."""

    def step(self, batch: Sequence[StepInput]) -> list[StepOutput]:
        return [replace(output, score=Score(1.0, 2.0)) for output in super().step(batch)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory)
    return directory


@pytest.fixture(scope="module")
def engine(model: Path) -> CostModelEngine:
    return CostModelEngine(model)


@pytest.fixture
def bench(engine: CostModelEngine) -> Bench:
    return Bench(engine)


def test_a_kept_sequence_goes_on_where_its_prefill_ended(bench: Bench) -> None:
    bench.loop.handle(prefill("a", prompt(30), 29))
    bench.run()
    assert bench.loop.load().kept_sequences == 1
    bench.loop.handle(Decode(attempt="a", prompt=prompt(30), tokens=29, max_tokens=6))
    bench.run()
    assert bench.answer("a") == truth(bench, prompt(30), 6)
    finished = Finished(attempt="a", reason="length", recomputed_tokens=1, output_tokens=6, kept_tokens=35)
    assert bench.of("a")[-1] == finished
    assert bench.leaves_nothing()


def test_a_span_carries_a_sequence_from_one_engine_to_another(bench: Bench, model: Path) -> None:
    """Every layer is announced once for each chunk end at which it has something, in order, and what was written is
    enough to decode elsewhere."""
    bench.loop.handle(prefill("a", prompt(30), 29, out_at=SPAN_BYTES))
    bench.run()
    parts = bench.engine.info.layout.parts(29, chunk_ends(29, CHUNK))
    announced = [(event.layer, event.stop) for event in bench.of("a") if isinstance(event, RowsReady)]
    assert announced == list(dict.fromkeys((part.layer, part.stop) for part in parts))
    assert isinstance(bench.of("a")[-1], Prefilled) and bench.leaves_nothing()

    other = Bench(CostModelEngine(model))
    other.pool[:SPAN_BYTES] = bench.pool[SPAN_BYTES : 2 * SPAN_BYTES]
    other.loop.handle(Decode(attempt="b", prompt=prompt(30), tokens=29, max_tokens=6, held=whole(29)))
    other.run()
    assert other.answer("b") == truth(bench, prompt(30), 6)
    assert isinstance(other.of("b")[0], PoolRead)


def test_a_span_may_be_reused_once_it_was_read(bench: Bench) -> None:
    bench.loop.handle(prefill("a", prompt(30), 29, out_at=0))
    bench.run()
    bench.loop.handle(Decode(attempt="b", prompt=prompt(30), tokens=29, max_tokens=6, held=whole(29)))
    bench.loop.turn()
    assert isinstance(bench.of("b")[0], PoolRead)
    bench.pool[:SPAN_BYTES] = bytes(SPAN_BYTES)
    bench.run()
    assert bench.answer("b") == truth(bench, prompt(30), 6)


@pytest.mark.parametrize("held", [0, 5, 16, 28, 29])
def test_what_the_hand_off_left_out_is_recomputed_and_counted(bench: Bench, held: int) -> None:
    """With any part of the prompt at hand, also none, the answer is the same and the counters tell the work."""
    bench.loop.handle(prefill("a", prompt(30), held))
    bench.run()
    bench.loop.handle(Decode(attempt="a", prompt=prompt(30), tokens=held, max_tokens=6))
    assert bench.loop.load().queued_prefill_tokens == 29 - held
    bench.run()
    assert bench.answer("a") == truth(bench, prompt(30), 6)
    finished = bench.one("a", Finished)
    assert isinstance(finished, Finished) and finished.recomputed_tokens == 30 - held
    load = bench.loop.load()
    assert (load.prefill_tokens_total, load.decode_forwarded_tokens_total) == (held, 30 - held + 6 - 1)


def test_a_prompt_of_one_token_needs_no_prefill(bench: Bench) -> None:
    bench.loop.handle(Decode(attempt="a", prompt=prompt(1), tokens=0, max_tokens=4))
    bench.run()
    assert bench.answer("a") == truth(bench, prompt(1), 4)


def test_a_stop_token_ends_the_sequence_unseen(bench: Bench) -> None:
    """The stop token is neither sent nor counted, not even when it is the first."""
    answer = truth(bench, prompt(30), 12)
    stop = next(token for place, token in enumerate(answer) if place >= 3 and token not in answer[:place])
    for attempt, stop_id in (("later", stop), ("first", answer[0])):
        command = Decode(attempt=attempt, prompt=prompt(30), tokens=0, max_tokens=12, stop_token_ids=(stop_id,))
        bench.loop.handle(command)
        bench.run()
        sent = answer[: answer.index(stop_id)]
        assert bench.answer(attempt) == sent
        assert bench.of(attempt)[-1] == Finished(
            attempt=attempt,
            reason="stop",
            recomputed_tokens=30,
            output_tokens=len(sent),
            kept_tokens=30 + len(sent),
        )


def test_logits_are_sent_only_when_asked_for(bench: Bench) -> None:
    for attempt, count in (("plain", 0), ("curious", 3)):
        bench.loop.handle(Decode(attempt=attempt, prompt=prompt(4), tokens=0, max_tokens=2, top_logits=count))
    bench.run()
    assert [event.top_logits for event in bench.of("plain") if isinstance(event, Tokens)] == [(), ()]
    for event in bench.of("curious"):
        if isinstance(event, Tokens):
            (logits,) = event.top_logits
            assert len(logits) == 3 and packed(logits[0][0]) == event.tokens


def test_scores_go_along_with_the_logits_of_an_engine_that_has_them(model: Path) -> None:
    """One for each token, and only when they are asked for; this engine declares none by itself."""
    bench = Bench(ScoringEngine(model))
    for attempt, count in (("plain", 0), ("curious", 1)):
        bench.loop.handle(Decode(attempt=attempt, prompt=prompt(4), tokens=0, max_tokens=2, top_logits=count))
    bench.run()
    scores = {
        attempt: [event.scores for event in bench.of(attempt) if isinstance(event, Tokens)]
        for attempt in ("plain", "curious")
    }
    assert scores == {"plain": [(), ()], "curious": [(Score(1.0, 2.0),), (Score(1.0, 2.0),)]}


def test_a_long_prefill_delays_a_stream_by_one_chunk_at_most(bench: Bench) -> None:
    """Between two tokens of a running sequence no more than one chunk of prefill is computed."""
    bench.loop.handle(Decode(attempt="stream", prompt=prompt(2), tokens=0, max_tokens=15))
    bench.loop.turn()
    bench.loop.handle(prefill("long", prompt(100), 100))
    sent, computed = len(bench.answer("stream")), bench.loop.load().prefill_tokens_total
    while bench.loop.turn():
        sent, before = len(bench.answer("stream")), sent
        computed, computed_before = bench.loop.load().prefill_tokens_total, computed
        assert computed - computed_before <= CHUNK
        assert sent == before + 1 or sent == 15
    assert bench.one("long", Prefilled) and bench.answer("stream") == truth(bench, prompt(2), 15)


def test_a_share_of_the_time_is_kept_while_both_kinds_wait(engine: CostModelEngine) -> None:
    """With a clock on which every piece of work takes one second, a share of a quarter is one chunk to three steps."""
    time_s = 0.0

    def now() -> float:
        nonlocal time_s
        time_s += 0.5
        return time_s

    bench = Bench(engine, now=now)
    bench.loop.handle(SetShare(prefill_share=0.25, max_batch=4))
    bench.loop.handle(Decode(attempt="stream", prompt=prompt(2), tokens=0, max_tokens=100))
    bench.loop.turn()
    bench.loop.handle(prefill("long", prompt(180), 180))
    before = bench.loop.load()
    while len(bench.answer("stream")) < 60:
        bench.loop.turn()
    after = bench.loop.load()
    prefill_s = after.prefill_busy_s_total - before.prefill_busy_s_total
    decode_s = after.decode_busy_s_total - before.decode_busy_s_total
    assert prefill_s / (prefill_s + decode_s) == pytest.approx(0.25, abs=0.03)


def test_a_lower_batch_limit_lets_running_sequences_finish(bench: Bench) -> None:
    """Nobody is thrown out of the batch; whoever waits comes in when there is room by the new limit."""
    for number in range(5):
        bench.loop.handle(Decode(attempt=f"s{number}", prompt=prompt(1, number), tokens=0, max_tokens=6))
    bench.loop.turn()
    bench.loop.handle(SetShare(prefill_share=0.0, max_batch=1))
    bench.loop.turn()
    bench.loop.check()
    load = bench.loop.load()
    assert (load.active_sequences, load.queued_sequences) == (4, 1)
    bench.run()
    for number in range(5):
        assert bench.answer(f"s{number}") == truth(bench, prompt(1, number), 6)


def test_prefills_are_served_in_the_order_they_came(bench: Bench) -> None:
    for attempt, tokens in (("a", 40), ("b", 9), ("c", 20)):
        bench.loop.handle(prefill(attempt, prompt(tokens), tokens))
    assert bench.loop.load().queued_prefill_tokens == 69
    bench.run()
    assert [event.attempt for event in bench.events if isinstance(event, Prefilled)] == ["a", "b", "c"]


def test_more_sequences_than_the_batch_holds_wait_for_a_place(bench: Bench) -> None:
    for number in range(6):
        bench.loop.handle(Decode(attempt=f"s{number}", prompt=prompt(1, number), tokens=0, max_tokens=3))
    bench.loop.turn()
    load = bench.loop.load()
    assert (load.active_sequences, load.queued_sequences) == (4, 2)
    bench.run()
    for number in range(6):
        assert bench.answer(f"s{number}") == truth(bench, prompt(1, number), 3)


def test_the_work_is_timed_on_the_clock_that_the_node_has_too(engine: CostModelEngine) -> None:
    """A prefill tells when it began and ended, the first token of a decode when its step began; so the node can tell
    what was waited for before and after."""
    time_s = 0.0

    def now() -> float:
        nonlocal time_s
        time_s += 1.0
        return time_s

    bench = Bench(engine, now=now)
    asked_s = now()
    bench.loop.handle(prefill("a", prompt(30), 29))
    bench.run()
    prefilled = bench.one("a", Prefilled)
    assert isinstance(prefilled, Prefilled)
    assert asked_s < prefilled.started_s < prefilled.ended_s <= time_s
    asked_s = now()
    bench.loop.handle(Decode(attempt="a", prompt=prompt(30), tokens=29, max_tokens=2))
    bench.loop.turn()
    first = bench.of("a")[-1]
    assert isinstance(first, Tokens) and first.started_s is not None
    assert asked_s < first.started_s < time_s
    bench.loop.turn()
    assert [event.started_s for event in bench.of("a") if isinstance(event, Tokens)] == [first.started_s, None]


@pytest.mark.parametrize(
    "command",
    [
        prefill("a", b"abc", 0),
        prefill("a", packed(1, 64), 2),
        prefill("a", prompt(9), 10),
        prefill("a", prompt(9), -1),
        prefill("a", prompt(201), 201),
        prefill("a", prompt(9), 9, out_at=8 * SPAN_BYTES - 64),
        prefill("a", prompt(9), 9, out_at=-64),
        Decode(attempt="a", prompt=b"", tokens=0, max_tokens=1),
        Decode(attempt="a", prompt=prompt(9), tokens=9, max_tokens=1, held=whole(9)),
        Decode(attempt="a", prompt=prompt(9), tokens=8, max_tokens=0, held=whole(8)),
        Decode(attempt="a", prompt=prompt(9), tokens=0, max_tokens=193),
        Decode(attempt="a", prompt=prompt(9), tokens=8, max_tokens=1),
        Decode(attempt="a", prompt=prompt(9), tokens=8, max_tokens=1, held=whole(8, 8 * SPAN_BYTES - 64)),
    ],
)
def test_a_command_that_cannot_be_carried_out_fails_at_once(bench: Bench, command: Prefill | Decode) -> None:
    bench.loop.handle(command)
    (failed,) = bench.events
    assert isinstance(failed, Failed) and failed.detail
    bench.run()
    assert bench.events == [failed] and bench.leaves_nothing()


def test_the_longest_context_is_served(bench: Bench) -> None:
    """The last token drawn takes no position."""
    bench.loop.handle(Decode(attempt="a", prompt=prompt(9), tokens=0, max_tokens=192))
    bench.run()
    assert len(bench.answer("a")) == 192


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("again", ["prefill", "decode"])
def test_a_second_command_for_a_live_attempt_ends_it(bench: Bench, turns: int, again: str) -> None:
    """One failure is told, and the span is left alone from then on."""
    bench.loop.handle(prefill("a", prompt(60), 59, out_at=0))
    for _ in range(turns):
        bench.loop.turn()
    if again == "prefill":
        bench.loop.handle(prefill("a", prompt(60), 59, out_at=0))
    else:
        bench.loop.handle(Decode(attempt="a", prompt=prompt(60), tokens=0, max_tokens=3))
    assert isinstance(bench.of("a")[-1], Failed) and bench.leaves_nothing()
    said, written = len(bench.events), bytes(bench.pool)
    bench.run()
    assert len(bench.events) == said and bytes(bench.pool) == written


def test_a_second_prefill_beside_a_kept_sequence_is_refused(bench: Bench) -> None:
    for _ in range(2):
        bench.loop.handle(prefill("a", prompt(9), 8))
        bench.run()
    assert isinstance(bench.of("a")[-1], Failed) and bench.leaves_nothing()


def test_a_decode_from_a_span_beside_a_kept_sequence_is_refused(bench: Bench) -> None:
    bench.loop.handle(prefill("a", prompt(9), 8))
    bench.run()
    bench.loop.handle(Decode(attempt="a", prompt=prompt(9), tokens=8, max_tokens=3, held=whole(8)))
    assert isinstance(bench.of("a")[-1], Failed) and bench.leaves_nothing()


def test_what_the_engine_raises_fails_only_the_attempts_in_that_call(model: Path) -> None:
    bench = Bench(FragileEngine(model))
    poisoned = prompt(20)[:-8] + packed(POISON, 3)
    bench.loop.handle(prefill("poisoned", poisoned, 19, out_at=0))
    bench.loop.handle(prefill("sound", prompt(20), 19))
    bench.loop.handle(Decode(attempt="recomputes", prompt=poisoned, tokens=0, max_tokens=3))
    bench.loop.handle(Decode(attempt="streams", prompt=prompt(2), tokens=0, max_tokens=8))
    bench.run()
    for attempt in ("poisoned", "recomputes"):
        assert bench.of(attempt)[-1] == Failed(attempt, "RuntimeError: poisoned chunk")
    assert bench.one("sound", Prefilled)
    assert bench.answer("streams") == truth(bench, prompt(2), 8)


def test_a_step_that_raises_fails_its_batch_and_spares_the_rest(model: Path) -> None:
    bench = Bench(FragileEngine(model), max_batch=2)
    for attempt, tokens in (("a", prompt(1)), ("poisoned", packed(POISON)), ("next", prompt(1))):
        bench.loop.handle(Decode(attempt=attempt, prompt=tokens, tokens=0, max_tokens=2))
    bench.run()
    assert bench.of("a") == [Failed("a", "RuntimeError: poisoned step")]
    assert bench.of("poisoned") == [Failed("poisoned", "RuntimeError: poisoned step")]
    assert bench.answer("next") == truth(bench, prompt(1), 2)
    assert bench.leaves_nothing()


def test_the_cancel_of_an_unknown_attempt_is_answered(bench: Bench) -> None:
    bench.loop.handle(Cancel("nobody"))
    assert bench.events == [Cancelled("nobody")]


@pytest.mark.parametrize("turns", range(30))
def test_field_D2_a_cancel_at_any_point_leaves_nothing(bench: Bench, turns: int) -> None:
    """Queued, between chunks, kept, waiting, recomputing, decoding: after Cancelled there is no event and no write."""
    bench.loop.handle(prefill("spanned", prompt(60), 40, out_at=0))
    bench.loop.handle(prefill("kept", prompt(60), 40))
    attempts = {"spanned", "kept"}
    for number in range(6):
        bench.loop.handle(Decode(attempt=f"d{number}", prompt=prompt(20 * number + 1), tokens=0, max_tokens=9))
        attempts.add(f"d{number}")
    for _ in range(turns):
        bench.loop.turn()
        if any(isinstance(event, Prefilled) for event in bench.of("kept")) and bench.loop.load().kept_sequences:
            bench.loop.handle(Decode(attempt="kept", prompt=prompt(60), tokens=40, max_tokens=9))
    for attempt in sorted(attempts):
        bench.loop.handle(Cancel(attempt))
        bench.loop.check()
        assert bench.of(attempt)[-1] == Cancelled(attempt)
    assert bench.leaves_nothing()
    said, written = len(bench.events), bytes(bench.pool)
    assert not bench.loop.turn()
    assert len(bench.events) == said and bytes(bench.pool) == written
    bench.loop.handle(Decode(attempt="afterwards", prompt=prompt(20), tokens=0, max_tokens=3))
    bench.run()
    assert bench.answer("afterwards") == truth(bench, prompt(20), 3)


Job = tuple[int, int, int, bool]


@given(
    jobs=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 39), st.integers(1, 12), st.booleans()), max_size=8),
    turns_between=st.lists(st.integers(0, 4), min_size=8, max_size=8),
)
@settings(deadline=None)
def test_the_counters_equal_the_work_that_was_reported(
    engine: CostModelEngine, jobs: list[Job], turns_between: list[int]
) -> None:
    """Forwarded tokens are recomputed + output - 1 of each full answer, and one more of an answer that was stopped."""
    bench, stop = Bench(engine), tuple(range(0, 60, 10))
    for number, ((tokens, held, count, stops), turns) in enumerate(zip(jobs, turns_between, strict=False)):
        held = min(held, tokens - 1)
        bench.loop.handle(prefill(str(number), prompt(tokens), held))
        while not any(isinstance(event, Prefilled) for event in bench.of(str(number))):
            bench.loop.turn()
        stop_ids = stop if stops else ()
        command = Decode(
            attempt=str(number), prompt=prompt(tokens), tokens=held, max_tokens=count, stop_token_ids=stop_ids
        )
        bench.loop.handle(command)
        for _ in range(turns):
            bench.loop.turn()
    bench.run()
    ended = [event for event in bench.events if isinstance(event, Finished)]
    assert len(ended) == len(jobs)
    work = sum(each.recomputed_tokens + each.output_tokens - (each.reason == "length") for each in ended)
    load = bench.loop.load()
    assert load.decode_forwarded_tokens_total == work
    drawn = sum(each.output_tokens + (each.reason == "stop") for each in ended)
    assert load.decode_step_sequences_total == drawn and load.decode_steps_total <= drawn
    assert bench.loop.load().prefill_tokens_total == sum(min(held, tokens - 1) for tokens, held, _, _ in jobs)
