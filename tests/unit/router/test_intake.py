"""From a body to a request: prompt, length and sampling."""

import itertools
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from prfaas.cluster import LOGPROBS, RESPONSE_FORMAT, TOOLS
from prfaas.errors import InvalidRequest
from prfaas.request import Request, RequestId
from prfaas.tokenizer.port import Message, Tool
from prfaas.tokenizer.text import pack
from services.router.openai.chat import CHAT
from services.router.openai.completions import COMPLETIONS
from services.router.openai.endpoint import Endpoint
from services.router.openai.intake import make_requests, stop_strings
from services.router.openai.port import ModelCard
from services.router.openai.schema import B, ChatBody, ChatMessage, CompletionBody, TextPart
from services.router.openai.settings import OpenAiSettings

CARD = ModelCard(id="m", created=0, max_context_tokens=100, eos_token_ids=(1,))
SETTINGS = OpenAiSettings(chat_max_tokens=50, max_sequences=6)


class Letters:
    """A tokenizer with one token for each character."""

    vocabulary_size = 128
    bytes_of = None

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), add_generation_prompt: bool = True
    ) -> str:
        return "".join([f"{message['role'][0]}{message['content']}" for message in messages])

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        assert len(text) < 10_000, "encoded in vain"
        return pack([*([2] if add_special_tokens else []), *map(ord, text)])

    def fewest_tokens(self, text: str) -> int:
        return len(text)

    async def encode_aside(self, text: str, *, add_special_tokens: bool) -> bytes:
        return self.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def decode_all(self, token_ids: Sequence[int]) -> str:
        return self.decode(token_ids)

    def has_text(self, token_id: int) -> bool:
        return token_id > 2

    def token(self, token_id: int) -> str:
        return chr(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()


async def requests_of(endpoint: Endpoint[B], body: B, card: ModelCard = CARD) -> list[Request]:
    ids, seeds = (RequestId(f"r{number}") for number in itertools.count(1)), itertools.count(7)
    return await make_requests(
        endpoint, body, card, Letters(), SETTINGS, RequestId("r0"), lambda: next(ids), lambda: next(seeds)
    )


async def chat(content: Any = "x", **fields: Any) -> Request:
    body = ChatBody(model="m", messages=[ChatMessage("user", content)], **fields)
    [request] = await requests_of(CHAT, body)
    return request


async def text(prompt: Any, **fields: Any) -> Request:
    body = CompletionBody(model="m", prompt=prompt, **fields)
    [request] = await requests_of(COMPLETIONS, body)
    return request


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


@pytest.mark.parametrize("prompt", [[], [[]], [[5], []], ["a"] * 7, [1, "a"], [128], [[5], [-1]]])
async def test_prompts_that_cannot_be_served_name_the_prompt(prompt: Any):
    """Batches that are too large or mixed, empty prompts and ids outside the vocabulary."""
    with pytest.raises(InvalidRequest) as caught:
        await text(prompt)
    assert caught.value.param == "prompt"


async def test_developer_is_the_newer_name_of_system():
    """Templates know only the older one."""
    body = ChatBody(model="m", messages=[ChatMessage("developer", "x")])
    [request] = await requests_of(CHAT, body)
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


@pytest.mark.parametrize(("make", "param"), [(text, "prompt"), (lambda long: chat(content=long), "messages")])
async def test_a_prompt_that_can_never_fit_is_not_made_tokens(make: Callable[[str], Awaitable[Request]], param: str):
    """It would take seconds and hundreds of megabytes."""
    with pytest.raises(InvalidRequest, match="or more") as caught:
        await make("a" * 1_000_000)
    assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")


def test_stop_is_a_string_or_a_list():
    """Or absent."""
    stops = [stop_strings(CompletionBody(model="m", prompt="x", stop=stop)) for stop in (None, "a", ["a", "b"])]
    assert stops == [(), ("a",), ("a", "b")]


async def test_a_batch_with_n_has_a_sequence_for_each_answer():
    """All of the first prompt, then all of the second, each under an id of its own."""
    requests = await requests_of(COMPLETIONS, CompletionBody(model="m", prompt=["a", "b"], n=3))
    assert [request.prompt for request in requests] == [pack([2, 97])] * 3 + [pack([2, 98])] * 3
    assert [request.id for request in requests] == ["r0", "r1", "r2", "r3", "r4", "r5"]
    assert [request.sampling.seed for request in requests] == [7, 8, 9, 10, 11, 12]


async def test_with_a_seed_the_answers_differ_and_can_be_had_again():
    """The first is the one that is given without `n`, and each prompt of a batch has what it would have alone."""
    alone = await requests_of(COMPLETIONS, CompletionBody(model="m", prompt="a", seed=5))
    several = await requests_of(COMPLETIONS, CompletionBody(model="m", prompt=["a", "b"], seed=5, n=3))
    seeds = [request.sampling.seed for request in several]
    assert seeds[0] == alone[0].sampling.seed == 5
    assert len(set(seeds[:3])) == 3
    assert seeds[:3] == seeds[3:]


@pytest.mark.parametrize(("prompt", "n", "param"), [("a", 7, "n"), (["a", "b"], 4, "prompt")])
async def test_a_request_has_only_so_many_sequences(prompt: Any, n: int, param: str):
    """Its cost is bounded before anything is tokenized."""
    with pytest.raises(InvalidRequest) as caught:
        await requests_of(COMPLETIONS, CompletionBody(model="m", prompt=prompt, n=n))
    assert caught.value.param == param


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("param", "value", "capability"),
    [
        ("tools", [TOOL], TOOLS),
        ("tool_choice", "required", TOOLS),
        ("response_format", {"type": "json_object"}, RESPONSE_FORMAT),
        ("logprobs", True, LOGPROBS),
    ],
)
async def test_what_not_every_engine_can_is_refused_unless_it_is_declared(param: str, value: Any, capability: str):
    """By name; an answer that ignores it would look right and be wrong."""
    body = ChatBody(model="m", messages=[ChatMessage("user", "x")], **{param: value})
    with pytest.raises(InvalidRequest) as caught:
        await requests_of(CHAT, body)
    assert caught.value.param == param
    await requests_of(CHAT, body, replace(CARD, capabilities=frozenset({capability})))


