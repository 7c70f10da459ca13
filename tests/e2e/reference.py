"""The reference of every end-to-end answer: the same engine alone, on the same chunk schedule."""

import itertools
from functools import lru_cache
from pathlib import Path

import numpy as np

from prfaas.engine.loading import load_engine
from prfaas.engine.port import StepInput
from prfaas.kvcache.layout import chunk_ends
from prfaas.request import TOKEN_BYTES, Sampling


def token_ids(length: int, seed: int = 0, vocab: int = 500) -> list[int]:
    """A prompt of that many tokens, no two alike for different seeds."""
    return [int(token) for token in np.random.default_rng(seed).integers(3, vocab, length)]


def packed(ids: list[int]) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()


class Alone:
    """One engine in one process: prefill to N-1 by chunks, then the last token alone, then greedy decode."""

    def __init__(self, model_dir: Path) -> None:
        self.engine = load_engine(model_dir)
        self.tokens = lru_cache(maxsize=256)(self._tokens)

    def answer(self, ids: list[int], max_tokens: int) -> list[int]:
        return self.tokens(tuple(ids), max_tokens)[0]

    def answer_with_gaps(self, ids: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
        """The tokens, and how far the best logit of each was from the second, as a part of the spread of the best
        eight (which is less than the spread of all)."""
        return self.tokens(tuple(ids), max_tokens)

    def _tokens(self, ids: tuple[int, ...], max_tokens: int) -> tuple[list[int], list[float]]:
        engine, prompt = self.engine, packed(list(ids))
        cache, sampling = engine.new_cache(), Sampling(max_tokens=max_tokens)
        ends = chunk_ends(len(ids) - 1, engine.info.chunk_tokens)
        for start, stop in itertools.pairwise((0, *ends)):
            engine.prefill(cache, prompt[start * TOKEN_BYTES : stop * TOKEN_BYTES], None)
        output, gaps = [ids[-1]], list[float]()
        for _ in range(max_tokens):
            [step] = engine.step([StepInput(cache, output[-1], sampling)])
            output.append(step.token_id)
            logits = [logit for _, logit in step.top_logits]
            gaps.append((logits[0] - logits[1]) / (logits[0] - logits[-1]))
        return output[1:], gaps
