"""The cost model takes a large model's time and makes bytes that tell every damage."""

import itertools
import json
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.engine.cost_model import CostCache, CostModelEngine, write_config
from prfaas.engine.cost_profile import CASE_STUDY_H200, MIB, CostConfig
from prfaas.engine.port import StepInput
from prfaas.errors import ConfigError
from prfaas.kvcache.layout import Part, TensorKind, chunk_ends
from prfaas.request import Sampling

GREEDY = Sampling(max_tokens=100)

Build = Callable[..., CostModelEngine]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    def build(**overrides: object) -> CostModelEngine:
        directory = tmp_path_factory.mktemp("model")
        write_config(directory, **({"time_scale": 0, "byte_scale": 0} | overrides))
        return CostModelEngine(directory)

    return build


@pytest.fixture(scope="module")
def engine(build: Build) -> CostModelEngine:
    """As few bytes as there can be, and no waiting."""
    return build()


def prompt(tokens: int, first: int = 7) -> bytes:
    return struct.pack(f"<{tokens}I", *((first + 31 * position) % 512 for position in range(tokens)))


def prefilled(engine: CostModelEngine, tokens: bytes, ends: tuple[int, ...]) -> tuple[CostCache, bytearray]:
    """A sequence computed in chunks that end at `ends`, and the span that was exported on the way."""
    count, cache = len(tokens) // 4, engine.new_cache()
    span = bytearray(engine.info.layout.span_bytes(count))
    parts = engine.info.layout.parts(count, ends)
    for start, end in itertools.pairwise((0, *ends)):

        def export(layer: int, end: int = end) -> None:
            for part in parts:
                if (part.stop, part.layer) == (end, layer):
                    engine.export(cache, part, memory(span, part))

        engine.prefill(cache, tokens[4 * start : 4 * end], export)
    return cache, span


def memory(span: bytearray, part: Part) -> memoryview:
    return memoryview(span)[part.offset : part.offset + part.nbytes]


def whole(engine: CostModelEngine, tokens: int) -> tuple[Part, ...]:
    return engine.info.layout.parts(tokens, (tokens,))


def restored(engine: CostModelEngine, tokens: int, span: bytearray) -> CostCache:
    return engine.restore(tokens, [(part, memory(span, part)) for part in whole(engine, tokens)])


def drawn(
    engine: CostModelEngine, cache: CostCache, token_id: int, count: int, sampling: Sampling = GREEDY
) -> list[int]:
    tokens = [token_id]
    for _ in range(count):
        tokens.append(engine.step([StepInput(cache, tokens[-1], sampling)])[0].token_id)
    return tokens[1:]


@given(cuts=st.sets(st.integers(1, 39)))
def test_the_bytes_do_not_depend_on_the_chunks(engine: CostModelEngine, cuts: set[int]) -> None:
    """Whatever the chunk schedule, the span holds the same bytes and the sequence draws the same tokens."""
    cold, span = prefilled(engine, prompt(40), (40,))
    cache, same_span = prefilled(engine, prompt(40), (*sorted(cuts), 40))
    assert same_span == span
    assert drawn(engine, cache, 5, 6) == drawn(engine, cold, 5, 6)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(max_tokens=9, temperature=0.8, seed=3)])
def test_a_restored_sequence_draws_what_a_local_one_draws(build: Build, sampling: Sampling) -> None:
    engine = build(byte_scale=1e-4)
    local, span = prefilled(engine, prompt(300), chunk_ends(300, 64))
    assert drawn(engine, restored(engine, 300, span), 5, 12, sampling) == drawn(engine, local, 5, 12, sampling)


def test_every_flipped_byte_changes_the_tokens(engine: CostModelEngine) -> None:
    """No byte of a transfer is without effect, rows and states alike."""
    _, span = prefilled(engine, prompt(12), (12,))
    sound = drawn(engine, restored(engine, 12, span), 5, 4)
    for part in whole(engine, 12):
        for offset in range(part.offset, part.offset + part.nbytes):
            span[offset] ^= 1
            assert drawn(engine, restored(engine, 12, span), 5, 4) != sound, (part, offset)
            span[offset] ^= 1
    assert drawn(engine, restored(engine, 12, span), 5, 4) == sound


