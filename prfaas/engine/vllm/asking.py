"""What is asked of a vLLM server for a command, and what is known of it while it is under way."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from prfaas.engine.messages import Decode, Prefill
from prfaas.engine.vllm.bridge import Begun, Grant, Saved
from prfaas.engine.vllm.cache_salt import alone, cache_salt
from prfaas.engine.vllm.completions import Usage
from prfaas.engine.vllm.connection import Bridge
from prfaas.engine.vllm.own_network import given
from prfaas.engine.vllm.scores import asked
from prfaas.engine.vllm.wish import Wish, params_of
from prfaas.request import TOKEN_BYTES

NO_NETWORK: Mapping[str, Any] = MappingProxyType({})


@dataclass(slots=True)
class Request:
    """A request under way, and what the connector and the server have said of it. `read`: the node was told that what
    it is restored from is not needed any more."""

    command: Prefill | Decode
    task: asyncio.Task[None] | None = None
    read: bool = False
    begun: Begun | None = None
    saved: Saved | None = None
    usage: Usage | None = None

    def cached(self, begun: Begun) -> int:
        """What the server did not compute of a prompt: as it reports it, or else as its scheduler has told."""
        reported = self.usage.cached_tokens if self.usage is not None else None
        return begun.computed if reported is None else reported


def prefill_body(
    model: str, command: Prefill, tokens: int, wish: Wish, network: Mapping[str, Any] = NO_NETWORK
) -> dict[str, Any]:
    """For one token, which is thrown away. `network`: parameters of the engines' own."""
    return _body(model, command, tokens, wish, network) | {"max_tokens": 1, "temperature": 0.0}


def decode_body(model: str, command: Decode, load: int) -> dict[str, Any]:
    """Raises ValueError where the hand-over says nothing."""
    fetch = given(command.handover) if command.handover else NO_NETWORK
    wish = Wish(command.attempt, load=load)
    return _body(model, command, len(command.prompt) // TOKEN_BYTES, wish, fetch) | {
        "max_tokens": command.max_tokens,
        "temperature": command.temperature,
        "top_p": command.top_p,
        "seed": command.seed & ((1 << 63) - 1),
        "stop_token_ids": list(command.stop_token_ids),
        **asked(command.top_logits),
    }


def _body(model: str, command: Prefill | Decode, tokens: int, wish: Wish, network: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": np.frombuffer(command.prompt, "<u4")[:tokens].tolist(),
        "cache_salt": cache_salt(command.salt) if command.salt else alone(command.attempt),
        "ignore_eos": True,
        "return_token_ids": True,
        "kv_transfer_params": {**params_of(wish), **network},
    }


@asynccontextmanager
async def granted(bridge: Bridge, grant: Grant) -> AsyncIterator[None]:
    """The grant for as long as the request runs. Whoever is cancelled here waits until it is revoked."""
    try:
        await bridge.grant(grant)
        yield
    finally:
        await bridge.revoke(grant.attempt)
