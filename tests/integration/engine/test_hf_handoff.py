"""Prefill here, decode there: a sequence that went through a span continues exactly as one that never moved."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicCache

from prfaas.cluster import SEEDED_DRAWS
from prfaas.engine.hf import HfEngine
from prfaas.engine.port import StepInput, StepOutput
from prfaas.engine.sampling import draw
from prfaas.kvcache.layout import TensorKind
from prfaas.request import Sampling
from tests.integration.engine.engine_scenes import (
    GREEDY,
    decode,
    packed,
    prefill,
    prompt,
    region,
    restore,
    ship,
    tokens_of,
    whole_tensors,
)

STEPS = 24
SEEDED = Sampling(max_tokens=64, temperature=0.9, top_p=0.95, seed=1 << 63)


def handed_off(engine: HfEngine, ids: list[int], steps: int = STEPS) -> list[StepOutput]:
    """All but the last token prefilled and shipped; the last one is decode's own."""
    return decode(engine, restore(engine, ship(engine, ids[:-1]), len(ids) - 1), ids[-1], steps)


@pytest.mark.parametrize("tokens", [1, 2, 511, 512, 513, 514, 2000])
def test_a_handed_off_sequence_continues_bit_for_bit(engine: HfEngine, tokens: int) -> None:
    """Tokens and logits are equal, not close, around every chunk border."""
    ids = prompt(tokens)
    assert handed_off(engine, ids) == decode(engine, prefill(engine, ids[:-1]), ids[-1], STEPS)


