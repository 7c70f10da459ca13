"""POST /v1/completions."""

import asyncio
from collections.abc import Sequence
from typing import cast

from prfaas.errors import InvalidRequest
from prfaas.tokenizer.port import Tokenizer
from prfaas.tokenizer.text import pack, unpack
from services.router.openai.answer import TextChoice
from services.router.openai.endpoint import Endpoint, check_length
from services.router.openai.logprobs import text_logprobs
from services.router.openai.schema import CompletionBody

#: Text, or token ids.
Prompt = str | list[int]


async def prompts(body: CompletionBody, tokenizer: Tokenizer, max_tokens: int) -> list[bytes]:
    first, *others = listed(body.prompt) or [""]
    encoded = [await _encode(first, tokenizer, max_tokens)]
    for one in others:
        await asyncio.sleep(0)  # many short ones must not hold up the loop either
        encoded.append(await _encode(one, tokenizer, max_tokens))
    return encoded


async def _encode(one: Prompt, tokenizer: Tokenizer, max_tokens: int) -> bytes:
    if isinstance(one, str):
        check_length(tokenizer.fewest_tokens(one), max_tokens)
        return await tokenizer.encode_aside(one, add_special_tokens=True)
    check_length(len(one), max_tokens)
    if one and not 0 <= min(one) <= max(one) < tokenizer.vocabulary_size:
        raise InvalidRequest(f"Token ids must be in [0, {tokenizer.vocabulary_size})")
    return pack(one)


def listed(given: str | list[int | str | list[int]]) -> list[Prompt]:
    """One text, the ids of one, or a batch of either."""
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given))
    if kinds <= {int}:
        return [cast("list[int]", given)]
    if int in kinds:
        raise InvalidRequest("A prompt is text or token ids, not both", param="prompt")
    return cast("list[Prompt]", given)


def echoes(body: CompletionBody, tokenizer: Tokenizer, prompts: Sequence[bytes]) -> list[str]:
    """A text as it was given, and what token ids stand for."""
    if not body.echo:
        return [""] * len(prompts)
    return [
        one if isinstance(one, str) else tokenizer.decode(unpack(packed))
        for one, packed in zip(listed(body.prompt), prompts, strict=True)
    ]


COMPLETIONS = Endpoint(
    name="completions",
    body=CompletionBody,
    prompt_param="prompt",
    count=lambda body: len(listed(body.prompt)),
    prompts=prompts,
    echoes=echoes,
    max_tokens=lambda body: body.max_tokens,
    default_max_tokens=lambda settings: settings.completion_max_tokens,
    top_logprobs=lambda body: body.logprobs,
    id_prefix="cmpl-",
    whole_object="text_completion",
    chunk_object="text_completion",
    logprobs=text_logprobs,
    whole=lambda index, text, finish, logprobs, token_ids: TextChoice(
        index=index, text=text, finish_reason=finish, logprobs=logprobs, token_ids=token_ids
    ),
    opening=lambda index, echo: TextChoice(index=index, text=echo),
    delta=lambda index, text, logprobs, token_ids: TextChoice(
        index=index, text=text, logprobs=logprobs, token_ids=token_ids
    ),
    end=lambda index, finish: TextChoice(index=index, text="", finish_reason=finish),
)
