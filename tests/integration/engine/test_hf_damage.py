"""Negative controls: the tiny models notice any wrong piece of a cache, so that equal tokens mean something."""

from collections.abc import Iterator

import pytest

from prfaas.engine.hf import HfEngine
from prfaas.engine.port import StepInput
from prfaas.kvcache.layout import Part, TensorKind, TensorSpec
from tests.integration.engine.engine_scenes import (
    GREEDY,
    decode,
    prefill,
    prompt,
    region,
    restore,
    ship,
    tokens_of,
    whole_tensors,
)

STEPS = 24
BLOCK_TOKENS = 64
NOTICEABLE = 1e-3


def tensors(engine: HfEngine, tokens: int) -> Iterator[tuple[Part, TensorSpec]]:
    for part in whole_tensors(engine, tokens):
        yield part, engine.info.layout.layers[part.layer][part.tensor]


def zeroed(span: bytearray, *ranges: tuple[int, int]) -> bytearray:
    """A copy with zeros at each (offset, length)."""
    damaged = bytearray(span)
    for offset, length in ranges:
        damaged[offset : offset + length] = bytes(length)
    return damaged


def damages(engine: HfEngine, span: bytearray, tokens: int) -> Iterator[tuple[str, bytearray]]:
    """Each tensor zeroed, and each block of tokens zeroed in all layers."""
    for part, spec in tensors(engine, tokens):
        yield f"{spec.name} of layer {part.layer}", zeroed(span, (part.offset, part.nbytes))
    rows = [(part.offset, spec.nbytes) for part, spec in tensors(engine, tokens) if spec.kind is TensorKind.TOKENS]
    for start in range(0, tokens, BLOCK_TOKENS):
        length = min(BLOCK_TOKENS, tokens - start)
        block = [(offset + start * row, length * row) for offset, row in rows]
        yield f"tokens from {start}", zeroed(span, *block)


@pytest.mark.parametrize("tokens", [200, 400])
def test_a_lost_tensor_or_block_changes_the_tokens(engine: HfEngine, tokens: int) -> None:
    """Whichever conv state, recurrent state, key or value tensor or 64-token block is zeroed, the text differs."""
    ids = prompt(tokens, seed=8)
    span = ship(engine, ids[:-1])
    right = tokens_of(decode(engine, restore(engine, span, tokens - 1), ids[-1], STEPS))
    for name, damaged in damages(engine, span, tokens - 1):
        wrong = tokens_of(decode(engine, restore(engine, damaged, tokens - 1), ids[-1], STEPS))
        assert wrong != right, f"{name} is lost, and nobody notices"


def test_the_state_of_one_token_later_changes_the_tokens(engine: HfEngine) -> None:
    """States at N where those at N-1 are wanted count the last token twice. A dense model has none to confuse."""
    ids = prompt(400, seed=9)
    span, late = ship(engine, ids[:-1]), prefill(engine, ids)
    right = tokens_of(decode(engine, restore(engine, span, 399), ids[-1], STEPS))
    for (target, spec), (source, _) in zip(tensors(engine, 399), tensors(engine, 400), strict=True):
        if spec.kind is TensorKind.STATE:
            engine.export(late, source, region(span, target))
    wrong = tokens_of(decode(engine, restore(engine, span, 399), ids[-1], STEPS))
    assert (wrong != right) is bool(engine.info.layout.state_bytes)


def shift(engine: HfEngine, right: bytearray, wrong: bytearray, ids: list[int]) -> float:
    """The largest change of a top logit over 9 steps that are fed the same tokens."""
    caches = [restore(engine, span, len(ids) - 9) for span in (right, wrong)]
    changes: list[float] = []
    for token in ids[-9:]:
        ours, theirs = (dict(out.top_logits) for out in engine.step([StepInput(c, token, GREEDY) for c in caches]))
        changes += [abs(ours[token_id] - theirs[token_id]) for token_id in ours.keys() & theirs.keys()]
    return max(changes)


def small_damages(engine: HfEngine, span: bytearray, tokens: int) -> Iterator[tuple[str, bytearray]]:
    """The least that can go wrong: one token's rows lost, two rows swapped, one row of a state lost."""
    for part, spec in tensors(engine, tokens):
        row = spec.nbytes
        if spec.kind is TensorKind.TOKENS:
            at = part.offset + 500 * row
            yield f"a row of {spec.name} in layer {part.layer}", zeroed(span, (at, row))
            swapped = bytearray(span)
            swapped[at : at + 2 * row] = span[at + row : at + 2 * row] + span[at : at + row]
            yield f"two rows of {spec.name} in layer {part.layer}", swapped
        elif spec.name == "recurrent":
            row //= spec.shape[0] * spec.shape[1]
            yield f"a row of the state of layer {part.layer}", zeroed(span, (part.offset, row))


def test_one_wrong_row_moves_the_logits(engine: HfEngine) -> None:
    """On a longer prompt the text may survive a single wrong row; the logits over several steps do not."""
    ids = prompt(700, seed=12)
    span = ship(engine, ids[:-9])
    assert shift(engine, span, span, ids) == 0.0
    for name, damaged in small_damages(engine, span, len(ids) - 9):
        assert shift(engine, span, damaged, ids) > NOTICEABLE, f"{name} is wrong, and nobody notices"
