"""What sets one completion endpoint apart from the other. `chat.CHAT` and `completions.COMPLETIONS` are the two."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import msgspec

from prfaas.errors import InvalidRequest
from prfaas.request import FinishReason
from prfaas.tokenizer.port import Tokenizer
from services.router.openai.answer import TokenIds
from services.router.openai.generation import Scored
from services.router.openai.schema import B
from services.router.openai.settings import OpenAiSettings

#: Probabilities as the endpoint words them: of so many of the likeliest tokens.
Logprobs = Callable[[Sequence[Scored], int, Tokenizer], Any]


def check_length(fewest_tokens: int, max_tokens: int) -> None:
    """Before a prompt that cannot fit is made tokens, or looked at one by one."""
    if fewest_tokens > max_tokens:
        raise InvalidRequest(
            f"This model's maximum context length is {max_tokens} tokens, but the prompt has {fewest_tokens} or more",
            code="context_length_exceeded",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint(Generic[B]):
    name: str
    body: type[B]
    #: The field that the prompts come from, for errors about them.
    prompt_param: str
    #: How many prompts there are; known before any is tokenized.
    count: Callable[[B], int]
    #: The prompts as packed token ids, which may be refused when they are more than so many.
    prompts: Callable[[B, Tokenizer, int], Awaitable[list[bytes]]]
    #: The text that each answer begins with.
    echoes: Callable[[B, Tokenizer, Sequence[bytes]], list[str]]
    max_tokens: Callable[[B], int | None]
    default_max_tokens: Callable[[OpenAiSettings], int]
    #: How many of the likeliest tokens are asked for; None: no probabilities at all.
    top_logprobs: Callable[[B], int | None]

    id_prefix: str
    whole_object: str
    chunk_object: str
    logprobs: Logprobs
    #: A choice, by its index: its text, how it ended, its probabilities and tokens.
    whole: Callable[[int, str, FinishReason, Any, TokenIds], msgspec.Struct]
    #: What a choice begins with in a stream: what is echoed.
    opening: Callable[[int, str], msgspec.Struct]
    delta: Callable[[int, str, Any, TokenIds], msgspec.Struct]
    end: Callable[[int, FinishReason], msgspec.Struct]
