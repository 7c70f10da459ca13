"""From a body to the `Request`s of its sequences: the prompts as tokens, the length that each may get, and how to
sample. Everything that can be refused is refused here, before any worker hears of it.

A body with several prompts, or with `n`, is answered by several sequences: all of the first prompt, then all of the
second, and so on; the position is the `index` of the choice. Each has a seed of its own, the first of a prompt the one
that was asked for: so a batch has the answers that its prompts would have had one by one.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec

from prfaas.cluster import LOGPROBS, RESPONSE_FORMAT, TOOLS
from prfaas.errors import InvalidRequest
from prfaas.request import TOKEN_BYTES, Request, RequestId, Sampling
from prfaas.tokenizer.port import Tokenizer
from services.router.openai.endpoint import Endpoint
from services.router.openai.port import ModelCard
from services.router.openai.schema import B, Body, ChatBody
from services.router.openai.settings import OpenAiSettings

#: Fields that only some engines can serve, what an engine must be able to do for them, and values that ask for nothing.
FOR_ENGINES: tuple[tuple[str, str, tuple[object, ...]], ...] = (
    ("tools", TOOLS, ([],)),
    ("tool_choice", TOOLS, ("none", "auto")),
    ("response_format", RESPONSE_FORMAT, ({"type": "text"},)),
    ("logprobs", LOGPROBS, (False,)),
)


async def make_requests(
    endpoint: Endpoint[B],
    body: B,
    card: ModelCard,
    tokenizer: Tokenizer,
    settings: OpenAiSettings,
    request_id: RequestId,
    new_id: Callable[[], RequestId],
    new_seed: Callable[[], int],
) -> list[Request]:
    """One for each sequence; the first has `request_id`."""
    check_capabilities(body, card)
    asked_tokens, choices = endpoint.max_tokens(body), body.n or 1
    if choices > settings.max_sequences:
        raise InvalidRequest(f"n must not be above {settings.max_sequences}", param="n")
    if endpoint.count(body) * choices > settings.max_sequences:
        raise InvalidRequest(
            f"One request may have {settings.max_sequences} sequences, prompts times n", param=endpoint.prompt_param
        )
    try:
        prompts = await endpoint.prompts(body, tokenizer, card.max_context_tokens)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, param=endpoint.prompt_param, code=error.code) from error
    top = endpoint.top_logprobs(body)
    requests: list[Request] = []
    for prompt in prompts:
        max_tokens = _length(endpoint, card, settings, prompt, asked_tokens)
        for choice in range(choices):
            requests.append(
                Request(
                    id=new_id() if requests else request_id,
                    model=card.id,
                    prompt=prompt,
                    sampling=sampling(body, card, max_tokens, _seed(body.seed, choice, new_seed)),
                    top_logits=0 if top is None else max(top, 1),
                )
            )
    return requests


def check_capabilities(body: Body, card: ModelCard) -> None:
    for name, capability, neutral in FOR_ENGINES:
        value = getattr(body, name, None)
        asks = value is not None and not any(type(value) is type(ok) and value == ok for ok in neutral)
        if asks and capability not in card.capabilities:
            raise InvalidRequest(f"{name} is not supported by the engines of {card.id}", param=name)


def _length(
    endpoint: Endpoint[Any], card: ModelCard, settings: OpenAiSettings, prompt: bytes, asked_tokens: int | None
) -> int:
    if not prompt:
        raise InvalidRequest("The prompt is empty", param=endpoint.prompt_param)
    room_tokens = card.max_context_tokens - len(prompt) // TOKEN_BYTES
    max_tokens = asked_tokens or min(room_tokens, endpoint.default_max_tokens(settings))
    if not 0 < max_tokens <= room_tokens:
        raise too_long(endpoint, card, len(prompt) // TOKEN_BYTES, asked_tokens or 1)
    return max_tokens


def too_long(endpoint: Endpoint[Any], card: ModelCard, prompt_tokens: int, max_tokens: int) -> InvalidRequest:
    return InvalidRequest(
        f"This model's maximum context length is {card.max_context_tokens} tokens, but {prompt_tokens + max_tokens} "
        f"were asked for: {prompt_tokens} in the prompt, {max_tokens} for the completion",
        param=endpoint.prompt_param,
        code="context_length_exceeded",
    )


def sampling(body: Body, card: ModelCard, max_tokens: int, seed: int) -> Sampling:
    """Absent values are OpenAI's defaults. A seed is any 64-bit integer; its bits are the key, whatever the sign."""
    return Sampling(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=seed % 2**64,
        stop_token_ids=() if body.ignore_eos else card.eos_token_ids,
        constraint=constraint(body) if isinstance(body, ChatBody) else "",
    )


def constraint(body: ChatBody) -> str:
    """What is asked of the engine, in the words of the caller."""
    asked = {name: getattr(body, name) for name in ("tools", "tool_choice", "response_format")}
    given = {name: value for name, value in asked.items() if value is not None}
    if not body.tools:
        given = {name: value for name, value in given.items() if name == "response_format"}
    if given.get("response_format") == {"type": "text"}:
        del given["response_format"]
    return msgspec.json.encode(given).decode() if given else ""


def _seed(asked: int | None, choice: int, new_seed: Callable[[], int]) -> int:
    if asked is None:
        return new_seed()
    if choice == 0:
        return asked
    return int.from_bytes(hashlib.blake2b(b"%d/%d" % (asked, choice), digest_size=8).digest(), "little")


def stop_strings(body: Body) -> tuple[str, ...]:
    match body.stop:
        case None:
            return ()
        case str() as stop:
            return (stop,)
        case stops:
            return tuple(stops)
