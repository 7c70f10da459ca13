"""Answers as the OpenAI API words them, whole and in chunks. The endpoints share the envelope and differ in choices."""

from typing import Any

import msgspec

from prfaas.request import FinishReason


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails()


class Envelope(msgspec.Struct, frozen=True):
    """`id`, `created` and `model` are the same on all chunks of an answer. Unset fields are left out."""

    id: str
    object: str
    created: int
    model: str
    choices: tuple[msgspec.Struct, ...] = ()
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prfaas_receipt: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class AssistantMessage(msgspec.Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


#: Tokens of this choice, when the caller wants them.
TokenIds = tuple[int, ...] | msgspec.UnsetType


class ChatChoice(msgspec.Struct, frozen=True):
    message: AssistantMessage
    finish_reason: FinishReason
    token_ids: TokenIds = msgspec.UNSET
    index: int = 0
    logprobs: None = None


class Delta(msgspec.Struct, frozen=True):
    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    delta: Delta
    finish_reason: FinishReason | None = None
    token_ids: TokenIds = msgspec.UNSET
    index: int = 0
    logprobs: None = None


class TextChoice(msgspec.Struct, frozen=True):
    """The same whole and in chunks."""

    text: str
    finish_reason: FinishReason | None = None
    token_ids: TokenIds = msgspec.UNSET
    index: int = 0
    logprobs: None = None
