"""Two networks in one server: inside a region NIXL carries KV between vLLM servers, ours crosses regions, and the route
of each request says which.
"""

import asyncio
import subprocess

import pytest

from prfaas.engine.vllm.own_network import CONVOLUTIONS
from prfaas.kvcache.layout import KvLayout
from services.local_cluster import LocalCluster
from tests.e2e.client import LIVENESS_S, at_rest, complete, eventually
from tests.vllm.conftest import PYTHON, StartCluster, StartEngine
from tests.vllm.prompts import token_ids
from tests.vllm.servers import counted, until_ours_say

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

#: Of its prompts, both rows and states have to come.
FAMILY, THRESHOLD = "nemotron_h", 1000
SHORT, LONG = (17, 130, 700), (1500, 3000)
OUTPUT = 24
#: NIXL's connector gives the blocks of a prompt back when they were read, or when its lease is over.
LEASE_S = 60.0


@pytest.fixture(autouse=True, scope="module")
def _nixl() -> None:
    """NIXL is no part of vLLM."""
    there = subprocess.run([PYTHON, "-c", "import nixl._api"], capture_output=True, check=False)
    if there.returncode:
        pytest.skip("vLLM's environment has no NIXL: `pip install nixl`")


async def test_the_route_says_which_network_carries_it(
    start: StartCluster, alone: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short prompts are prefilled beside the node that decodes them, and NIXL carries their KV; long ones in the other
    region, and ours does. Both give the answers of one server alone, and each network counts what it has carried."""
    # Of the servers of both regions, that the other region's KV can be read here.
    monkeypatch.setenv(CONVOLUTIONS, "DS")
    # And not through memory that servers of one machine share.
    monkeypatch.setenv("UCX_TLS", "tcp")
    one_by_one, at_once = ([token_ids(n, seed=seed + n) for n in (*SHORT, *LONG)] for seed in (0, 100))
    asked = [*one_by_one, *at_once]
    async with alone(FAMILY) as engine:
        answers = [await engine.answer(ids, OUTPUT) for ids in asked]
        layout = engine.info.layout
    options, plan = ("--vllm-network", "nixl"), {"threshold_tokens": THRESHOLD, "pd_roles": ("prefill", "decode")}
    async with start(FAMILY, decode_options=options, **plan) as cluster:
        done = [await complete(cluster, ids, OUTPUT) for ids in one_by_one]
        done += await asyncio.gather(*(complete(cluster, ids, OUTPUT) for ids in at_once))
        for one, ids, answer in zip(done, asked, answers, strict=True):
            local, way = len(ids) <= THRESHOLD, one.receipt
            assert one.token_ids == answer, len(ids)
            assert (way["path"], way["prefill"]) == (("local", "decode-0") if local else ("remote", "prefill-0"))
            assert (way["decode"], way["recomputed_tokens"]) == ("decode-1", 1)
            assert way["kv_bytes"] == (0 if local else layout.size_bytes(len(ids) - 1))
        await eventually(lambda: at_rest(cluster), LIVENESS_S)
        await _each_counts_its_own(cluster, layout, [len(ids) for ids in asked])
        await eventually(lambda: _given_back(cluster), LEASE_S)


async def _each_counts_its_own(cluster: LocalCluster, layout: KvLayout, lengths: list[int]) -> None:
    """Ours exactly what crossed between the regions, NIXL the rest, in whole blocks; vLLM the tokens of both."""
    short = [length for length in lengths if length <= THRESHOLD]
    ours = sum(layout.size_bytes(length - 1) for length in lengths if length > THRESHOLD)
    theirs = sum(layout.size_bytes(length - 1) for length in short)
    for process, name, nbytes in (
        ("prefill-0", "prfaas_worker_kv_sent_bytes_total", ours),
        ("decode-0", "prfaas_worker_kv_sent_bytes_total", 0),
        ("decode-1", "prfaas_worker_kv_received_bytes_total", ours),
    ):
        await until_ours_say(cluster, process, name, nbytes)
    assert await counted(cluster, "decode-1", "vllm:nixl_bytes_transferred_sum") >= theirs
    assert await counted(cluster, "decode-1", "vllm:nixl_bytes_transferred_count") == len(short)
    assert await counted(cluster, "decode-1", "vllm:nixl_num_failed_transfers_total") == 0
    # Of a model without states NIXL would bring the last token as well, and it would be computed again all the same.
    assert await counted(cluster, "decode-1", "vllm:external_prefix_cache_hits_total") == sum(lengths) - len(lengths)


async def _given_back(cluster: LocalCluster) -> bool:
    """no server holds a block of any prompt"""
    used = [await counted(cluster, each, "vllm:kv_cache_usage_perc") for each in ("decode-0", "decode-1")]
    return not any(used)
