"""Messages between a node and its engine process: msgpack, one length-prefixed frame each, over a Unix socket.

Windows are places in the pool that both have mapped; `prompt` is packed uint32 token ids. Every accepted Prefill or
Decode of an attempt ends in exactly one of Prefilled, Finished, Failed, unless the node cancelled it; every Export in
one of Exported, ExportFailed.
"""

import msgspec

from prfaas.engine.port import EngineInfo
from prfaas.kvcache.layout import Window
from prfaas.kvcache.prefix import Change
from prfaas.request import Score


class Prefill(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Compute the prompt up to `stop`, in chunks that end at `ends` (R8).

    `held`: what the sequence is restored from instead of computing it: KV rows from 0 on without a hole, in order, and
    the states where they end, at `held_tokens` (None: where the last window ends; less than that when only part of it
    is good). PoolRead says when these windows are no longer needed.

    `out`: where the rows from `out.first` on and the states at `stop` are written as they come to exist, what was
    restored first; RowsReady announces them. Without it the sequence is kept in the engine for a later Decode of the
    same attempt. `checkpoints`: those of `ends`, and of where it is restored, at which the engine
    keeps a snapshot of the states.

    `linger`: sequence and snapshots stay after Prefilled, until Cancel, for Export.

    `salt`: whose prefixes it may share, in an engine that has a cache of its own; empty: nobody's.

    `hand_over`: the sequence stays for an engine elsewhere that fetches it over the engines' own network, and Prefilled
    says how; the engine keeps it on its own account."""

    attempt: str
    prompt: bytes
    stop: int
    ends: tuple[int, ...]
    held: tuple[Window, ...] = ()
    held_tokens: int | None = None
    out: Window | None = None
    checkpoints: tuple[int, ...] = ()
    linger: bool = False
    salt: bytes = b""
    hand_over: bool = False

    @property
    def resume_tokens(self) -> int:
        """Where the work begins."""
        return end_of(self.held) if self.held_tokens is None else self.held_tokens


class Decode(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Decode from position `tokens` on. The sequence is restored from `held` (KV rows 0:`tokens` without a hole, in
    order, and the states at `tokens`; PoolRead says when they are no longer needed), or it is what was handed over, or
    the one that this attempt's Prefill has kept.

    `snapshot_tokens`: at each multiple of it that the sequence reaches, a snapshot of its states takes the place of the
    one before (R6); 0: none. `linger`: sequence and snapshots stay after Finished, until Cancel, for Export."""

    attempt: str
    prompt: bytes
    tokens: int
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    constraint: str = ""
    held: tuple[Window, ...] = ()
    top_logits: int = 0
    snapshot_tokens: int = 0
    linger: bool = False
    salt: bytes = b""
    handover: bytes = b""


class Export(msgspec.Struct, frozen=True, tag=True):
    """Write into each window the rows that it is for, and with `state` the snapshot at its end. The attempt goes on
    meanwhile; it may be at work, kept or lingering. One at a time per attempt; Cancel ends it without an answer."""

    attempt: str
    windows: tuple[Window, ...]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Forget the attempt: its queue entry, its sequence. Answered by Cancelled, after which nothing touches its
    windows."""

    attempt: str


class SetShare(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """From now on give prefill this share of the time in which there is work of both kinds, and advance at most so many
    sequences together. Not answered."""

    prefill_share: float
    max_batch: int


Command = Prefill | Decode | Export | Cancel | SetShare


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded; first message but for Loads, which an engine that takes long to start sends meanwhile."""

    info: EngineInfo


class Unfit(msgspec.Struct, frozen=True, tag=True):
    """In place of Ready: it ends, because it cannot be what this setting wants."""

    setting: str
    why: str


class RowsReady(msgspec.Struct, frozen=True, tag=True):
    """This layer's rows up to `stop` are complete in `out`, and at `out.stop` its states. Layers come in their order
    for each chunk end, before the next layer computes; one that has nothing there says nothing."""

    attempt: str
    layer: int
    stop: int


class Prefilled(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """`tokens` were computed, from `started_s` to `ended_s` on the machine's monotonic clock, which all its processes
    share; there are `snapshots` at these boundaries. `cached`: beyond those held, what a cache of the engine's own
    had. `handover` is for the engine that decodes."""

    attempt: str
    tokens: int
    started_s: float
    ended_s: float
    snapshots: tuple[int, ...] = ()
    cached: int = 0
    handover: bytes = b""


class PoolRead(msgspec.Struct, frozen=True, tag=True):
    """The sequence was restored: its windows may be reused."""

    attempt: str


class Tokens(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """New tokens of one attempt, packed uint32. `top_logits` has one list per token when asked for, and `scores` one
    entry if the engine can.

    `started_s` comes with the first token: when its step began, restore included, on the machine's monotonic clock.
    """

    attempt: str
    tokens: bytes
    top_logits: tuple[tuple[tuple[int, float], ...], ...] = ()
    scores: tuple[Score, ...] = ()
    started_s: float | None = None


class Finished(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """`recomputed_tokens`: prompt tokens that decode forwarded, counted as they were forwarded. `kept_tokens`:
    positions that the sequence holds, the last token drawn takes none; `snapshots` of its states exist at these
    boundaries."""

    attempt: str
    reason: str
    recomputed_tokens: int
    output_tokens: int
    kept_tokens: int = 0
    snapshots: tuple[int, ...] = ()


class Failed(msgspec.Struct, frozen=True, tag=True):
    attempt: str
    detail: str


class Exported(msgspec.Struct, frozen=True, tag=True):
    """All windows of the Export are written."""

    attempt: str


class ExportFailed(msgspec.Struct, frozen=True, tag=True):
    """What the windows hold is undefined. The attempt itself goes on."""

    attempt: str
    detail: str


class Cancelled(msgspec.Struct, frozen=True, tag=True):
    attempt: str


class Prefixes(msgspec.Struct, frozen=True, tag=True):
    """What became of the cache that the engine has of its own, in the keys of its namespace. It begins empty."""

    changes: tuple[Change, ...]


class ServerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a server that an engine drives counts of itself, requests of others included: those that run and those that
    wait, the part of its KV memory that requests hold, tokens of prompts and of answers, and, of the tokens of prompts
    that it looked for in its own cache, those that it found."""

    running: int
    waiting: int
    kv_usage_ratio: float
    prompt_tokens_total: int
    generated_tokens_total: int
    prefix_queried_tokens_total: int
    prefix_hit_tokens_total: int


class Load(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """About four times a second, and whenever the engine falls idle."""

    queued_prefill_tokens: int
    queued_sequences: int
    active_sequences: int
    #: Waiting for their Decode.
    kept_sequences: int
    prefill_tokens_total: int
    decode_forwarded_tokens_total: int
    prefill_busy_s_total: float
    decode_busy_s_total: float
    #: Decode steps, the sequences that were in them together, and what they took without anything else.
    decode_steps_total: int = 0
    decode_step_sequences_total: int = 0
    decode_step_s_total: float = 0.0
    #: At their end, waiting for their Cancel.
    lingering_sequences: int = 0
    #: Of an engine that drives one, and how many sequences of other clients run there and wait.
    server: ServerLoad | None = None
    others_running: int = 0
    others_waiting: int = 0


#: How an engine begins.
Start = Ready | Unfit
Event = (
    Start
    | RowsReady
    | Prefilled
    | PoolRead
    | Tokens
    | Finished
    | Failed
    | Exported
    | ExportFailed
    | Cancelled
    | Prefixes
    | Load
)


def end_of(windows: tuple[Window, ...]) -> int:
    """Where the rows of these windows end."""
    return max((window.stop for window in windows), default=0)
