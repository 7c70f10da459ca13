"""What a simulated model costs: seconds of prefill and decode, bytes of KV, from a small measured table.

The defaults are the paper's case study (1T, KDA:MLA, 8xH200 per instance). `time_scale` and `byte_scale` shrink it so
that real processes on one machine show the same proportions.
"""

import itertools
import statistics
from typing import Literal

import msgspec

from prfaas.kvcache.layout import KvLayout, TensorKind, TensorSpec

MIB = 1 << 20
#: Contents are made of whole 64-bit words.
WORD_BYTES = 8
#: Of four layers three keep a state of fixed size and one keeps a row per token (KDA:MLA 3:1).
PERIOD = 4


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measured length: seconds to prefill it from nothing, and the size of its KV."""

    tokens: int
    prefill_s: float
    kv_mib: float


CASE_STUDY_H200 = (
    Point(1024, 0.44, 190.8),
    Point(8192, 0.72, 308.9),
    Point(32768, 1.84, 701.3),
    Point(131072, 7.40, 2316.3),
)


class CostConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`config.json` of a cost model."""

    model_type: Literal["cost_model"] = "cost_model"
    #: At least two lengths, rising.
    profile: tuple[Point, ...] = CASE_STUDY_H200
    #: Simulated seconds per second of the profile. 0 computes without waiting; it is no part of the namespace.
    time_scale: float = 0.1
    #: Bytes per byte of the profile. Higher loads links and memory more.
    byte_scale: float = 0.01
    #: A multiple of four.
    layers: int = 8
    #: Shorter chunks bound the wait of a decode step behind a prefill, and cost more turns.
    chunk_tokens: int = 256
    vocab_tokens: int = 512
    max_context_tokens: int = 131072
    #: A decode step takes `decode_base_s + decode_per_sequence_s * batch`, then scaled.
    decode_base_s: float = 0.007
    decode_per_sequence_s: float = 0.0009

    def __post_init__(self) -> None:
        points = ((0, 0.0), *((point.tokens, point.prefill_s) for point in self.profile))
        rising = all(a < b and s <= t for (a, s), (b, t) in itertools.pairwise(points))
        if len(self.profile) < 2 or not rising:
            raise ValueError("profile: needs two or more lengths above 0, rising in tokens and in seconds")
        if self.layers < PERIOD or self.layers % PERIOD:
            raise ValueError(f"layers: not a multiple of {PERIOD}")
        if min(self.chunk_tokens, self.vocab_tokens, self.max_context_tokens) < 1:
            raise ValueError("chunk_tokens, vocab_tokens, max_context_tokens: below 1")
        if min(self.time_scale, self.byte_scale, self.decode_base_s, self.decode_per_sequence_s) < 0:
            raise ValueError("scales and seconds: below 0")

    def prefill_s(self, tokens: int) -> float:
        """T(l): linear between the points of the profile and (0, 0), and on beyond the last."""
        points = [(0, 0.0), *((point.tokens, point.prefill_s) for point in self.profile)]
        pieces = list(itertools.pairwise(points))
        (l0, t0), (l1, t1) = next((piece for piece in pieces if tokens <= piece[1][0]), pieces[-1])
        return self.time_scale * (t0 + (t1 - t0) * (tokens - l0) / (l1 - l0))

    def step_s(self, batch: int) -> float:
        return self.time_scale * (self.decode_base_s + self.decode_per_sequence_s * batch)

    def layout(self) -> KvLayout:
        """S_kv(l) = a + b*l fitted to the profile, shared out over the layers in whole words (at least one each)."""
        lengths, sizes = zip(*((point.tokens, point.kv_mib * MIB) for point in self.profile), strict=True)
        b_bytes, a_bytes = statistics.linear_regression(lengths, sizes)
        rows = iter(_shares(b_bytes * self.byte_scale, self.layers // PERIOD))
        states = iter(_shares(a_bytes * self.byte_scale, self.layers - self.layers // PERIOD))
        return KvLayout(
            tuple(
                (
                    TensorSpec("kv", TensorKind.TOKENS, "uint8", (next(rows) * WORD_BYTES,))
                    if layer % PERIOD == PERIOD - 1
                    else TensorSpec("state", TensorKind.STATE, "float32", (next(states) * WORD_BYTES // 4,)),
                )
                for layer in range(self.layers)
            )
        )


def _shares(nbytes: float, layers: int) -> list[int]:
    """Words for each layer; the first ones take the remainder."""
    words = max(layers, round(nbytes / WORD_BYTES))
    return [words // layers + (layer < words % layers) for layer in range(layers)]
