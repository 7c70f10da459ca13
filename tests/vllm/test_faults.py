"""Servers that die and clients that leave, with vLLM engines: right answers, and nothing stays behind."""

import asyncio
import random
from collections import Counter

import pytest

from prfaas.request import Mode
from services.free_ports import free_ports
from services.local_cluster import LocalCluster, Wan
from tests.e2e.client import Completed, at_rest, complete, eventually, metrics, openai_client, total
from tests.vllm.admin import KEY, pin_mode, set_line
from tests.vllm.conftest import StartCluster
from tests.vllm.prompts import token_ids
from tests.vllm.servers import counted, server_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

FAMILY, LENGTH, OUTPUT = "nemotron_h", 3000, 24
#: No part of a request is long beside the others, so that what is aborted at random is aborted in each of them.
WAN = Wan(mbit=400, rtt_ms=20)
#: Rows of a prompt take seconds on it.
NARROW_MBIT = 2
ABORTS, AT_ONCE, SHORT, LONG_OUTPUT = 200, 6, 400, 64
LIVENESS_S, START_S = 60.0, 900.0
WORKERS = ("prefill-0", "decode-0")
HELD = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")


async def test_killed_in_mid_transfer_and_aborted_at_any_time(start: StartCluster) -> None:
    """The server that prefills is killed while its rows cross: the answer is the same, from the other region alone.
    Started again at the same addresses, it is used again. Requests that are given up at any time leave nothing in
    either server."""
    prompts = [token_ids(LENGTH, seed=seed) for seed in range(3)]
    kv, rpc, link = free_ports(3)
    ports = ("--kv-port", str(kv), "--rpc-port", str(rpc), "--link-port", str(link))
    async with start(FAMILY, WAN, ports, admin_key=KEY) as cluster:
        await pin_mode(cluster, Mode.NEVER)
        wanted = [await _alone(cluster, ids) for ids in prompts]
        await pin_mode(cluster, Mode.ALWAYS)

        await set_line(cluster, NARROW_MBIT)
        under_way = asyncio.create_task(complete(cluster, prompts[0], OUTPUT))
        await eventually(lambda: _prefilled(cluster), LIVENESS_S)
        server_of(cluster, "prefill-0").kill()
        done = await under_way
        assert done.token_ids == wanted[0] and done.receipt["path"] != "remote"
        await set_line(cluster, WAN.mbit)

        await asyncio.wait_for(cluster.processes["prefill-0"].wait(), LIVENESS_S)
        await eventually(lambda: _live(cluster, 1), LIVENESS_S)
        await cluster.start_again("prefill-0")
        await eventually(lambda: _live(cluster, len(WORKERS)), START_S)
        done = await complete(cluster, prompts[1], OUTPUT)
        assert done.token_ids == wanted[1] and _crossed(done)

        servers = [server_of(cluster, worker).pid for worker in WORKERS]
        ends = await _abort_many(cluster)
        assert min(ends["before"], ends["after"]) > ABORTS // 10, ends
        await eventually(lambda: at_rest(cluster), LIVENESS_S)
        await eventually(lambda: _nothing_held(cluster), LIVENESS_S)
        assert servers == [server_of(cluster, worker).pid for worker in WORKERS]
        for ids, answer in zip(prompts, wanted, strict=True):
            done = await complete(cluster, ids, OUTPUT)
            assert done.token_ids == answer and _crossed(done)


async def _alone(cluster: LocalCluster, ids: list[int]) -> list[int]:
    """What one server answers that does it all."""
    done = await complete(cluster, ids, OUTPUT)
    assert done.receipt["prefill"] == done.receipt["decode"] == "decode-0"
    return done.token_ids


async def _prefilled(cluster: LocalCluster) -> bool:
    """a prompt is computed: its last rows have only begun to cross"""
    return await counted(cluster, "prefill-0", "vllm:prompt_tokens_total") > 0


def _crossed(done: Completed) -> bool:
    return bool(done.receipt["path"] == "remote" and done.receipt["recomputed_tokens"] == 1)


async def _live(cluster: LocalCluster, workers: int) -> bool:
    """the router has so many workers"""
    return total(await metrics(cluster, "router"), "prfaas_router_live_nodes") == workers


async def _nothing_held(cluster: LocalCluster) -> bool:
    """both servers are empty, by what vLLM itself says"""
    return not any([await counted(cluster, worker, name) for worker in WORKERS for name in HELD])


async def _abort_many(cluster: LocalCluster) -> Counter[str]:
    """Some at a time, each given up after a while or after some tokens of its own. How many were `before` their first
    token then, how many `after` it."""
    loop, chance, turns, ends = asyncio.get_running_loop(), random.Random(7), asyncio.Semaphore(AT_ONCE), Counter[str]()
    started_s = loop.time()
    unhindered = (complete(cluster, token_ids(SHORT, seed=900 + number), LONG_OUTPUT) for number in range(AT_ONCE))
    assert all(map(_crossed, await asyncio.gather(*unhindered)))
    latest_s = loop.time() - started_s

    async def one(seed: int, after_s: float, after_tokens: int) -> None:
        async with turns:
            came = await _given_up(cluster, token_ids(SHORT, seed=seed), after_s, after_tokens)
            ends["after" if came else "before"] += 1

    await asyncio.gather(
        *(one(1000 + number, chance.uniform(0, latest_s), chance.randint(1, LONG_OUTPUT)) for number in range(ABORTS))
    )
    return ends


async def _given_up(cluster: LocalCluster, ids: list[int], after_s: float, after_tokens: int) -> int:
    """How many tokens came until the client left, by closing its connection."""
    came = 0
    async with openai_client(cluster) as client:
        try:
            async with asyncio.timeout(after_s):
                stream = await client.completions.create(
                    model=cluster.plan.model_dir.name, prompt=ids, max_tokens=LONG_OUTPUT, temperature=0, stream=True
                )
                async for _ in stream:
                    came += 1
                    if came == after_tokens:
                        break
        except TimeoutError:
            pass
    return came
