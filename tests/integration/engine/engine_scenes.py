"""What the engine tests do over and over: make a prompt, prefill it into a span, restore the span, decode."""

from collections.abc import Sequence

import numpy as np

from prfaas.engine.hf import HfEngine
from prfaas.engine.hf_cache import HfCache
from prfaas.engine.port import StepInput, StepOutput
from prfaas.kvcache.layout import Part, chunk_ends
from prfaas.request import Sampling

GREEDY = Sampling(max_tokens=64)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Random token ids that are no special tokens."""
    return np.random.default_rng((seed, tokens)).integers(3, 512, tokens).tolist()


def packed(ids: Sequence[int]) -> bytes:
    return np.array(ids, "<u4").tobytes()


def prefill(engine: HfEngine, ids: Sequence[int]) -> HfCache:
    """A sequence that stays in the engine."""
    cache, start = engine.new_cache(), 0
    for stop in chunk_ends(len(ids), engine.info.chunk_tokens):
        engine.prefill(cache, packed(ids[start:stop]), None)
        start = stop
    return cache


def ship(engine: HfEngine, ids: Sequence[int]) -> bytearray:
    """The span of a sequence, each part written as soon as its layer has computed it."""
    tokens, layout = len(ids), engine.info.layout
    ends = chunk_ends(tokens, engine.info.chunk_tokens)
    parts = layout.parts(tokens, ends)
    cache, span, start = engine.new_cache(), bytearray(layout.span_bytes(tokens)), 0
    for stop in ends:

        def export(layer: int, stop: int = stop) -> None:
            for part in parts:
                if (part.layer, part.stop) == (layer, stop):
                    engine.export(cache, part, region(span, part))

        engine.prefill(cache, packed(ids[start:stop]), export)
        start = stop
    return span


def region(span: bytearray, part: Part) -> memoryview:
    return memoryview(span)[part.offset : part.offset + part.nbytes]


def whole_tensors(engine: HfEngine, tokens: int) -> tuple[Part, ...]:
    """One part per tensor."""
    return engine.info.layout.parts(tokens, (tokens,) if tokens else ())


def restore(engine: HfEngine, span: bytearray, tokens: int) -> HfCache:
    return engine.restore(tokens, [(part, region(span, part)) for part in whole_tensors(engine, tokens)])


def decode(
    engine: HfEngine, cache: HfCache, token_id: int, steps: int, sampling: Sampling = GREEDY
) -> list[StepOutput]:
    """`steps` outputs, each token fed to the next step."""
    outputs: list[StepOutput] = []
    for _ in range(steps):
        outputs += engine.step([StepInput(cache, token_id, sampling)])
        token_id = outputs[-1].token_id
    return outputs


def tokens_of(outputs: Sequence[StepOutput]) -> list[int]:
    return [output.token_id for output in outputs]
