"""What an engine must be able to do. Engines live in a process of their own and compute on one thread.

An engine is synchronous and knows nothing of attempts, sockets or pools: `prfaas.node.engine_process` owns the order of
work and hands it memory to read from and write to.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from prfaas.cluster import Namespace
from prfaas.kvcache.layout import KvLayout, Part
from prfaas.request import Sampling, Score

#: How many of the highest logits an engine gives at the most.
TOP_LOGITS = 20


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is. `chunk_tokens` is the longest chunk of a prefill, and chunks end at its
    absolute multiples. `repeatable`: the same tokens have the same bytes, whatever chunks they were computed in."""

    model: str
    namespace: Namespace
    layout: KvLayout
    chunk_tokens: int
    max_context_tokens: int
    vocab_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    repeatable: bool = False
    #: What it can do that not every engine can, in the words of `prfaas.cluster`.
    capabilities: tuple[str, ...] = ()
    #: Digest of the tokenizer that its token ids belong to.
    tokenizer: str = ""


class Cache(Protocol):
    """One sequence inside the engine. `tokens` is how many positions it holds."""

    @property
    def tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StepInput:
    """One sequence of a decode step: feed `token_id` at position `cache.tokens` and draw the next token."""

    cache: Cache
    token_id: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The token drawn, and the highest logits as (token id, logit), best first. An engine with the capability LOGPROBS
    gives TOP_LOGITS of them and the score of the token."""

    token_id: int
    top_logits: tuple[tuple[int, float], ...] = ()
    score: Score | None = None


LayerHook = Callable[[int], None]


class Engine(Protocol):
    """The engine port. No method is called from more than one thread."""

    @property
    def info(self) -> EngineInfo: ...

    def new_cache(self) -> Cache:
        """An empty sequence."""
        ...

    def prefill(self, cache: Cache, chunk: bytes, on_layer: LayerHook | None) -> None:
        """Append one chunk (packed uint32 token ids). `on_layer(i)` is called as soon as layer i holds the chunk and
        before layer i+1 starts; within it, `export` may be called for layer i."""
        ...

    def export(self, cache: Cache, part: Part, into: memoryview) -> None:
        """Write one part of the cache into `into` (exactly `part.nbytes` long): any rows that the sequence holds,
        restored ones as they came, or a state, which exists only where the sequence ends. One copy, no temporary of
        that size where the tensor's memory order allows it."""
        ...

    def restore(self, tokens: int, parts: Iterable[tuple[Part, memoryview]]) -> Cache:
        """A sequence of `tokens` tokens out of its rows and states: of each token tensor the rows 0:tokens, in pieces
        that follow each other, and every state. Copies what it keeps: the memory may be reused when this returns, and
        nothing that the sequence does later reaches it."""
        ...

    def step(self, batch: Sequence[StepInput]) -> list[StepOutput]:
        """One decode step for several sequences, each advanced by one position. Batched or one by one, as the model's
        cache allows; the tokens must not depend on who else is in the batch."""
        ...
