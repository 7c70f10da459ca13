"""From a body to a request: prompt, length and sampling."""

from collections.abc import Sequence
from typing import Any

import pytest

from prfaas.errors import InvalidRequest
from prfaas.request import Request, RequestId
from prfaas.tokenizer.port import Message
from prfaas.tokenizer.text import pack
from services.router.openai.chat import CHAT
from services.router.openai.completions import COMPLETIONS
from services.router.openai.intake import make_request, stop_strings
from services.router.openai.port import ModelCard
from services.router.openai.schema import ChatBody, ChatMessage, CompletionBody, TextPart
from services.router.openai.settings import OpenAiSettings

CARD = ModelCard(id="m", created=0, max_context_tokens=100, eos_token_ids=(1,))
SETTINGS = OpenAiSettings(chat_max_tokens=50)


class Letters:
    """A tokenizer with one token for each character."""

    vocabulary_size = 128

    def render(self, messages: Sequence[Message]) -> str:
        return "".join([f"{message['role'][0]}{message['content']}" for message in messages])

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        return pack([*([2] if add_special_tokens else []), *map(ord, text)])

    async def encode_aside(self, text: str, *, add_special_tokens: bool) -> bytes:
        return self.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def has_text(self, token_id: int) -> bool:
        return token_id > 2


async def chat(content: Any = "x", **fields: Any) -> Request:
    body = ChatBody(model="m", messages=[ChatMessage("user", content)], **fields)
    return await make_request(CHAT, body, CARD, Letters(), SETTINGS, RequestId("r"), lambda: 7)


async def text(prompt: Any, **fields: Any) -> Request:
    body = CompletionBody(model="m", prompt=prompt, **fields)
    return await make_request(COMPLETIONS, body, CARD, Letters(), SETTINGS, RequestId("r"), lambda: 7)


async def test_prompts_become_tokens():
    """Text gets the model's special tokens, a chat those of its template, token ids none."""
    assert (await text("ab")).prompt == pack([2, 97, 98])
    assert (await text([5, 6])).prompt == pack([5, 6])
    assert (await chat("a")).prompt == pack([117, 97])
    assert (await chat([TextPart("text", "a"), TextPart("text", "b")])).prompt == pack([117, 97, 10, 98])


async def test_a_batch_of_one_is_no_batch():
    """Evaluation tools always send lists."""
    assert (await text(["ab"])).prompt == (await text("ab")).prompt
    assert (await text([[5, 6]])).prompt == (await text([5, 6])).prompt


@pytest.mark.parametrize("prompt", [[], [[]], ["a", "b"], [[1], [2]], [1, "a"], [128], [-1]])
async def test_prompts_that_cannot_be_served_name_the_prompt(prompt: Any):
    """Larger batches, empty prompts and ids outside the vocabulary."""
    with pytest.raises(InvalidRequest) as caught:
        await text(prompt)
    assert caught.value.param == "prompt"


async def test_developer_is_the_newer_name_of_system():
    """Templates know only the older one."""
    body = ChatBody(model="m", messages=[ChatMessage("developer", "x")])
    request = await make_request(CHAT, body, CARD, Letters(), SETTINGS, RequestId("r"), lambda: 7)
    assert request.prompt == pack([ord("s"), ord("x")])


async def test_defaults_are_openais():
    """16 tokens for completions; for a chat what the context has left, up to the configured bound."""
    sampling = (await text("ab")).sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (16, 1.0, 1.0, 7)
    assert sampling.stop_token_ids == (1,)
    assert (await chat("x")).sampling.max_tokens == 50
    assert (await chat("x" * 80)).sampling.max_tokens == 19
    assert (await text("x" * 90)).sampling.max_tokens == 9


async def test_what_is_asked_for_is_taken():
    """A seed is 64 bits, whatever its sign; zero temperature is not absent; max_completion_tokens is max_tokens."""
    sampling = (await chat(temperature=0.0, top_p=0.5, seed=-1, ignore_eos=True, max_completion_tokens=3)).sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.0, 0.5, 2**64 - 1)
    assert (sampling.max_tokens, sampling.stop_token_ids) == (3, ())
    with pytest.raises(InvalidRequest) as caught:
        await chat(max_tokens=3, max_completion_tokens=4)
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "fits"), [(99, 1, True), (99, 2, False), (100, None, False), (1, 100, False)]
)
async def test_prompt_and_answer_must_fit_the_context(prompt_tokens: int, max_tokens: int | None, fits: bool):
    """Refused before anything is reserved, with OpenAI's code."""
    prompt = [5] * prompt_tokens
    if fits:
        assert (await text(prompt, max_tokens=max_tokens)).sampling.max_tokens == max_tokens
        return
    with pytest.raises(InvalidRequest) as caught:
        await text(prompt, max_tokens=max_tokens)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


def test_stop_is_a_string_or_a_list():
    """Or absent."""
    stops = [stop_strings(CompletionBody(model="m", prompt="x", stop=stop)) for stop in (None, "a", ["a", "b"])]
    assert stops == [(), ("a",), ("a", "b")]