async def test_engines_that_can_are_told_what_the_answer_must_follow():
    """In the caller's words; what asks for nothing is not passed on."""
    card = replace(CARD, capabilities=frozenset({TOOLS, RESPONSE_FORMAT}))
    messages = [ChatMessage("user", "x")]
    schema = {"type": "json_schema", "json_schema": {"name": "s"}}
    body = ChatBody(model="m", messages=messages, tools=[TOOL], tool_choice="required", response_format=schema)
    [request] = await requests_of(CHAT, body, card)
    told = {"tools": [TOOL], "tool_choice": "required", "response_format": schema}
    assert json.loads(request.sampling.constraint) == told
    plain = ChatBody(model="m", messages=messages, tools=[], tool_choice="auto", response_format={"type": "text"})
    [request] = await requests_of(CHAT, plain)
    assert request.sampling.constraint == ""


async def test_probabilities_are_asked_of_the_engine_only_when_wanted():
    """With none of the likeliest tokens, too: the score comes along with the first of them."""
    card = replace(CARD, capabilities=frozenset({LOGPROBS}))
    messages = [ChatMessage("user", "x")]
    asked = {
        None: ChatBody(model="m", messages=messages),
        0: ChatBody(model="m", messages=messages, logprobs=True),
        5: ChatBody(model="m", messages=messages, logprobs=True, top_logprobs=5),
    }
    wanted = {top: (await requests_of(CHAT, body, card))[0].top_logits for top, body in asked.items()}
    assert wanted == {None: 0, 0: 1, 5: 5}
