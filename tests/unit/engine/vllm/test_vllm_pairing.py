"""Which vLLM servers read each other's KV: those of one model whose caches hold the same bytes for the same tokens."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prfaas.engine.port import EngineInfo
from prfaas.engine.vllm.engine_info import ServedModel, engine_info
from prfaas.engine.vllm.geometry import Geometry, attention_layer, in_order, recurrent_layer
from tests.unit.scheduling.test_routing import far

SERVED = ServedModel(id="model", max_model_len=8192)
ATTENTION: dict[str, Any] = {"dtype": "bfloat16", "heads": 2, "key_width": 64, "value_width": 64}
STATE = [("bfloat16", (3, 8)), ("float32", (4, 16))]


def folder(path: Path, weights: bytes = b"weights", **settings: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 512} | settings))
    (path / "model.safetensors").write_bytes(weights)
    (path / "tokenizer.json").write_text("{}")
    return path


def geometry(block_tokens: int = 16, state: Any = STATE, **attention: Any) -> Geometry:
    rows = attention_layer("model.layers.1.attn", 0, block_tokens, **(ATTENTION | attention))
    return in_order([rows, recurrent_layer("model.layers.0.mixer", 1, block_tokens, "mamba2", state, 304)])


async def info(path: Path, cache: Geometry) -> EngineInfo:
    return await engine_info(path, cache, SERVED)


def paired(one: EngineInfo, other: EngineInfo) -> bool:
    """As routers and workers see it."""
    nodes = [replace(far("p0"), namespace=each.namespace) for each in (one, other)]
    assert nodes[0].can_push_to(nodes[1]) == nodes[1].can_push_to(nodes[0])
    return nodes[0].can_push_to(nodes[1])


@pytest.mark.parametrize(
    "other",
    [
        geometry(dtype="float16"),
        geometry(dtype="float32"),
        geometry(heads=4),
        geometry(key_width=128),
        geometry(heads=4, key_width=32, value_width=32, dtype="float16"),
        geometry(state=[("bfloat16", (3, 8)), ("bfloat16", (8, 16))]),
        geometry(state=[("float32", (4, 16)), ("bfloat16", (3, 8))]),
        in_order([attention_layer("model.layers.1.attn", 0, 16, **ATTENTION)]),
        in_order(
            [
                attention_layer("model.layers.1.attn", 0, 16, **ATTENTION),
                recurrent_layer("model.layers.0.mixer", 1, 16, "gdn_attention", STATE, 304),
            ]
        ),
    ],
)
async def test_caches_that_differ_are_never_paired(other: Geometry, tmp_path: Path) -> None:
    """In dtype, in width, in the order or kind of what a state holds, in which layers there are."""
    model = folder(tmp_path / "model")
    assert not paired(await info(model, geometry()), await info(model, other))


async def test_models_that_differ_are_never_paired(tmp_path: Path) -> None:
    """In a weight, in what is computed with the weights, in the tokenizer."""
    one = await info(folder(tmp_path / "one"), geometry())
    assert paired(one, await info(folder(tmp_path / "copy"), geometry()))
    assert not paired(one, await info(folder(tmp_path / "two", b"weightz"), geometry()))
    assert not paired(one, await info(folder(tmp_path / "rope", rope_theta=1e6), geometry()))
    other = folder(tmp_path / "tokenizer")
    (other / "tokenizer.json").write_text('{"version": "1.0"}')
    assert not paired(one, await info(other, geometry()))


async def test_blocks_may_differ_in_size(tmp_path: Path) -> None:
    """What crosses is rows of tokens, and a state at one length: how many rows a server keeps together is its own
    business, and so are the order of cache groups and how far its context reaches."""
    model = folder(tmp_path / "model")
    one, other = await info(model, geometry(16)), await info(model, geometry(528))
    assert paired(one, other)
    long = await engine_info(model, geometry(), ServedModel(id="else", max_model_len=1 << 20))
    assert paired(one, long) and long.max_context_tokens == 1 << 20
