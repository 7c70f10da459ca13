"""Whatever commands come in whatever order, each attempt ends once, with the right tokens, each export is answered
once, with the right rows, and no span is touched after it was given back."""

import struct
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prfaas.engine.cost_model import CostModelEngine, write_config
from prfaas.engine.messages import (
    Cancel,
    Cancelled,
    Decode,
    Event,
    Export,
    Exported,
    ExportFailed,
    Failed,
    Finished,
    PoolRead,
    Prefill,
    Prefilled,
    RowsReady,
    Tokens,
)
from prfaas.engine.port import StepInput
from prfaas.kvcache.layout import Extent, Window, chunk_ends
from prfaas.node.engine_loop import EngineLoop
from prfaas.request import Sampling

SPANS = 4
CHUNK = 8
SPAN_BYTES = 1 << 13
UNTOUCHED = bytes([0xA5]) * SPAN_BYTES
MAX_BATCH = 3
PICK = st.integers(0, 11)


@cache
def engine() -> CostModelEngine:
    with tempfile.TemporaryDirectory() as directory:
        write_config(
            Path(directory),
            time_scale=0,
            byte_scale=0,
            layers=4,
            chunk_tokens=CHUNK,
            vocab_tokens=64,
            max_context_tokens=99,
        )
        return CostModelEngine(Path(directory))


@cache
def truth(prompt: bytes, sampling: Sampling) -> bytes:
    """What the engine answers by itself."""
    sequence, answer = engine().new_cache(), [int.from_bytes(prompt[-4:], "little")]
    if len(prompt) > 4:
        engine().prefill(sequence, prompt[:-4], None)
    for _ in range(sampling.max_tokens):
        token_id = engine().step([StepInput(sequence, answer[-1], sampling)])[0].token_id
        if token_id in sampling.stop_token_ids:
            break
        answer.append(token_id)
    return struct.pack(f"<{len(answer) - 1}I", *answer[1:])


@cache
def rows_of(tokens: bytes) -> bytes:
    """The rows of these tokens, tensor by tensor."""
    sequence, count = engine().new_cache(), len(tokens) // 4
    engine().prefill(sequence, tokens, None)
    layout, rows = engine().info.layout, b""
    for part in layout.extent_parts(Extent(0, count), (count,), (Window(0, count, 0),)):
        into = bytearray(part.nbytes)
        engine().export(sequence, part, memoryview(into))
        rows += into
    return rows


