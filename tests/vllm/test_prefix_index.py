"""Routers know what vLLM servers keep of prompts, and send what comes again where it is kept."""

import asyncio
from functools import partial

import pytest

from services.local_cluster import LocalCluster
from tests.e2e.client import LIVENESS_S, complete, eventually, metrics, openai_client, total
from tests.vllm.conftest import StartCluster
from tests.vllm.prompts import token_ids
from tests.vllm.servers import counted

pytest.importorskip("zmq", reason="pyzmq comes with the extra vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

#: Of vLLM on a CPU: a prefix of a prompt can be gone on from where a block ends.
BLOCK = 128
LENGTH, OUTPUT, QUESTION = 3000, 150, 100
HITS = "vllm:prefix_cache_hits_total"


async def test_a_conversation_stays_where_its_history_is_kept(start: StartCluster) -> None:
    """The first turn is prefilled in the other region. Its server has the prompt then, and that of the PD node the
    answer as well: the same prompt again is hardly computed there, and the next turn is short here. Prefill takes what
    the index has promised, to the token; so say the receipt, the usage and vLLM's own counters."""
    async with start("qwen3", threshold_tokens=1000, rebalance=False) as cluster:
        prompt = token_ids(LENGTH, seed=1)
        first = await complete(cluster, prompt, OUTPUT)
        assert (first.receipt["path"], first.receipt["cache"]["reported_tokens"]) == ("remote", 0)
        for worker, tokens in (("prefill-0", LENGTH - 1), ("decode-0", LENGTH + OUTPUT - 1)):
            await eventually(partial(_keeps, cluster, worker, tokens), LIVENESS_S)
        history = (LENGTH + OUTPUT - 1) // BLOCK * BLOCK
        hits = await counted(cluster, "decode-0", HITS)
        turn = [*prompt, *first.token_ids, *token_ids(QUESTION, seed=2)]
        second = await complete(cluster, turn, 8)
        receipt = second.receipt
        assert (receipt["path"], receipt["reason"]) == ("local", "short_prompt")
        assert receipt["cache"]["matched_own_tokens"] == receipt["cache"]["reported_tokens"] == history
        assert receipt["uncached_tokens"] == len(turn) - history
        assert await counted(cluster, "decode-0", HITS) - hits >= history
        samples = await metrics(cluster, "router")
        assert total(samples, "prfaas_router_cached_tokens_total") == history
        assert total(samples, "prfaas_router_cache_error_tokens_sum") == 0
        assert await _usage(cluster, turn) == (len(turn) - 2) // BLOCK * BLOCK
        cold = await complete(cluster, [token_ids(1, seed=3)[0], *turn[1:]], 8)
        assert cold.receipt["cache"]["matched_own_tokens"] == cold.receipt["cache"]["reported_tokens"] == 0


async def _keeps(cluster: LocalCluster, worker: str, tokens: int) -> bool:
    """the worker's engine keeps so much of the prompt, and the router has been told"""
    samples = await metrics(cluster, worker)
    await asyncio.sleep(0.5)
    return total(samples, "prfaas_worker_engine_prefix_tokens") == tokens // BLOCK * BLOCK


async def _usage(cluster: LocalCluster, prompt: list[int]) -> int:
    """What a client is told that was cached."""
    async with openai_client(cluster) as client:
        model = cluster.plan.model_dir.name
        answer = await client.completions.create(model=model, prompt=prompt, max_tokens=1, temperature=0)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0
