"""What sets one completion endpoint apart from the other. `chat.CHAT` and `completions.COMPLETIONS` are the two."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic

import msgspec

from prfaas.request import FinishReason
from prfaas.tokenizer.port import Tokenizer
from services.router.openai.answer import TokenIds
from services.router.openai.schema import B
from services.router.openai.settings import OpenAiSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint(Generic[B]):
    name: str
    body: type[B]
    #: The field that the prompt comes from, for errors about it.
    prompt_param: str
    #: The prompt as packed token ids.
    prompt: Callable[[B, Tokenizer], Awaitable[bytes]]
    max_tokens: Callable[[B], int | None]
    default_max_tokens: Callable[[OpenAiSettings], int]

    id_prefix: str
    whole_object: str
    chunk_object: str
    whole: Callable[[str, FinishReason, TokenIds], msgspec.Struct]
    #: What a stream begins with, before there is text.
    opening: msgspec.Struct
    delta: Callable[[str, TokenIds], msgspec.Struct]
    end: Callable[[FinishReason], msgspec.Struct]
