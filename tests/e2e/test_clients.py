"""The official client, unmodified, against a real model behind API keys."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import pytest_asyncio

from services.http_client import fetch
from services.local_cluster import LocalCluster, Plan
from services.router import api_keys
from services.router.api_keys import KeyFile, KeyRecord, TenantRecord
from tests.e2e.conftest import StartCluster
from tests.e2e.reference import Alone, token_ids

pytestmark = pytest.mark.asyncio(loop_scope="session")

Reference = Callable[[str], Alone]
HELLO: Any = [{"role": "user", "content": "Hello, who keeps the light?"}]


class Keyed:
    """A cluster, and a key of each of two tenants: one may do what it likes, one may ask for one thing at a time."""

    def __init__(self, cluster: LocalCluster, free: str, slow: str) -> None:
        self.model, self.endpoint, self._free, self._slow = cluster.plan.model_dir.name, cluster.endpoint, free, slow

    def client(self, key: str | None = None, **options: Any) -> openai.AsyncOpenAI:
        options = {"max_retries": 0, "timeout": 120} | options
        return openai.AsyncOpenAI(base_url=f"{self.endpoint}/v1", api_key=key or self._free, **options)

    def slow(self, **options: Any) -> openai.AsyncOpenAI:
        return self.client(self._slow, **options)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def keyed(
    start_embedded: StartCluster, model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Keyed]:
    """One worker that does everything, so that the API is what is tested."""
    empty, path = api_keys.empty(), tmp_path_factory.mktemp("keys") / "keys.json"
    (first, free, free_hash), (second, slow, slow_hash) = api_keys.new_key(empty), api_keys.new_key(empty)
    tenants = {"free": TenantRecord(), "slow": TenantRecord(max_concurrent=1)}
    keys = {first: KeyRecord(tenant="free", hash=free_hash), second: KeyRecord(tenant="slow", hash=slow_hash)}
    path.write_bytes(msgspec.json.encode(KeyFile(salt=empty.salt, tenants=tenants, keys=keys)))
    plan = Plan(model_dir=model_dir("kimi_linear"), prefill_workers=0, pd_roles=("mixed",), keys_file=path)
    async with start_embedded(plan) as cluster:
        yield Keyed(cluster, free, slow)


@pytest.mark.parametrize("stream", [False, True])
async def test_probabilities_are_the_models(keyed: Keyed, stream: bool, alone: Reference):
    """The tokens of the same engine alone; the one that is drawn greedily is the likeliest, and all of them together
    are no more than certain."""
    ids = token_ids(40, seed=3)
    async with keyed.client() as client:
        answer: Any = await client.completions.create(
            model=keyed.model,
            prompt=ids,
            max_tokens=6,
            temperature=0,
            logprobs=5,
            stream=stream,
            extra_body={"return_token_ids": True},
        )
        choices = [chunk.choices[0] async for chunk in answer] if stream else answer.choices
    shown = [token for choice in choices for token in choice.model_extra.get("token_ids") or ()]
    assert shown == alone("kimi_linear").answer(ids, 6)
    drawn = [logprob for choice in choices if choice.logprobs for logprob in choice.logprobs.token_logprobs]
    best = [top for choice in choices if choice.logprobs for top in choice.logprobs.top_logprobs]
    assert len(drawn) == len(best) == 6
    for logprob, top in zip(drawn, best, strict=True):
        assert logprob == max(top.values()) < 0
        assert 0 < sum(math.exp(value) for value in top.values()) < 1


async def test_seeds_choices_and_batches(keyed: Keyed):
    """The same seed draws the same; each of several choices draws by itself; a batch has the answers that its prompts
    have one by one."""
    async with keyed.client() as client:
        ask: Any = {"model": keyed.model, "max_tokens": 8, "temperature": 1.5, "seed": 11}
        prompts = ["the keeper", "a ship"]
        batch = await client.completions.create(prompt=prompts, n=2, **ask)
        again = await client.completions.create(prompt=prompts, n=2, **ask)
        alone = [await client.completions.create(prompt=prompt, **ask) for prompt in prompts]
    texts = [choice.text for choice in batch.choices]
    assert [choice.index for choice in batch.choices] == [0, 1, 2, 3]
    assert texts == [choice.text for choice in again.choices]
    assert texts[0] != texts[1]
    assert [texts[0], texts[2]] == [one.choices[0].text for one in alone]


async def test_a_stop_string_across_tokens(keyed: Keyed):
    """Any two characters of the answer end it right before them, streamed or whole, and usage counts up to there."""
    async with keyed.client() as client:
        ask: Any = {"model": keyed.model, "prompt": "the keeper", "max_tokens": 24, "temperature": 0}
        text = (await client.completions.create(**ask)).choices[0].text
        stop = text[5:8]
        whole = await client.completions.create(**ask, stop=[stop])
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await client.completions.create(**ask, stop=stop, **options)]
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (text[: text.index(stop)], "stop")
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens < 24


async def test_responses(keyed: Keyed):
    """Whole and as events, with the text that a chat has."""
    async with keyed.client() as client:
        chat = await client.chat.completions.create(model=keyed.model, messages=HELLO, max_tokens=12, temperature=0)
        ask: Any = {"model": keyed.model, "input": HELLO, "max_output_tokens": 12, "temperature": 0}
        whole = await client.responses.create(**ask)
        async with client.responses.stream(**ask) as stream:
            kinds = [event.type async for event in stream]
    assert whole.output_text == chat.choices[0].message.content
    assert (whole.status, kinds[0], kinds[-1]) == ("incomplete", "response.created", "response.incomplete")


async def test_errors_are_the_clients_own(keyed: Keyed):
    """Each by its class."""
    async with keyed.client() as client:
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nobody", messages=HELLO)
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(model=keyed.model, prompt=[5] * 10, max_tokens=10**6)
        assert long.value.code == "context_length_exceeded"
    async with keyed.client("sk-wrong") as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()


async def test_the_client_comes_back_when_it_was_told(keyed: Keyed):
    """More at once than the limit allows is refused with the time to wait; left to itself the client waits, and all are
    served."""
    ask: Any = {"model": keyed.model, "prompt": "x", "max_tokens": 16}
    async with keyed.slow() as client:
        tried = await asyncio.gather(*(client.completions.create(**ask) for _ in range(3)), return_exceptions=True)
    refused = [one for one in tried if isinstance(one, openai.RateLimitError)]
    assert len(refused) == 2
    assert all(1 <= int(error.response.headers["retry-after"]) <= 2 for error in refused)
    async with keyed.slow(max_retries=10) as client:
        served = await asyncio.gather(*(client.completions.create(**ask) for _ in range(3)))
    assert [one.choices[0].finish_reason for one in served] == ["length"] * 3


async def test_the_document_says_that_a_key_is_needed(keyed: Keyed):
    """And needs none itself."""
    status, body = await asyncio.to_thread(fetch, f"{keyed.endpoint}/openapi.json")
    assert (status, json.loads(body)["security"]) == (200, [{"key": []}])