@given(cut=st.integers(1, 29), first=st.integers(0, 39), data=st.data())
def test_any_rows_can_be_exported_whether_restored_or_computed(
    engine: CostModelEngine, cut: int, first: int, data: st.DataObject
) -> None:
    """The bytes of a sequence that was never moved, also after steps of decode; restored rows as they came."""
    stop = data.draw(st.integers(first + 1, 40))
    cold, _ = prefilled(engine, prompt(30), (30,))
    _, span = prefilled(engine, prompt(30)[: 4 * cut], (cut,))
    cache = restored(engine, cut, span)
    engine.prefill(cache, prompt(30)[4 * cut :], None)
    assert drawn(engine, cache, 5, 10) == drawn(engine, cold, 5, 10)
    for layer, (tensor,) in enumerate(engine.info.layout.layers):
        if tensor.kind is TensorKind.TOKENS:
            nbytes = (stop - first) * tensor.nbytes
            part, ours, theirs = Part(0, layer, 0, first, stop, 0, nbytes), bytearray(nbytes), bytearray(nbytes)
            engine.export(cache, part, memoryview(ours))
            engine.export(cold, part, memoryview(theirs))
            assert ours == theirs


def test_damaged_rows_are_exported_as_they_came(build: Build) -> None:
    """Rows of several words, one of which is wrong, the first or another."""
    engine = build(byte_scale=1e-2)
    assert engine.info.layout.bytes_per_token > 100
    _, span = prefilled(engine, prompt(12), (12,))
    for part in whole(engine, 12):
        if engine.info.layout.layers[part.layer][part.tensor].kind is TensorKind.TOKENS:
            span[part.offset] ^= 1
            span[part.offset + part.nbytes - 1] ^= 1
            copy = bytearray(part.nbytes)
            engine.export(restored(engine, 12, span), part, memoryview(copy))
            assert copy == memory(span, part)


def test_damage_survives_a_prefill_that_continues_from_it(engine: CostModelEngine) -> None:
    """A sequence that was restored damaged and then prefilled further stays wrong; a sound one is like a cold one."""
    cold, _ = prefilled(engine, prompt(30), (30,))
    _, span = prefilled(engine, prompt(30)[: 4 * 12], (12,))
    expected = drawn(engine, cold, 5, 4)
    for damaged_byte in (None, *(part.offset + part.nbytes - 1 for part in whole(engine, 12))):
        if damaged_byte is not None:
            span[damaged_byte] ^= 0x80
        cache = restored(engine, 12, span)
        engine.prefill(cache, prompt(30)[4 * 12 :], None)
        assert (drawn(engine, cache, 5, 4) == expected) == (damaged_byte is None)
        if damaged_byte is not None:
            span[damaged_byte] ^= 0x80


def test_a_replay_of_prompt_and_answer_goes_on_with_the_same_tokens(engine: CostModelEngine) -> None:
    """Tokens depend on the sequence, not on where it was handed over: another node can take over in mid-stream."""
    cache, _ = prefilled(engine, prompt(20), (20,))
    answer = drawn(engine, cache, 5, 10)
    replay, _ = prefilled(engine, prompt(20) + struct.pack("<5I", 5, *answer[:4]), (25,))
    assert drawn(engine, replay, answer[4], 5) == answer[5:]


def test_tokens_do_not_depend_on_the_batch(engine: CostModelEngine) -> None:
    caches = [prefilled(engine, prompt(20, first), (20,))[0] for first in range(4)]
    together = [output.token_id for output in engine.step([StepInput(cache, 5, GREEDY) for cache in caches])]
    alone = [drawn(engine, prefilled(engine, prompt(20, first), (20,))[0], 5, 1)[0] for first in range(4)]
    assert together == alone


def test_a_seed_draws_the_same_tokens_again_and_another_seed_others(engine: CostModelEngine) -> None:
    def run(temperature: float, seed: int) -> list[int]:
        cache, _ = prefilled(engine, prompt(20), (20,))
        return drawn(engine, cache, 5, 8, Sampling(max_tokens=8, temperature=temperature, seed=seed))

    assert run(0.7, 1) == run(0.7, 1)
    assert run(0.7, 1) != run(0.7, 2)
    assert run(0.0, 1) == run(0.0, 2), "greedy draws have no seed"


