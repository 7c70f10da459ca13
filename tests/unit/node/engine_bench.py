"""An engine loop under test: over a pool of a few spans, on a cost model that does not wait, with all that it said."""

import struct
from collections.abc import Callable
from pathlib import Path

from prfaas.engine.cost_model import CostModelEngine, write_config
from prfaas.engine.messages import Command, Event, Prefill, Tokens
from prfaas.engine.port import StepInput
from prfaas.kvcache.layout import Window, chunk_ends
from prfaas.node.engine_loop import EngineLoop
from prfaas.request import Sampling

CHUNK = 8
SPAN_BYTES = 1 << 13


def write_model(directory: Path) -> None:
    write_config(
        directory, time_scale=0, byte_scale=0, layers=4, chunk_tokens=CHUNK, vocab_tokens=64, max_context_tokens=200
    )


class Bench:
    """A loop over a pool of a few spans, with everything it has said."""

    def __init__(self, engine: CostModelEngine, *, max_batch: int = 4, now: Callable[[], float] | None = None) -> None:
        self.engine, self.events = engine, list[Event]()
        self.pool, self._placed = bytearray(8 * SPAN_BYTES), 0
        clock = {} if now is None else {"now": now}
        self.loop = EngineLoop(engine, memoryview(self.pool), self.events.append, max_batch=max_batch, **clock)

    def run(self) -> None:
        """Until there is no more to do."""
        for _ in range(10_000):
            more = self.loop.turn()
            self.loop.check()
            if not more:
                return
        raise AssertionError("the loop never falls idle")

    def place(self, first: int, stop: int, *, state: bool = False) -> Window:
        """A window that nothing else has."""
        window = Window(first, stop, self._placed, state)
        self._placed += self.engine.info.layout.window_bytes(stop - first, state)
        assert self._placed <= len(self.pool)
        return window

    def content(self, window: Window) -> bytes:
        return bytes(
            self.pool[window.offset :][: self.engine.info.layout.window_bytes(window.stop - window.first, window.state)]
        )

    def do(self, *commands: Command) -> None:
        """One after the other, each to its end."""
        for command in commands:
            self.loop.handle(command)
            self.run()

    def of(self, attempt: str) -> list[Event]:
        return [event for event in self.events if getattr(event, "attempt", None) == attempt]

    def answer(self, attempt: str) -> list[int]:
        return [t for event in self.of(attempt) if isinstance(event, Tokens) for t in unpacked(event.tokens)]

    def one(self, attempt: str, kind: type) -> Event:
        (event,) = [event for event in self.of(attempt) if isinstance(event, kind)]
        return event

    def leaves_nothing(self) -> bool:
        load = self.loop.load()
        held = (load.queued_prefill_tokens, load.queued_sequences, load.active_sequences, load.kept_sequences)
        return held == (0, 0, 0, 0) and not load.lingering_sequences


def packed(*tokens: int) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def prefill(attempt: str, tokens: bytes, stop: int, *, out_at: int | None = None) -> Prefill:
    """From the start, in the usual chunks; with `out_at` written to the pool there."""
    out = None if out_at is None else Window(0, stop, out_at, state=stop > 0)
    return Prefill(attempt=attempt, prompt=tokens, stop=stop, ends=chunk_ends(stop, CHUNK), out=out)


def whole(tokens: int, offset: int = 0) -> tuple[Window, ...]:
    return (Window(0, tokens, offset, state=True),)


def unpacked(tokens: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(tokens) // 4}I", tokens)


def prompt(tokens: int, first: int = 5) -> bytes:
    return packed(*((first + 7 * position) % 60 for position in range(tokens)))


def cold_answer(engine: CostModelEngine, tokens: bytes, sampling: Sampling) -> list[int]:
    """What the engine says by itself, without any loop: the truth that every path must reproduce."""
    cache, ids = engine.new_cache(), unpacked(tokens)
    if len(ids) > 1:
        engine.prefill(cache, tokens[:-4], None)
    answer = [ids[-1]]
    while len(answer) <= sampling.max_tokens:
        token_id = engine.step([StepInput(cache, answer[-1], sampling)])[0].token_id
        if token_id in sampling.stop_token_ids:
            break
        answer.append(token_id)
    return answer[1:]


def truth(bench: Bench, tokens: bytes, count: int) -> list[int]:
    return cold_answer(bench.engine, tokens, Sampling(max_tokens=count))
