"""A day of chats on a pool that is too small for it gives the tokens of cold runs, and the pool ends as it began."""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

from prfaas.engine.tiny import build_tiny
from services.local_cluster import LocalCluster, Plan, local_cluster
from tests.e2e.client import at_rest, eventually, metrics, openai_client, total
from tests.e2e.reference import Alone
from tests.soak.cache_day import Conversation, Turn, day, order
from tests.soak.conftest import Measured

#: A day takes minutes where the cold runs that it is compared with have a core of their own.
pytestmark = [pytest.mark.soak, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(3600)]

CONVERSATIONS = int(os.environ.get("CONVERSATIONS") or "300")
AT_ONCE, SEED = 4, 20260401
#: A difference is a tie where the reference's two best logits are nearer to each other than this part of the spread.
TIE, MAX_TIES = 1e-4, 1 / 10_000


@dataclass(slots=True)
class Tally:
    requests: int = 0
    left: int = 0
    tokens: int = 0
    ties: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    #: Of the engine that the answers are compared with: it is one thread's.
    engine: asyncio.Lock = field(default_factory=asyncio.Lock)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["kimi_linear", "qwen3_next"])
async def chats(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[LocalCluster, Alone]]:
    """A cluster whose pools hold a small part of the day, and the engine alone."""
    model = tmp_path_factory.mktemp("models") / f"tiny-{request.param}"
    build_tiny(model, request.param)
    alone = Alone(model)
    layout = alone.engine.info.layout
    pool_bytes = 12 * (layout.size_bytes(1000) + 4 * layout.state_bytes)
    logs = tmp_path_factory.mktemp("logs")
    plan = Plan(model_dir=model, threshold_tokens=600, pools=1, pool_bytes=pool_bytes, log_dir=logs, rebalance=False)
    async with local_cluster(plan) as cluster:
        yield cluster, alone


async def test_a_day_of_chats_equals_cold_runs(chats: tuple[LocalCluster, Alone], measured: Measured):
    """Turn by turn, whatever was cached, evicted, edited or left behind."""
    cluster, alone = chats
    tally = Tally()
    for batch in order(day(CONVERSATIONS, SEED), SEED, AT_ONCE):
        await asyncio.gather(*(_turn(cluster, alone, each, turn, tally) for each, turn in batch))
    await eventually(lambda: at_rest(cluster))
    evicted = sum([total(await metrics(cluster, name), "prfaas_pool_evicted_total") for name in _pools(cluster)])
    measured(
        requests=tally.requests,
        left_early=tally.left,
        tokens_compared=tally.tokens,
        ties=tally.ties,
        cached_share=tally.cached_tokens / tally.prompt_tokens,
        evictions=evicted,
    )
    assert not tally.wrong, tally.wrong[:5]
    assert tally.ties <= MAX_TIES * tally.tokens
    assert tally.cached_tokens > 0.1 * tally.prompt_tokens, "the cache was hardly used"
    assert evicted > 0, "the pool was large enough for everything"


def _pools(cluster: LocalCluster) -> list[str]:
    return [name for name in cluster.metrics if name.startswith("pool-")]


async def _turn(cluster: LocalCluster, alone: Alone, chat: Conversation, turn: Turn, tally: Tally) -> None:
    prompt = chat.prompt(turn)
    answer, cached = await _ask(cluster, prompt, turn)
    tally.requests += 1
    tally.left += turn.leaves_after is not None
    tally.prompt_tokens += len(prompt)
    tally.cached_tokens += cached
    async with tally.engine:
        await asyncio.to_thread(_compare, alone, prompt, answer, tally)
    chat.goes_on(prompt, answer)


async def _ask(cluster: LocalCluster, prompt: list[int], turn: Turn) -> tuple[list[int], int]:
    """The answer, as far as the client stayed for it, and how much of the prompt was cached."""
    answer: list[int] = []
    cached = 0
    async with openai_client(cluster) as client:
        stream = await client.completions.create(
            model=cluster.plan.model_dir.name,
            prompt=prompt,
            max_tokens=turn.max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
        async for chunk in stream:
            if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
                cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
            for choice in chunk.choices:
                answer += (choice.model_extra or {}).get("token_ids") or []
            if turn.leaves_after is not None and len(answer) >= turn.leaves_after:
                await stream.close()
                break
    return answer, cached


def _compare(alone: Alone, prompt: list[int], answer: list[int], tally: Tally) -> None:
    """With a cold run, up to the first tie: after one, two answers rightly differ."""
    expected, gaps = alone.answer_with_gaps(prompt, max(1, len(answer)))
    for place, token in enumerate(answer):
        tally.tokens += 1
        if token != expected[place]:
            if gaps[place] < TIE:
                tally.ties += 1
            else:
                tally.wrong.append(f"token {place} after {len(prompt)}: {token}, cold {expected[place]}")
            return