def test_the_greedy_token_has_the_highest_logit(engine: CostModelEngine) -> None:
    cache, _ = prefilled(engine, prompt(20), (20,))
    (output,) = engine.step([StepInput(cache, 5, GREEDY)])
    logits = [logit for _, logit in output.top_logits]
    assert output.top_logits[0][0] == output.token_id
    assert logits == sorted(logits, reverse=True)
    assert len({token_id for token_id, _ in output.top_logits}) == len(output.top_logits)


def test_layers_are_announced_in_order_with_the_chunk_in_the_cache(engine: CostModelEngine) -> None:
    cache, seen = engine.new_cache(), []
    engine.prefill(cache, prompt(16), lambda layer: seen.append((layer, cache.tokens)))
    assert seen == [(layer, 16) for layer in range(8)]


def test_a_restore_without_one_of_the_tensors_is_refused(engine: CostModelEngine) -> None:
    _, span = prefilled(engine, prompt(12), (12,))
    with pytest.raises(ValueError, match="0 of 12 tokens"):
        engine.restore(12, [(part, memory(span, part)) for part in whole(engine, 12)[1:]])


def test_the_default_is_the_case_study_of_the_paper() -> None:
    """Prefill times are exact at the measured lengths; sizes are the line through them."""
    config = CostConfig(time_scale=1, byte_scale=1)
    layout = config.layout()
    for point in CASE_STUDY_H200:
        assert config.prefill_s(point.tokens) == pytest.approx(point.prefill_s)
        assert layout.size_bytes(point.tokens) == pytest.approx(point.kv_mib * MIB, rel=0.02)
    kinds = [tensors[0].kind for tensors in layout.layers]
    assert kinds.count(TensorKind.STATE) == 3 * kinds.count(TensorKind.TOKENS)


def test_prefill_time_is_linear_between_the_points_and_beyond() -> None:
    config = CostConfig(time_scale=0.5)
    assert config.prefill_s(0) == 0
    assert config.prefill_s(512) == pytest.approx(0.5 * 0.22)
    assert config.prefill_s(20480) == pytest.approx(0.5 * (0.72 + 1.84) / 2)
    assert config.prefill_s(229376) == pytest.approx(0.5 * (7.40 + 7.40 - 1.84))


def test_prefill_and_steps_take_their_simulated_time(build: Build) -> None:
    """Chunks of a prompt take T(length) together, a step the same for any batch but for the share of each sequence."""
    engine = build(time_scale=0.1)
    started_s = time.monotonic()
    prefilled(engine, prompt(1024), chunk_ends(1024, 256))
    assert time.monotonic() - started_s >= 0.044
    caches = [engine.new_cache() for _ in range(20)]
    started_s = time.monotonic()
    for _ in range(10):
        engine.step([StepInput(cache, 5, GREEDY) for cache in caches])
    assert time.monotonic() - started_s >= 10 * 0.1 * (0.007 + 20 * 0.0009) - 0.005


def test_speed_is_no_part_of_the_namespace_and_geometry_is(build: Build) -> None:
    """A fast and a slow node of the same model exchange KV."""
    assert build().info.namespace == build(time_scale=0.01).info.namespace
    assert build().info.namespace != build(byte_scale=0.01).info.namespace
    assert build().info.namespace != build(vocab_tokens=300).info.namespace


@pytest.mark.parametrize(
    "overrides",
    [
        {"layer": 8},
        {"layers": 6},
        {"time_scale": -1},
        {"profile": []},
        {"chunk_tokens": 0},
        {"profile": [{"tokens": 1}]},
    ],
)
def test_a_wrong_configuration_is_refused(tmp_path: Path, overrides: dict[str, object]) -> None:
    """Both when it is written and when it is read."""
    with pytest.raises(msgspec.ValidationError):
        write_config(tmp_path, **overrides)
    write_config(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | overrides))
    with pytest.raises(ConfigError):
        CostModelEngine(tmp_path)


def test_the_cost_model_needs_no_torch() -> None:
    check = "import sys, prfaas.engine.cost_model; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
