"""POST /tokenize and /detokenize, in the words of vLLM: what a prompt comes to, before it is sent."""

import asyncio
from typing import Annotated, Any

import msgspec

from prfaas.errors import InvalidRequest
from prfaas.request import TOKEN_BYTES
from prfaas.tokenizer.port import Tokenizer
from prfaas.tokenizer.text import unpack
from services.router.openai.chat import to_template
from services.router.openai.port import ModelCard
from services.router.openai.schema import ChatMessage

#: Tokens looked up in one turn of the event loop.
AT_ONCE = 4096


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text, or a chat. Without `model`, the one that is served. A chat has the special tokens that its template
    writes, a text those of the tokenizer."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None
    # Not served.
    continue_final_message: bool | None = None


class Tokenized(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str


async def tokenize(body: TokenizeBody, card: ModelCard, tokenizer: Tokenizer) -> Tokenized:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("either prompt or messages is needed", param="prompt")
    if body.messages is None:
        text, special = body.prompt or "", body.add_special_tokens is not False
    else:
        messages = [to_template(message) for message in body.messages]
        opened = body.add_generation_prompt is not False
        text = tokenizer.render(messages, tools=body.tools or (), add_generation_prompt=opened)
        special = body.add_special_tokens is True
    packed = await tokenizer.encode_aside(text, add_special_tokens=special)
    tokens = list(unpack(packed))
    strs = await _strs(tokens, tokenizer) if body.return_token_strs else None
    return Tokenized(len(packed) // TOKEN_BYTES, card.max_context_tokens, tokens, strs)


async def _strs(tokens: list[int], tokenizer: Tokenizer) -> list[str]:
    """Very many do not hold up the event loop."""
    strs: list[str] = []
    for at in range(0, len(tokens), AT_ONCE):
        strs += [tokenizer.token(token_id) for token_id in tokens[at : at + AT_ONCE]]
        await asyncio.sleep(0)
    return strs


def detokenize(body: DetokenizeBody, card: ModelCard, tokenizer: Tokenizer) -> Detokenized:
    """Special tokens show."""
    if len(body.tokens) > card.max_context_tokens:
        raise InvalidRequest(f"There are more than {card.max_context_tokens} tokens", param="tokens")
    if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < tokenizer.vocabulary_size:
        raise InvalidRequest(f"Token ids must be in [0, {tokenizer.vocabulary_size})", param="tokens")
    return Detokenized(tokenizer.decode_all(body.tokens))
