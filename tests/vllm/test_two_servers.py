"""Two vLLM servers in two regions, behind our router and workers, answer as one server alone does."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from prfaas.kvcache.layout import KvLayout, TensorKind
from services.local_cluster import LocalCluster
from tests.e2e.client import LIVENESS_S, Completed, at_rest, complete, eventually
from tests.vllm.conftest import EXACT, StartCluster, StartEngine
from tests.vllm.damage import Damage
from tests.vllm.prompts import token_ids
from tests.vllm.servers import counted, until_ours_say

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="module")]

LENGTHS = (17, 130, 300, 700, 1500, 3000)
OUTPUT = 24
#: No two tests have a prompt in common: a server may have a cache.
SEEDS = {"one by one": 0, "at once": 100, TensorKind.TOKENS: 200, TensorKind.STATE: 300}
#: Where we count the bytes that cross.
BYTES = {
    "prefill-0": "prfaas_worker_kv_sent_bytes_total",
    "decode-0": "prfaas_worker_kv_received_bytes_total",
    "router": "prfaas_router_kv_transfer_bytes_total",
}


@dataclass(frozen=True, slots=True)
class Regions:
    """`alone`: the answers of one server, to the prompts of each seed in the order of LENGTHS."""

    cluster: LocalCluster
    layout: KvLayout
    alone: dict[int, list[list[int]]]


def prompts(seed: int) -> list[list[int]]:
    return [token_ids(length, seed=seed + length) for length in LENGTHS]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=EXACT)
async def regions(
    request: pytest.FixtureRequest, start: StartCluster, alone: StartEngine, damage: Damage
) -> AsyncIterator[Regions]:
    async with alone(request.param) as engine:
        answers = {seed: [await engine.answer(ids, OUTPUT) for ids in prompts(seed)] for seed in SEEDS.values()}
        layout = engine.info.layout
    async with start(request.param, decode_options=("--vllm-python", str(damage.python))) as cluster:
        yield Regions(cluster, layout, answers)


async def test_answers_are_the_same_one_by_one_and_at_once(regions: Regions) -> None:
    """Every prompt is prefilled in the other region; its KV crosses, and one token of it is computed again."""
    one_by_one, at_once = prompts(SEEDS["one by one"]), prompts(SEEDS["at once"])
    done = [await complete(regions.cluster, ids, OUTPUT) for ids in one_by_one]
    done += await asyncio.gather(*(complete(regions.cluster, ids, OUTPUT) for ids in at_once))
    answers = [*regions.alone[SEEDS["one by one"]], *regions.alone[SEEDS["at once"]]]
    for one, ids, answer in zip(done, (*one_by_one, *at_once), answers, strict=True):
        assert one.receipt["path"] == "remote"
        assert one.receipt["kv_bytes"] == regions.layout.size_bytes(len(ids) - 1)
        assert one.receipt["recomputed_tokens"] == 1
        assert one.token_ids == answer, len(ids)
    await _counters_agree(regions, done, (*one_by_one, *at_once))


async def _counters_agree(regions: Regions, done: list[Completed], asked: tuple[list[int], ...]) -> None:
    """vLLM's own counters and ours, of all that the servers have done since they were started."""
    cluster, layout = regions.cluster, regions.layout
    await eventually(lambda: at_rest(cluster), LIVENESS_S)
    given = sum(len(ids) for ids in asked)
    crossed = await counted(cluster, "decode-0", "vllm:external_prefix_cache_hits_total")
    computed = {
        worker: await counted(cluster, worker, "vllm:prompt_tokens_by_source_total", source="local_compute")
        for worker in ("prefill-0", "decode-0")
    }
    assert await counted(cluster, "decode-0", "vllm:prompt_tokens_total") == given
    assert await counted(cluster, "decode-0", "vllm:generation_tokens_total") == sum(len(one.token_ids) for one in done)
    assert computed["prefill-0"] == crossed == given - len(done)
    assert computed["decode-0"] == sum(one.receipt["recomputed_tokens"] for one in done)
    nbytes = crossed * layout.bytes_per_token + len(done) * layout.state_bytes
    assert nbytes == sum(one.receipt["kv_bytes"] for one in done)
    for process, name in BYTES.items():
        await until_ours_say(cluster, process, name, nbytes)


@pytest.mark.parametrize("kind", TensorKind)
async def test_what_is_damaged_on_arrival_shows(kind: TensorKind, regions: Regions, damage: Damage) -> None:
    """Rows or states that become zeros after they were loaded: no answer is that of one server alone. So the same
    answers mean that both arrive, and that both matter."""
    if not any(tensor.kind is kind for layer in regions.layout.layers for tensor in layer):
        pytest.skip("this model has none")
    damage.of(kind)
    try:
        done = [await complete(regions.cluster, ids, OUTPUT) for ids in prompts(SEEDS[kind])]
    finally:
        damage.none()
    for one, answer, length in zip(done, regions.alone[SEEDS[kind]], LENGTHS, strict=True):
        assert (one.receipt["path"], one.receipt["recomputed_tokens"]) == ("remote", 1)
        assert one.token_ids != answer, length
