"""Which commands an engine process refuses before any work is done. Pure."""

import numpy as np

from prfaas.engine.messages import Decode, Prefill
from prfaas.engine.port import EngineInfo
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
            span_tokens, positions, sound = command.stop, command.stop, 0 <= command.stop <= prompt_tokens
        case Decode():
            # The last token drawn is never fed, so it takes no position.
            span_tokens, positions = command.tokens, prompt_tokens + command.max_tokens - 1
            sound = 0 <= command.tokens < prompt_tokens and command.max_tokens > 0
    if isinstance(command, Prefill) and (wrong := _cannot_take_up(command, info, pool_bytes)):
        return wrong
    if not sound:
        return f"lengths do not fit a prompt of {prompt_tokens} tokens"
    if positions > info.max_context_tokens:
        return f"{positions} positions exceed the context of {info.max_context_tokens}"
    if command.span is not None and not 0 <= command.span <= pool_bytes - info.layout.span_bytes(span_tokens):
        return f"a span at {command.span} is outside the pool"
    return None


def _cannot_take_up(command: Prefill, info: EngineInfo, pool_bytes: int) -> str | None:
    held, stop = command.held, command.stop
    if not held and command.held_span is None:
        return None
    if command.span is not None:
        return "what is shipped is computed from the start"
    ends = held == stop or (held % info.chunk_tokens == 0 and not info.layout.state_bytes)
    if not 0 < held <= stop or not ends:
        return f"a prefill of {stop} tokens cannot be taken up at {held}"
    if command.held_span is None or not 0 <= command.held_span <= pool_bytes - info.layout.span_bytes(stop):
        return f"a span at {command.held_span} is outside the pool"
    return None
