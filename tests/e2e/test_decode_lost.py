"""A decode worker lost with streams on it: they go on elsewhere, and their clients can tell by the time only."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from services.http_client import fetch
from services.local_cluster import LocalCluster, Plan
from tests.e2e.client import LIVENESS_S, at_rest, eventually, metrics, openai_client, total
from tests.e2e.conftest import StartCluster
from tests.e2e.reference import Alone, token_ids

pytestmark = pytest.mark.asyncio(loop_scope="session")

FAMILY = "kimi_linear"
PD_NODES = ("decode-0", "decode-1")
ANSWER = 200
#: Streams have so many characters before their worker is lost.
BEFORE = 10
#: How long a stream may look for another worker when there is none.
PATIENCE_S = 3.0
#: A worker that is told to stop lets its streams go on for so long, which is less than they take.
DRAIN_S = 0.2


@dataclass
class Seen:
    """What one client got. Where an answer has several choices, of all of them."""

    text: str = ""
    finish: str | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    usage: tuple[int, int] = (0, 0)
    receipt: dict[str, Any] = field(default_factory=dict)

    def add(self, answer: Any) -> None:
        for choice in answer.choices:
            self.text += choice.text
            self.finish = choice.finish_reason or self.finish
            self.tokens += (choice.model_extra or {}).get("token_ids") or ()
            self.logprobs += choice.logprobs.token_logprobs if choice.logprobs is not None else ()
        if answer.usage is not None:
            self.usage = answer.usage.prompt_tokens, answer.usage.completion_tokens
        self.receipt = (answer.model_extra or {}).get("prfaas_receipt") or self.receipt


@dataclass(frozen=True)
class Asked:
    """One request. The streams of those that show no tokens go the short way through the router."""

    name: str
    prompt_tokens: int
    options: dict[str, Any]
    stream: bool = True
    shows_tokens: bool = False


SEEDED = {"temperature": 0.8, "seed": 5}
ASKED = (
    Asked("greedy", 700, {}),
    Asked("seeded", 90, SEEDED),
    Asked("long seeded", 3000, {"temperature": 1.2, "top_p": 0.9, "seed": 1 << 40}),
    Asked("logprobs", 300, {"logprobs": 3}, shows_tokens=True),
    Asked("seeded logprobs", 40, {**SEEDED, "logprobs": 2}, shows_tokens=True),
    Asked("whole", 500, {}, stream=False, shows_tokens=True),
    Asked("two choices", 60, {**SEEDED, "n": 2}, stream=False, shows_tokens=True),
)


async def ask(cluster: LocalCluster, asked: Asked, seen: Seen) -> Seen:
    async with openai_client(cluster) as client:
        options: dict[str, Any] = {
            "model": cluster.plan.model_dir.name,
            "prompt": token_ids(asked.prompt_tokens, seed=asked.prompt_tokens),
            "max_tokens": ANSWER,
            "temperature": 0,
            "extra_headers": {"x-prfaas-receipt": "1"},
            "extra_body": {"return_token_ids": True} if asked.shows_tokens else {},
            **asked.options,
        }
        if asked.stream:
            options |= {"stream": True, "stream_options": {"include_usage": True}}
            async for chunk in await client.completions.create(**options):
                seen.add(chunk)
        else:
            seen.add(await client.completions.create(**options))
    return seen


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(start_embedded: StartCluster, model_dir: Callable[[str], Path]) -> AsyncIterator[LocalCluster]:
    """Two nodes that decode, and one far away for long prompts. Each test leaves two that decode behind."""
    plan = Plan(
        model_dir=model_dir(FAMILY),
        threshold_tokens=1000,
        pools=1,
        extra={
            "router": ("--migration-timeout-s", str(PATIENCE_S)),
            "decode-worker": ("--drain-timeout-s", str(DRAIN_S)),
        },
    )
    async with start_embedded(plan) as cluster:
        yield cluster


async def busy(cluster: LocalCluster) -> list[str]:
    """Nodes that have something to decode."""
    return [node for node in PD_NODES if total(await metrics(cluster, node), "prfaas_worker_reservations") > 0]


async def end(cluster: LocalCluster, node: str, number: signal.Signals) -> str:
    """Until the worker is gone; returns where its metrics were."""
    worker, metrics_at = cluster.processes.pop(node), cluster.metrics.pop(node)
    worker.send_signal(number)
    await asyncio.wait_for(worker.wait(), LIVENESS_S)
    return metrics_at


async def revive(cluster: LocalCluster, node: str, metrics_at: str) -> None:
    """A worker with the same id, in another life."""
    await cluster.start_again(node)

    async def ready() -> bool:
        """the worker is back"""
        try:
            status, _ = await asyncio.to_thread(fetch, metrics_at.replace("/metrics", "/ready"))
        except OSError:
            return False
        return status == 200

    await eventually(ready)
    cluster.metrics[node] = metrics_at


async def migrations(cluster: LocalCluster, **labels: str) -> float:
    return total(await metrics(cluster, "router"), "prfaas_router_migrations_total", **labels)


async def under_way(answers: Sequence["asyncio.Task[Seen]"], streams: Sequence[Seen]) -> bool:
    assert not any(answer.done() for answer in answers), "an answer was over before its worker was lost"
    return min(len(one.text) for one in streams) >= BEFORE


async def test_a_decode_worker_killed_under_its_streams(pair: LocalCluster, alone: Callable[[str], Alone]):
    """Streams and whole answers, greedy and by chance, with probabilities, several choices and a stop string: each is
    what it was without the failure, and its receipt says how often it has moved."""
    undisturbed = await asyncio.gather(*(ask(pair, asked, Seen()) for asked in ASKED))
    quiet = {asked.name: one for asked, one in zip(ASKED, undisturbed, strict=True)}
    assert quiet["whole"].tokens == alone(FAMILY).answer(token_ids(500, seed=500), ANSWER)
    stopped = replace(ASKED[1], name="stop string", options={**SEEDED, "stop": [quiet["seeded"].text[-60:-40]]})
    quiet[stopped.name] = await ask(pair, stopped, Seen())
    assert quiet[stopped.name].finish == "stop"

    seen = {asked.name: Seen() for asked in (*ASKED, stopped)}
    answers = [asyncio.create_task(ask(pair, asked, seen[asked.name])) for asked in (*ASKED, stopped)]
    streams = [seen[asked.name] for asked in (*ASKED, stopped) if asked.stream]

    async def all_are_under_way() -> bool:
        """every stream has some of its tokens, and both nodes have some of the streams"""
        return await under_way(answers, streams) and len(await busy(pair)) == len(PD_NODES)

    await eventually(all_are_under_way)
    metrics_at = await end(pair, PD_NODES[0], signal.SIGKILL)
    await asyncio.gather(*answers)
    moved = 0
    for name, one in seen.items():
        expected, receipt = quiet[name], one.receipt
        assert one.text == expected.text, name
        assert (one.tokens, one.finish, one.usage) == (expected.tokens, expected.finish, expected.usage), name
        assert one.logprobs == pytest.approx(expected.logprobs, abs=1e-3), name
        assert abs(receipt["ttft_account"]["unaccounted"]) <= 0.001, name
        replays = [attempt for attempt in receipt["attempts"] if attempt["replayed_tokens"]]
        ending = "cancelled" if name == stopped.name else "done"  # by the router, which has found the stop string
        assert receipt["migrations"] == sum(attempt["ending"] == ending for attempt in replays), name
        moved += receipt["migrations"]
    assert moved > 0
    router = await metrics(pair, "router")
    # A receipt tells of its first choice only.
    assert moved <= await migrations(pair, outcome="moved") <= moved + 1
    assert await migrations(pair) == await migrations(pair, outcome="moved")
    assert total(router, "prfaas_router_migration_gap_seconds_count") == await migrations(pair)
    assert total(router, "prfaas_router_replayed_tokens_total", kind="cached") > 0
    await eventually(lambda: at_rest(pair))
    await revive(pair, PD_NODES[0], metrics_at)


#: By itself, and long enough to be still under way when its node has been found and ended.
LONG = Asked("long", 90, {**SEEDED, "max_tokens": 600})


async def begun(cluster: LocalCluster) -> tuple[Seen, "asyncio.Task[Seen]", str]:
    """A stream that is under way, its end, and the node that decodes it."""
    seen = Seen()
    answer = asyncio.create_task(ask(cluster, LONG, seen))

    async def it_is_under_way() -> bool:
        """the stream has some of its tokens"""
        return await under_way([answer], [seen])

    await eventually(it_is_under_way)
    [node] = await busy(cluster)
    return seen, answer, node


async def test_a_worker_whose_drain_is_cut_off(pair: LocalCluster):
    """Told to stop, it does not wait for its stream to end: the rest comes from the other one, which may well be a node
    that was lost before and has come back."""
    expected = await ask(pair, LONG, Seen())
    before = await migrations(pair, outcome="moved")
    seen, answer, node = await begun(pair)
    metrics_at = await end(pair, node, signal.SIGTERM)
    await answer
    assert (seen.text, seen.usage) == (expected.text, expected.usage)
    assert seen.receipt["migrations"] == await migrations(pair, outcome="moved") - before == 1
    assert seen.receipt["attempts"][-1]["route"]["decode"] != node
    await eventually(lambda: at_rest(pair))
    await revive(pair, node, metrics_at)


async def test_with_nobody_left_the_stream_says_so(pair: LocalCluster):
    """All workers that decode die: what was sent is right, and then comes an error in the stream, in time."""
    expected = await ask(pair, LONG, Seen())
    seen, answer, node = await begun(pair)
    await asyncio.gather(*(end(pair, each, signal.SIGKILL) for each in PD_NODES))
    with pytest.raises(openai.APIError, match=node):
        await asyncio.wait_for(answer, 10 * PATIENCE_S)
    assert seen.finish is None
    assert len(seen.text) < len(expected.text) and expected.text.startswith(seen.text)
    assert await migrations(pair, outcome="exhausted") == 1

    async def nothing_in_flight() -> bool:
        """the router holds nothing of it"""
        return total(await metrics(pair, "router"), "prfaas_router_in_flight_requests") == 0

    await eventually(nothing_in_flight)