@dataclass(slots=True)
class Try:
    """An attempt as the node would know it. `owed`: how many terminal events its accepted commands still owe. `export`:
    the span into which one is under way, and how many rows. `stays`: it lingers at its end."""

    prompt: bytes
    stop: int
    span: int | None
    owed: int = 1
    prefilled: bool = False
    sampling: Sampling | None = None
    answer: bytes = b""
    export: tuple[int, int] | None = None
    stays: bool = False
    ended: bool = False

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(sorted({*chunk_ends(self.stop, CHUNK), *self.checkpoints}))

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Every 6 tokens: some within a chunk, some at its end."""
        return tuple(range(6, self.stop + 1, 6))

    @property
    def window(self) -> Window | None:
        return None if self.span is None else Window(0, self.stop, self.span * SPAN_BYTES, state=self.stop > 0)


class Node(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.pool = bytearray(UNTOUCHED * SPANS)
        self.free = list(range(SPANS))
        self.tries: dict[str, Try] = {}
        self.count = 0
        self.loop = EngineLoop(engine(), memoryview(self.pool), self.hear, max_batch=MAX_BATCH)

    def hear(self, event: Event) -> None:
        attempt = getattr(event, "attempt", "")
        each = self.tries.get(attempt)
        if isinstance(event, Cancelled):
            self.give_back(attempt)
            return
        assert each is not None, f"{event} for an attempt that has ended"
        match event:
            case RowsReady():
                assert each.span is not None and each.sampling is None
            case Prefilled():
                assert event.tokens == each.stop and each.sampling is None
                each.owed, each.prefilled = each.owed - 1, True
                assert event.snapshots == each.checkpoints
            case PoolRead():
                assert each.span is not None
                self.free_span(each)
            case Tokens():
                each.answer += event.tokens
            case Finished():
                assert each.sampling is not None and each.answer == truth(each.prompt, each.sampling)
                assert event.output_tokens == len(each.answer) // 4
                assert event.recomputed_tokens == len(each.prompt) // 4 - each.stop
                each.owed -= 1
                assert each.owed == 0
                self.end(attempt, each)
            case Exported():
                self.exported(each)
                self.answered(attempt, each)
            case ExportFailed():
                self.answered(attempt, each)
            case Failed():
                each.stays, each.owed = False, 0
                self.end(attempt, each)
            case _:
                raise AssertionError(event)

    def end(self, attempt: str, each: Try) -> None:
        """It has no sequence any more, unless it lingers; an export that is under way is still answered."""
        each.ended = True
        self.free_span(each)
        if not each.stays and each.export is None:
            self.give_back(attempt)

    def exported(self, each: Try) -> None:
        assert each.export is not None
        span, count = each.export
        rows, at = rows_of((each.prompt + each.answer)[: 4 * count]), span * SPAN_BYTES
        layout = engine().info.layout
        for part in layout.extent_parts(Extent(0, count), (count,), (Window(0, count, at),)):
            assert self.pool[part.offset : part.offset + part.nbytes] == rows[: part.nbytes]
            rows = rows[part.nbytes :]

    def answered(self, attempt: str, each: Try) -> None:
        assert each.export is not None
        self.free_memory(each.export[0])
        each.export = None
        if each.ended and not each.stays:
            self.give_back(attempt)

    def give_back(self, attempt: str) -> None:
        if each := self.tries.pop(attempt, None):
            self.free_span(each)
            if each.export is not None:
                self.free_memory(each.export[0])

    def free_span(self, each: Try) -> None:
        if each.span is not None:
            self.free_memory(each.span)
            each.span = None

    def free_memory(self, span: int) -> None:
        self.pool[span * SPAN_BYTES : (span + 1) * SPAN_BYTES] = UNTOUCHED
        self.free.append(span)

    def new_attempt(self, each: Try) -> str:
        self.count += 1
        self.tries[f"t{self.count}"] = each
        return f"t{self.count}"

    @rule(tokens=st.integers(1, 40), first=st.integers(0, 63), cut=st.integers(0, 5), spanned=st.booleans())
    def prefill(self, tokens: int, first: int, cut: int, spanned: bool) -> None:
        prompt = struct.pack(f"<{tokens}I", *((first + 7 * place) % 64 for place in range(tokens)))
        span = self.free.pop() if spanned and self.free else None
        each = Try(prompt, max(0, tokens - 1 - cut), span)
        self.loop.handle(
            Prefill(
                attempt=self.new_attempt(each),
                prompt=prompt,
                stop=each.stop,
                ends=each.ends,
                checkpoints=each.checkpoints,
                out=each.window,
            )
        )

    @rule(
        pick=PICK,
        count=st.integers(1, 8),
        seed=st.integers(0, 3),
        stop=st.sampled_from([(), (1, 2, 3, 4, 5, 6, 7, 8)]),
        stays=st.booleans(),
    )
    def decode(self, pick: int, count: int, seed: int, stop: tuple[int, ...], stays: bool) -> None:
        ready = [
            attempt for attempt, each in self.tries.items() if each.prefilled and not each.sampling and not each.ended
        ]
        if not ready:
            return
        attempt = ready[pick % len(ready)]
        each = self.tries[attempt]
        each.sampling = Sampling(max_tokens=count, temperature=seed / 2, seed=seed, stop_token_ids=stop)
        each.owed, each.stays = each.owed + 1, stays
        command = Decode(
            attempt=attempt,
            prompt=each.prompt,
            tokens=each.stop,
            max_tokens=count,
            temperature=seed / 2,
            seed=seed,
            stop_token_ids=stop,
            snapshot_tokens=4,
            linger=stays,
            held=() if each.window is None else (each.window,),
        )
        self.loop.handle(command)

    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        if not self.tries:
            return
        attempt = list(self.tries)[pick % len(self.tries)]
        self.loop.handle(Cancel(attempt))
        assert attempt not in self.tries, "a cancel is answered at once"

    @rule(pick=PICK, rows=st.integers(1, 45))
    def export(self, pick: int, rows: int) -> None:
        """Whether there are so many rows or not."""
        idle = [attempt for attempt, each in self.tries.items() if each.export is None]
        if not idle or not self.free:
            return
        attempt = idle[pick % len(idle)]
        span = self.free.pop()
        self.tries[attempt].export = span, rows
        self.loop.handle(Export(attempt, (Window(0, rows, span * SPAN_BYTES),)))

    @rule()
    def cancel_a_stranger(self) -> None:
        self.loop.handle(Cancel("stranger"))

    @rule(pick=PICK)
    def repeat(self, pick: int) -> None:
        """The node sends a second command for an attempt in hand: the attempt is lost."""
        in_hand = [attempt for attempt, each in self.tries.items() if each.owed]
        if not in_hand:
            return
        attempt = in_hand[pick % len(in_hand)]
        self.loop.handle(Prefill(attempt=attempt, prompt=self.tries[attempt].prompt, stop=1, ends=(1,)))
        assert attempt not in self.tries or self.tries[attempt].ended

    @rule(torn=st.booleans())
    def send_nonsense(self, torn: bool) -> None:
        attempt = self.new_attempt(Try(b"", 0, None))
        self.loop.handle(Prefill(attempt=attempt, prompt=b"abc" if torn else struct.pack("<I", 64), stop=0, ends=()))
        assert attempt not in self.tries

    @rule(turns=st.integers(1, 6))
    def work(self, turns: int) -> None:
        for _ in range(turns):
            self.loop.turn()
            self.loop.check()

    @invariant()
    def free_spans_are_untouched(self) -> None:
        self.loop.check()
        for span in self.free:
            assert self.pool[span * SPAN_BYTES : (span + 1) * SPAN_BYTES] == UNTOUCHED

    def teardown(self) -> None:
        """Left alone, everything that was asked for is done."""
        if not hasattr(self, "loop"):
            return
        turns = 0
        while self.loop.turn():
            self.loop.check()
            turns += 1
            assert turns < 10_000
        assert not [attempt for attempt, each in self.tries.items() if each.owed or each.export]
        for attempt in list(self.tries):
            self.loop.handle(Cancel(attempt))
        load = self.loop.load()
        assert (load.queued_prefill_tokens, load.queued_sequences, load.active_sequences, load.kept_sequences) == (
            0,
        ) * 4
        assert sorted(self.free) == list(range(SPANS))
        self.free_spans_are_untouched()


Node.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestNode = Node.TestCase
