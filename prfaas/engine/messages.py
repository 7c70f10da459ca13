"""Messages between a node and its engine process: msgpack, one length-prefixed frame each, over a Unix socket.

`span` is an offset into the pool that both have mapped; `prompt` is packed uint32 token ids. Every accepted command for
an attempt ends in exactly one of Prefilled, Finished, Failed, unless the node cancelled it.
"""

import msgspec

from prfaas.engine.port import EngineInfo


class Prefill(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Compute tokens 0:`stop` of the prompt. With a `span` every part is written there and announced as it comes to
    exist; without one the sequence is kept in the engine for a later Decode of the same attempt. With `held`, the first
    so many tokens of it, which end a chunk, are read from the span `held_span` (of `stop` tokens) instead of computed;
    PoolRead says when that is no longer needed."""

    attempt: str
    prompt: bytes
    stop: int
    span: int | None = None
    held: int = 0
    held_span: int | None = None


class Decode(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Decode from position `tokens` on. With a `span` the sequence is restored from there (PoolRead says when the span
    is no longer needed), without one it is the sequence that this attempt's Prefill has kept."""

    attempt: str
    prompt: bytes
    tokens: int
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    span: int | None = None
    top_logits: int = 0


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Forget the attempt: its queue entry, its sequence. Answered by Cancelled, after which nothing touches its
    span."""

    attempt: str


class SetShare(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """From now on give prefill this share of the time in which there is work of both kinds, and advance at most so many
    sequences together. Not answered."""

    prefill_share: float
    max_batch: int


Command = Prefill | Decode | Cancel | SetShare


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded; first message."""

    info: EngineInfo


class PartsReady(msgspec.Struct, frozen=True, tag=True):
    """These parts (indices into the layout's parts for this chunk schedule) are complete in the span."""

    attempt: str
    parts: tuple[int, ...]


class Prefilled(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """`tokens` were computed."""

    attempt: str
    tokens: int
    queue_s: float
    compute_s: float


class PoolRead(msgspec.Struct, frozen=True, tag=True):
    """The sequence was restored: the span may be reused."""

    attempt: str


class Tokens(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """New tokens of one attempt, packed uint32. `top_logits` has one list per token when asked for.

    `first_queue_s` and `first_step_s` are set with the first token: time from Decode to the start of its step, and the
    step itself (restore included).
    """

    attempt: str
    tokens: bytes
    top_logits: tuple[tuple[tuple[int, float], ...], ...] = ()
    first_queue_s: float | None = None
    first_step_s: float | None = None


class Finished(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """`recomputed_tokens`: prompt tokens that decode forwarded, counted as they were forwarded."""

    attempt: str
    reason: str
    recomputed_tokens: int
    output_tokens: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    attempt: str
    detail: str


class Cancelled(msgspec.Struct, frozen=True, tag=True):
    attempt: str


class Load(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """About four times a second, and whenever the engine falls idle."""

    queued_prefill_tokens: int
    queued_sequences: int
    active_sequences: int
    kept_sequences: int
    prefill_tokens_total: int
    decode_forwarded_tokens_total: int
    prefill_busy_s_total: float
    decode_busy_s_total: float
    #: Decode steps, the sequences that were in them together, and what they took without anything else.
    decode_steps_total: int = 0
    decode_step_sequences_total: int = 0
    decode_step_s_total: float = 0.0


Event = Ready | PartsReady | Prefilled | PoolRead | Tokens | Finished | Failed | Cancelled | Load
