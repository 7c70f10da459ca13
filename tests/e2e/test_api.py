"""The OpenAI endpoint of a live cluster: what clients send wrong, and the official client."""

import asyncio
import http.client
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from services.local_cluster import LocalCluster
from tests.e2e.client import at_rest, eventually, openai_client
from tests.e2e.reference import Alone, token_ids

pytestmark = pytest.mark.asyncio(loop_scope="session")

Reference = Callable[[str], Alone]
HELLO = [{"role": "user", "content": "Hello"}]


def post(cluster: LocalCluster, path: str, body: bytes) -> tuple[int, Any]:
    host, port = cluster.endpoint.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


CHAT = {"messages": HELLO, "max_tokens": 4}
TEXT = {"prompt": "Hello", "max_tokens": 4}
BAD = [
    ("chat", {**CHAT, "messages": "hi"}, 400, "messages"),
    ("chat", {**CHAT, "messages": []}, 400, "messages"),
    ("chat", {**CHAT, "messages": [{"role": "alien", "content": "x"}]}, 400, "messages"),
    ("chat", {**CHAT, "max_tokens": "many"}, 400, "max_tokens"),
    ("chat", {**CHAT, "max_tokens": 0}, 400, "max_tokens"),
    ("chat", {**CHAT, "max_tokens": -1}, 400, "max_tokens"),
    ("chat", {**CHAT, "temperature": 9}, 400, "temperature"),
    ("chat", {**CHAT, "top_p": 0}, 400, "top_p"),
    ("chat", {**CHAT, "n": 65}, 400, "n"),
    ("chat", {**CHAT, "logprobs": True}, 400, "logprobs"),
    ("chat", {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
    ("chat", {**CHAT, "response_format": {"type": "json_object"}}, 400, "response_format"),
    ("chat", {**CHAT, "logit_bias": {"5": 1}}, 400, "logit_bias"),
    ("chat", {**CHAT, "presence_penalty": 1}, 400, "presence_penalty"),
    ("chat", {**CHAT, "stop": ["a", "b", "c", "d", "e"]}, 400, "stop"),
    ("chat", {**CHAT, "no_such_option": 1}, 400, "no_such_option"),
    ("chat", {**CHAT, "model": "no-such-model"}, 404, "model"),
    ("text", {**TEXT, "prompt": [1, "two"]}, 400, "prompt"),
    ("text", {**TEXT, "prompt": [-1]}, 400, "prompt"),
    ("text", {**TEXT, "prompt": [100_000]}, 400, "prompt"),
    ("text", {**TEXT, "prompt": []}, 400, "prompt"),
    ("text", {**TEXT, "prompt": 7}, 400, "prompt"),
    ("text", {**TEXT, "best_of": 2}, 400, "best_of"),
    ("text", {**TEXT, "suffix": "x"}, 400, "suffix"),
]


@pytest.mark.parametrize(("kind", "body", "status", "param"), BAD)
async def test_bad_input_is_the_clients_error(
    quick: LocalCluster, kind: str, body: dict[str, Any], status: int, param: str
):
    """The right status and parameter, in OpenAI's shape, and nothing is reserved."""
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    body = {"model": quick.plan.model_dir.name} | body
    got, answer = await asyncio.to_thread(post, quick, path, json.dumps(body).encode())
    assert (got, answer["error"]["param"]) == (status, param), answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert await at_rest(quick)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"model": 1}', b"{" * 10_000])
async def test_malformed_json_is_a_400(quick: LocalCluster, body: bytes):
    """Whatever the bytes, the answer is a 400 and never a 500."""
    for path in ("/v1/chat/completions", "/v1/completions"):
        status, answer = await asyncio.to_thread(post, quick, path, body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


async def test_too_long_is_refused_before_anything_is_reserved(quick: LocalCluster, alone: Reference):
    """A prompt that cannot fit is the client's error with its own code."""
    limit = alone("cost_model").engine.info.max_context_tokens
    body = {"model": quick.plan.model_dir.name, "prompt": token_ids(limit), "max_tokens": 10}
    status, answer = await asyncio.to_thread(post, quick, "/v1/completions", json.dumps(body).encode())
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_unknown_paths_and_methods(quick: LocalCluster):
    """404 and 405 in the same shape."""
    status, answer = await asyncio.to_thread(post, quick, "/v1/nothing", b"{}")
    assert (status, answer["error"]["type"]) == (404, "invalid_request_error")
    status, _ = await asyncio.to_thread(post, quick, "/v1/models", b"{}")
    assert status == 405


async def test_the_official_client_chats(quick: LocalCluster):
    """Chat, streaming and not, gives the same text; usage comes with the stream when asked for."""
    model = quick.plan.model_dir.name
    async with openai_client(quick) as client:
        assert [card.id for card in (await client.models.list()).data] == [model]
        whole = await client.chat.completions.create(model=model, messages=HELLO, max_tokens=12, temperature=0)  # type: ignore[arg-type]
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None and whole.usage.completion_tokens == 12
        stream = await client.chat.completions.create(
            model=model,
            messages=HELLO,  # type: ignore[arg-type]
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["length"]


async def test_the_official_client_completes(quick: LocalCluster):
    """Completions, streaming and not; seeds repeat an answer drawn at random."""
    model = quick.plan.model_dir.name
    async with openai_client(quick) as client:
        ask = {"model": model, "prompt": "Once upon a time", "max_tokens": 10}
        whole = await client.completions.create(**ask, temperature=0)  # type: ignore[call-overload]
        pieces = [
            chunk.choices[0].text
            async for chunk in await client.completions.create(**ask, temperature=0, stream=True)  # type: ignore[call-overload]
            if chunk.choices
        ]
        assert "".join(pieces) == whole.choices[0].text
        drawn = [(await client.completions.create(**ask, temperature=1, seed=s)).choices[0].text for s in (5, 5, 6)]  # type: ignore[call-overload]
        assert drawn[0] == drawn[1] != drawn[2]


async def test_the_official_client_sees_its_errors(quick: LocalCluster):
    """Errors arrive as the client's own exceptions."""
    async with openai_client(quick) as client:
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nobody", messages=HELLO)  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=quick.plan.model_dir.name, messages=HELLO, top_p=3)  # type: ignore[arg-type]
    assert caught.value.param == "top_p"
    await eventually(lambda: at_rest(quick))
