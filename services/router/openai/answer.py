"""Answers as the OpenAI API words them, whole and in chunks. The endpoints share the envelope and differ in choices."""

from typing import Any, Generic, TypeVar

import msgspec

from prfaas.request import FinishReason

C = TypeVar("C", bound=msgspec.Struct)


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails()


class Envelope(msgspec.Struct, Generic[C], frozen=True):
    """`id`, `created` and `model` are the same on all chunks of an answer. Unset fields are left out."""

    id: str
    object: str
    created: int
    model: str
    choices: tuple[C, ...] = ()
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prfaas_receipt: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: tuple[int, ...]


class TokenLogprob(msgspec.Struct, frozen=True):
    """`bytes` are what the token adds to the text, of which a character may need several."""

    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: tuple[TopLogprob, ...]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: tuple[TokenLogprob, ...]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True):
    """The older form. `text_offset` is the character at which, or within which, a token begins."""

    text_offset: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    tokens: tuple[str, ...]
    top_logprobs: tuple[dict[str, float], ...]


class AssistantMessage(msgspec.Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


#: Tokens of this choice, when the caller wants them.
TokenIds = tuple[int, ...] | msgspec.UnsetType


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None
    token_ids: TokenIds = msgspec.UNSET


class Delta(msgspec.Struct, frozen=True):
    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: TokenIds = msgspec.UNSET


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The same whole and in chunks."""

    index: int
    text: str
    finish_reason: FinishReason | None = None
    logprobs: TextLogprobs | None = None
    token_ids: TokenIds = msgspec.UNSET
