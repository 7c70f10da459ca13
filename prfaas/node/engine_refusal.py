"""Which commands an engine process refuses before any work is done. Pure."""

import itertools
from collections.abc import Sequence

import numpy as np

from prfaas.engine.messages import Decode, Prefill
from prfaas.engine.port import EngineInfo
from prfaas.kvcache.layout import ALIGN_BYTES, KvLayout, Window
from prfaas.request import TOKEN_BYTES


def refusal(command: Prefill | Decode, info: EngineInfo, pool_bytes: int) -> str | None:
    """Why the command cannot be carried out as written, or None."""
    prompt_tokens, torn_bytes = divmod(len(command.prompt), TOKEN_BYTES)
    if torn_bytes:
        return f"a prompt of {len(command.prompt)} bytes is not packed uint32"
    highest = int(np.frombuffer(command.prompt, "<u4").max(initial=0))
    if highest >= info.vocab_tokens:
        return f"token id {highest} in a vocabulary of {info.vocab_tokens}"
    match command:
        case Prefill():
            positions, held_tokens, sound = command.stop, command.resume_tokens, 0 <= command.stop <= prompt_tokens
        case Decode():
            # The last token drawn is never fed, so it takes no position.
            positions, held_tokens = prompt_tokens + command.max_tokens - 1, command.tokens
            sound = 0 <= command.tokens < prompt_tokens and command.max_tokens > 0 and command.snapshot_tokens >= 0
    if not sound:
        return f"lengths do not fit a prompt of {prompt_tokens} tokens"
    if positions > info.max_context_tokens:
        return f"{positions} positions exceed the context of {info.max_context_tokens}"
    if wrong := _wrong_held(command.held, held_tokens, info.layout, pool_bytes):
        return wrong
    return _wrong_schedule(command, info, pool_bytes) if isinstance(command, Prefill) else None


def wrong_windows(windows: Sequence[Window], layout: KvLayout, pool_bytes: int) -> str | None:
    """Why these are no places in the pool, or None. One that takes no memory may be anywhere."""
    windows = [window for window in windows if window.first != window.stop or (window.state and layout.state_bytes)]
    if any(window.offset % ALIGN_BYTES for window in windows):
        return f"a window that does not begin at a multiple of {ALIGN_BYTES} bytes"
    try:
        layout.check_windows(windows, pool_bytes)
    except ValueError as error:
        return str(error)
    return None


def _wrong_held(held: Sequence[Window], tokens: int, layout: KvLayout, pool_bytes: int) -> str | None:
    if not held:
        return None
    if wrong := wrong_windows(held, layout, pool_bytes):
        return wrong
    end = 0
    for window in held:
        if window.first < window.stop:
            if window.first != end:
                return f"held rows go on at {window.first} after {end}"
            end = window.stop
    if not 0 <= tokens <= end:
        return f"{tokens} tokens out of windows that hold {end}"
    states = [window for window in held if window.state and window.stop == tokens]
    if tokens and layout.state_bytes and len(states) != 1:
        return f"the states at {tokens} are held {len(states)} times"
    return None


def _wrong_schedule(command: Prefill, info: EngineInfo, pool_bytes: int) -> str | None:
    start, stop, ends, out = command.resume_tokens, command.stop, command.ends, command.out
    if command.held_tokens is not None and not command.held:
        return f"{command.held_tokens} tokens out of no window"
    if (ends[-1] if ends else start) != stop or start > stop:
        return f"chunk ends {ends[-3:]} do not lead from {start} to {stop}"
    lengths = [after - before for before, after in itertools.pairwise((start, *ends))]
    if not all(0 < length <= info.chunk_tokens for length in lengths):
        return f"chunks of {min(lengths)} to {max(lengths)} tokens where {info.chunk_tokens} are the most"
    if not {*ends, *([start] if command.held else [])}.issuperset(command.checkpoints):
        return f"checkpoints {command.checkpoints[:4]}... end no chunk"
    if out is None:
        return None
    if not 0 <= out.first <= out.stop == stop:
        return f"a prefill to {stop} has no rows {out.first}:{out.stop} at its end"
    return wrong_windows((out,), info.layout, pool_bytes)
