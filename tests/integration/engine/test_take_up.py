"""A prefill that is taken up where a lost transfer ended, on real models."""

import pytest

from prfaas.engine.hf import HfEngine
from prfaas.engine.messages import Decode, Event, Failed, PoolRead, Prefill, Prefilled, Tokens
from prfaas.node.engine_loop import EngineLoop
from tests.integration.engine.engine_scenes import packed, prompt, ship

TOKENS = 700


def run(engine: HfEngine, span: bytearray, *commands: Prefill | Decode) -> list[Event]:
    events: list[Event] = []
    loop = EngineLoop(engine, memoryview(span), events.append)
    for command in commands:
        loop.handle(command)
        loop.check()
        while loop.turn():
            loop.check()
    return events


def answer(events: list[Event]) -> list[object]:
    return [(event.tokens, event.top_logits) for event in events if isinstance(event, Tokens)]


@pytest.mark.parametrize("held", [256, 512, TOKENS])
def test_what_is_held_is_not_computed_again_and_changes_nothing(engine: HfEngine, held: int) -> None:
    """Bit for bit the answer of a prefill from the start. The rest of the span may hold anything. With states only a
    span that is whole will do."""
    ids = prompt(TOKENS + 1)
    whole = {"attempt": "a", "prompt": packed(ids), "stop": TOKENS}
    decode = Decode(attempt="a", prompt=packed(ids), tokens=TOKENS, max_tokens=4, top_logits=8)
    span = ship(engine, ids[:-1])
    for part in engine.info.layout.parts(TOKENS, (*tuple(range(256, TOKENS, 256)), TOKENS)):
        if part.stop > held:
            span[part.offset : part.offset + part.nbytes] = b"\xff" * part.nbytes
    events = run(engine, span, Prefill(**whole, held=held, held_span=0), decode)
    if held < TOKENS and engine.info.layout.state_bytes:
        assert isinstance(events[0], Failed) and "taken up" in events[0].detail
        return
    assert isinstance(events[0], PoolRead) and isinstance(events[1], Prefilled)
    assert events[1].tokens == TOKENS - held
    assert answer(events) == answer(run(engine, span, Prefill(**whole), decode)) != []


@pytest.mark.parametrize(
    "wrong",
    [
        {"held": 100, "held_span": 0},
        {"held": TOKENS + 1, "held_span": 0},
        {"held": -256, "held_span": 0},
        {"held": TOKENS},
        {"held": TOKENS, "held_span": 64},
        {"held": 0, "held_span": 0},
        {"held": TOKENS, "held_span": 0, "span": 0},
    ],
)
def test_what_cannot_be_taken_up_is_refused(engine: HfEngine, wrong: dict[str, int]) -> None:
    """In the middle of a chunk, beyond the end, from no span or one outside the pool, or to be shipped on."""
    pool = bytearray(engine.info.layout.span_bytes(TOKENS))
    command = Prefill(attempt="a", prompt=packed(prompt(TOKENS)), stop=TOKENS, **wrong)
    (failed,) = run(engine, pool, command)
    assert isinstance(failed, Failed)
