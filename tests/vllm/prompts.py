"""Prompts as token ids; the same seed, the same prompt."""

import random

import numpy as np

#: The tokens of the tiny models that mean nothing to their tokenizer.
FIRST, LAST = 300, 2000


def token_ids(length: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(FIRST, LAST) for _ in range(length)]


def packed(ids: list[int]) -> bytes:
    return np.array(ids, "<u4").tobytes()
