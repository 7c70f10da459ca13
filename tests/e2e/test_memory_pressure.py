"""Pools far too small for what comes: who has room goes on to the end, the others are told when to come back."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import openai
import pytest

from services.local_cluster import LocalCluster, Plan
from tests.e2e.client import at_rest, eventually, metrics, openai_client, total
from tests.e2e.conftest import StartCluster
from tests.e2e.reference import Alone, token_ids

pytestmark = pytest.mark.asyncio(loop_scope="session")

#: Of each pool, and of each node that decodes: two of the long prompts fit into either.
POOL_BYTES = 5 << 20
MAX_TOKENS = 7000
LONG, ANSWER = 3000, 40
WORKERS = ("prefill-0", "decode-0", "decode-1")
#: Of the whole crowd, which is some seconds' work.
LIMIT_S = 120.0


@dataclass
class Crowd:
    """All at once, each with a prompt of its own, and each comes back until it is served."""

    cluster: LocalCluster
    requests: int
    served: dict[int, list[int]] = field(default_factory=dict)
    refused: Counter[int] = field(default_factory=Counter)

    async def run(self) -> None:
        async with openai_client(self.cluster) as client, asyncio.TaskGroup() as group:
            for number in range(self.requests):
                group.create_task(self._ask(client, number))

    async def _ask(self, client: openai.AsyncOpenAI, number: int) -> None:
        while number not in self.served:
            try:
                answer = await client.completions.create(
                    model=self.cluster.plan.model_dir.name,
                    prompt=token_ids(LONG, seed=number),
                    max_tokens=ANSWER,
                    temperature=0,
                    extra_body={"return_token_ids": True},
                )
            except openai.InternalServerError as error:
                if error.status_code != 503:
                    raise
                self.refused[number] += 1
                await asyncio.sleep(float(error.response.headers["retry-after"]))
            else:
                assert answer.choices[0].model_extra is not None
                self.served[number] = answer.choices[0].model_extra["token_ids"]


async def watched(cluster: LocalCluster, peaks: Counter[str]) -> None:
    """Until it is cancelled: what each worker has taken on, and that it is never more than it has room for."""
    while True:
        for node in WORKERS:
            samples = await metrics(cluster, node)
            free, whole = (total(samples, f"prfaas_worker_kv_{kind}_bytes") for kind in ("free", "total"))
            assert 0 <= free <= whole <= POOL_BYTES
            promised = total(samples, "prfaas_worker_committed_tokens")
            assert promised <= MAX_TOKENS
            peaks[node] = max(peaks[node], int(whole - free))
            peaks[f"tokens of {node}"] = max(peaks[f"tokens of {node}"], int(promised))
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("threshold", "requests"),
    [
        pytest.param(0, 14, id="from elsewhere"),
        pytest.param(0, 64, id="a large one", marks=pytest.mark.slow),
        pytest.param(100_000, 48, id="on the node", marks=pytest.mark.slow),
    ],
)
async def test_field_E1_a_crowd_that_does_not_fit(
    threshold: int,
    requests: int,
    start_embedded: StartCluster,
    model_dir: Callable[[str], Path],
    alone: Callable[[str], Alone],
):
    """Nothing stands still with all room taken: everybody is served in the end, and rightly, or was told with a time to
    come back; and afterwards all room is free."""
    plan = Plan(
        model_dir=model_dir("cost_model"),
        threshold_tokens=threshold,
        mode="always" if not threshold else "never",
        rebalance=False,
        kv_pool_bytes=POOL_BYTES,
        extra={"decode-worker": ("--max-tokens", str(MAX_TOKENS))},
    )
    async with start_embedded(plan) as cluster:
        crowd, peaks = Crowd(cluster, requests), Counter[str]()
        watching = asyncio.create_task(watched(cluster, peaks))
        try:
            async with asyncio.timeout(LIMIT_S):
                await crowd.run()
        finally:
            watching.cancel()
            [seen] = await asyncio.gather(watching, return_exceptions=True)
        assert isinstance(seen, asyncio.CancelledError), seen
        reference = alone("cost_model")
        for number, tokens in crowd.served.items():
            assert tokens == reference.answer(token_ids(LONG, seed=number), ANSWER), number
        assert crowd.refused.total() > 0, "there was room for all of them: this was no pressure"
        assert max(peaks[f"tokens of {node}"] for node in WORKERS[1:]) > MAX_TOKENS / 2
        assert (peaks["prefill-0"] > 0) is (threshold == 0)
        await eventually(lambda: at_rest(cluster))
        for node in WORKERS:
            samples = await metrics(cluster, node)
            assert total(samples, "prfaas_worker_kv_free_bytes") == total(samples, "prfaas_worker_kv_total_bytes")