@pytest.mark.parametrize("tokens", [1, 300, 700])
def test_the_engine_agrees_with_plain_transformers(engine: HfEngine, tokens: int) -> None:
    """Chunks, our cache layers and the hand-off change nothing: the model run in one go draws the same tokens."""
    ids, plain, probabilities = prompt(tokens, seed=1), [], []
    outputs = handed_off(engine, ids)
    cache, model = DynamicCache(config=engine._config), engine._model
    fed = torch.tensor([ids])
    with torch.inference_mode():
        for _ in range(STEPS):
            logits = model(fed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
            plain.append((int(logits.argmax()), float(logits.max())))
            probabilities.append(float(logits.log_softmax(-1).max()))
            fed = logits.argmax().reshape(1, 1)
    assert tokens_of(outputs) == [token for token, _ in plain]
    assert [output.top_logits[0][1] for output in outputs] == pytest.approx([logit for _, logit in plain], abs=1e-3)
    scores = [output.score for output in outputs if output.score is not None]
    assert [score.logit - score.log_normaliser for score in scores] == pytest.approx(probabilities, abs=1e-3)


def test_another_process_decodes_the_same(engine: HfEngine, model_dir: Path, tmp_path: Path) -> None:
    """Restored by a second process from the same folder, a sequence has the same namespace, tokens and logits."""
    ids = prompt(400, seed=2)
    (tmp_path / "span").write_bytes(span := ship(engine, ids[:-1]))
    script = Path(__file__).with_name("decode_elsewhere.py")
    arguments = [sys.executable, str(script), str(model_dir), str(tmp_path / "span"), "399", str(ids[-1]), str(STEPS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, check=True, timeout=60)
    namespace, outputs = json.loads(run.stdout)
    here = decode(engine, restore(engine, span, 399), ids[-1], STEPS)
    assert namespace == engine.info.namespace
    assert outputs == [[output.token_id, [list(pair) for pair in output.top_logits]] for output in here]


def test_sequences_decoded_together_do_not_touch_each_other(engine: HfEngine) -> None:
    """Four sequences of different lengths in one batch draw what each draws alone, two of them from the same span."""
    prompts = [prompt(length, seed=3) for length in (40, 300, 300, 513)]
    alone = [handed_off(engine, ids) for ids in prompts]
    caches = [restore(engine, ship(engine, ids[:-1]), len(ids) - 1) for ids in prompts]
    fed, together = [ids[-1] for ids in prompts], []
    for _ in range(STEPS):
        batch = [StepInput(cache, token, GREEDY) for cache, token in zip(caches, fed, strict=True)]
        together.append(engine.step(batch))
        fed = [output.token_id for output in together[-1]]
    assert [list(outputs) for outputs in zip(*together, strict=True)] == alone


def test_what_was_restored_can_be_exported_again(engine: HfEngine) -> None:
    """Every byte of the span comes back, whatever the width of its tensor, and nothing else is written."""
    span = ship(engine, prompt(300, seed=4))
    cache, copy = restore(engine, span, 300), bytearray(len(span))
    for part in whole_tensors(engine, 300):
        engine.export(cache, part, region(copy, part))
    assert copy == span
    assert cache.tokens == 300


def test_a_span_may_be_reused_after_restore(engine: HfEngine) -> None:
    """Restore copies: wiping the span does not reach the sequence, decoding does not reach the span."""
    ids = prompt(300, seed=5)
    span = ship(engine, ids[:-1])
    before, cache = bytes(span), restore(engine, span, 299)
    first = decode(engine, cache, ids[-1], 1)
    assert span == before
    span[:] = bytes(len(span))
    rest = decode(engine, cache, first[-1].token_id, STEPS - 1)
    assert first + rest == decode(engine, prefill(engine, ids[:-1]), ids[-1], STEPS)


def test_a_layer_is_announced_before_the_next_one_starts(engine: HfEngine) -> None:
    """When layer i is announced it holds the chunk, and no later layer does."""
    cache, called, held = engine.new_cache(), [], []
    parts = [
        part
        for part in whole_tensors(engine, 100)
        if engine.info.layout.layers[part.layer][part.tensor].kind is TensorKind.TOKENS
    ]

    def on_layer(layer: int) -> None:
        called.append(layer)
        held.append(set())
        for part in parts:
            try:
                engine.export(cache, part, memoryview(bytearray(part.nbytes)))
                held[-1].add(part.layer)
            except AssertionError:
                pass

    engine.prefill(cache, packed(prompt(100)), on_layer)
    attention = {part.layer for part in parts}
    assert called == [0, 1, 2, 3]
    assert held == [{layer for layer in attention if layer <= announced} for announced in called]


def test_an_error_of_the_hook_stops_the_chunk_and_leaves_no_hook(engine: HfEngine) -> None:
    """The caller sees its own error, later layers are not computed, and the next prefill calls nobody."""
    called = []

    def fail(layer: int) -> None:
        called.append(layer)
        if layer == 1:
            raise ConnectionResetError("peer is gone")

    with pytest.raises(ConnectionResetError, match="peer is gone"):
        engine.prefill(engine.new_cache(), packed(prompt(50)), fail)
    ids = prompt(50, seed=6)
    assert tokens_of(handed_off(engine, ids)) == tokens_of(decode(engine, prefill(engine, ids[:-1]), ids[-1], STEPS))
    assert called == [0, 1]


def test_a_state_is_exported_only_where_it_is_valid(engine: HfEngine) -> None:
    """There is no way back to an earlier state: asking for it is our bug, and noticed."""
    cache = prefill(engine, prompt(101))
    states = [
        part
        for part in whole_tensors(engine, 100)
        if engine.info.layout.layers[part.layer][part.tensor].kind is TensorKind.STATE
    ]
    for part in states:
        with pytest.raises(AssertionError, match="a state exists only where"):
            engine.export(cache, part, memoryview(bytearray(part.nbytes)))
    assert len(states) == (0 if engine.info.model == "qwen3" else 4)


def test_a_stream_replayed_elsewhere_draws_the_same_tokens(engine: HfEngine) -> None:
    """Prompt and tokens so far, prefilled anew, continue as the lost sequence would have: draws go by position."""
    ids, sampling = prompt(200, seed=7), replace(GREEDY, temperature=0.8, top_p=0.95, seed=11)
    whole = tokens_of(decode(engine, prefill(engine, ids[:-1]), ids[-1], STEPS, sampling))
    told = ids + whole[:9]
    assert tokens_of(decode(engine, prefill(engine, told[:-1]), told[-1], STEPS - 9, sampling)) == whole[9:]
    assert whole != tokens_of(decode(engine, prefill(engine, ids[:-1]), ids[-1], STEPS))


def test_each_token_is_drawn_for_its_own_position(engine: HfEngine) -> None:
    """So hot that the best eight are equally likely: the rank drawn is the luck of the absolute position."""
    ids, hot = prompt(100, seed=12), replace(GREEDY, temperature=1e6, top_p=7.5 / 512, seed=3)
    outputs = decode(engine, prefill(engine, ids[:-1]), ids[-1], STEPS, hot)
    ranks = [[token for token, _ in output.top_logits].index(output.token_id) for output in outputs]
    eight = np.zeros(8, np.float32)
    assert ranks == [draw(eight, replace(hot, top_p=1.0), position) for position in range(100, 100 + STEPS)]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_sequence_can_be_gone_on_with_elsewhere(engine: HfEngine, sampling: Sampling) -> None:
    """As `SEEDED_DRAWS` promises: with the tokens drawn so far behind the prompt, whoever prefills them draws the rest,
    wherever they end in a chunk."""
    assert SEEDED_DRAWS in engine.info.capabilities
    ids = prompt(500, seed=6)
    drawn = tokens_of(decode(engine, prefill(engine, ids[:-1]), ids[-1], STEPS, sampling))
    assert len(set(drawn)) > 3
    for known in (1, 11, 12, 13, STEPS - 1):
        replayed = [*ids, *drawn[:known]]
        rest = decode(engine, prefill(engine, replayed[:-1]), replayed[-1], STEPS - known, sampling)
        assert tokens_of(rest) == drawn[known:]
