"""From a body to a `Request`: the prompt as tokens, the length it may get, and how to sample. Everything that can be
refused is refused here, before any worker hears of it."""

from collections.abc import Callable

from prfaas.errors import InvalidRequest
from prfaas.request import TOKEN_BYTES, Request, RequestId, Sampling
from prfaas.tokenizer.port import Tokenizer
from services.router.openai.endpoint import Endpoint
from services.router.openai.port import ModelCard
from services.router.openai.schema import B, Body
from services.router.openai.settings import OpenAiSettings


async def make_request(
    endpoint: Endpoint[B],
    body: B,
    card: ModelCard,
    tokenizer: Tokenizer,
    settings: OpenAiSettings,
    request_id: RequestId,
    new_seed: Callable[[], int],
) -> Request:
    asked_tokens = endpoint.max_tokens(body)
    try:
        prompt = await endpoint.prompt(body, tokenizer)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, param=endpoint.prompt_param, code=error.code) from error
    if not prompt:
        raise InvalidRequest("The prompt is empty", param=endpoint.prompt_param)
    room_tokens = card.max_context_tokens - len(prompt) // TOKEN_BYTES
    max_tokens = asked_tokens or min(room_tokens, endpoint.default_max_tokens(settings))
    if not 0 < max_tokens <= room_tokens:
        raise too_long(endpoint, card, len(prompt) // TOKEN_BYTES, asked_tokens or 1)
    seed = body.seed if body.seed is not None else new_seed()
    return Request(id=request_id, model=card.id, prompt=prompt, sampling=sampling(body, card, max_tokens, seed))


def too_long(endpoint: Endpoint[B], card: ModelCard, prompt_tokens: int, max_tokens: int) -> InvalidRequest:
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
    )


def stop_strings(body: Body) -> tuple[str, ...]:
    match body.stop:
        case None:
            return ()
        case str() as stop:
            return (stop,)
        case stops:
            return tuple(stops)
