"""POST /v1/completions."""

from prfaas.errors import InvalidRequest
from prfaas.tokenizer.port import Tokenizer
from prfaas.tokenizer.text import pack
from services.router.openai.answer import TextChoice
from services.router.openai.endpoint import Endpoint
from services.router.openai.schema import CompletionBody


async def prompt(body: CompletionBody, tokenizer: Tokenizer) -> bytes:
    one = only_prompt(body.prompt)
    if isinstance(one, str):
        return await tokenizer.encode_aside(one, add_special_tokens=True)
    if one and not 0 <= min(one) <= max(one) < tokenizer.vocabulary_size:
        raise InvalidRequest(f"Token ids must be in [0, {tokenizer.vocabulary_size})")
    return pack(one)


def only_prompt(given: str | list[int | str | list[int]]) -> str | list[int]:
    """Text, token ids, or a batch with one of these. Larger batches are not served."""
    if isinstance(given, str):
        return given
    token_ids = [entry for entry in given if isinstance(entry, int)]
    if len(token_ids) == len(given):
        return token_ids
    if len(given) > 1:
        raise InvalidRequest("A batch of prompts is not supported; send one request for each")
    [one] = given
    assert not isinstance(one, int)
    return one


COMPLETIONS = Endpoint(
    name="completions",
    body=CompletionBody,
    prompt_param="prompt",
    prompt=prompt,
    max_tokens=lambda body: body.max_tokens,
    default_max_tokens=lambda settings: settings.completion_max_tokens,
    id_prefix="cmpl-",
    whole_object="text_completion",
    chunk_object="text_completion",
    whole=TextChoice,
    opening=TextChoice(""),
    delta=lambda text, token_ids: TextChoice(text, token_ids=token_ids),
    end=lambda finish: TextChoice("", finish),
)
