"""Remote prefill and decode give the very tokens of the same engine alone, at every kind of prompt length, and when a
part of the prompt is cached."""

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from services.local_cluster import PD_REGION, PREFILL_REGION, LocalCluster
from tests.e2e.caches import UNIT, cached, grown, objects, units
from tests.e2e.client import at_rest, complete, eventually, over_pd_nodes
from tests.e2e.reference import Alone, token_ids

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHUNK = 256
LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK - 1, 3 * CHUNK, 3 * CHUNK + 1)
LONG = 8_000
OUTPUT = 24

Hybrid = tuple[str, LocalCluster]
Reference = Callable[[str], Alone]


@pytest.mark.parametrize("length", [*LENGTHS, LONG])
async def test_one_at_a_time(hybrid: Hybrid, alone: Reference, length: int):
    """k*chunk - 1, k*chunk and k*chunk + 1 are where a state at N instead of N-1 would show."""
    family, cluster = hybrid
    ids = token_ids(length, seed=length)
    done = await complete(cluster, ids, OUTPUT)
    assert done.token_ids == alone(family).answer(ids, OUTPUT)
    assert done.receipt["path"] == "remote"
    assert done.receipt["recomputed_tokens"] == 1
    assert done.receipt["kv_bytes"] == alone(family).engine.info.layout.size_bytes(length - 1)


async def test_eight_at_once(hybrid: Hybrid, alone: Reference):
    """Whoever else runs changes nothing: transfers, prefills and decodes of eight requests overlap."""
    family, cluster = hybrid
    prompts = [token_ids(length, seed=100 + length) for length in (2, 255, 257, 700, 1024, 1025, 2000, LONG)]
    done = await asyncio.gather(*(complete(cluster, ids, OUTPUT) for ids in prompts))
    for one, ids in zip(done, prompts, strict=True):
        assert one.token_ids == alone(family).answer(ids, OUTPUT), len(ids)


async def test_decode_counts_what_it_forwards(hybrid: Hybrid):
    """The decode engines' own count equals the sum of recomputed + output - 1, so that no constant can pass."""
    _, cluster = hybrid
    name = "prfaas_worker_decode_forwarded_tokens_total"
    await eventually(lambda: at_rest(cluster))
    before = await over_pd_nodes(cluster, name)
    outputs = (1, 2, 7, 24)
    done = [await complete(cluster, token_ids(300 + wanted, seed=wanted), wanted) for wanted in outputs]
    expected = sum(one.receipt["recomputed_tokens"] + len(one.token_ids) - 1 for one in done)
    assert [len(one.token_ids) for one in done] == list(outputs)

    async def counted() -> bool:
        """the engines have reported what they forwarded"""
        return await over_pd_nodes(cluster, name) - before == expected

    await eventually(counted)


async def test_a_remote_turn_sends_what_is_missing(hybrid: tuple[str, LocalCluster], alone: Reference):
    """The prefill region has the prompt, the decode region prompt and answer: the first decides what is computed, the
    second what crosses, which is the missing KV and the full state (M1, M2)."""
    family, cluster = hybrid
    model = alone(family)
    layout = model.engine.info.layout
    kv = {region: await objects(cluster, region) for region in (PREFILL_REGION, PD_REGION)}
    states = {region: await objects(cluster, region, "state") for region in (PREFILL_REGION, PD_REGION)}
    prompt = token_ids(900, seed=4)
    first = await complete(cluster, prompt, 100)
    assert first.receipt["path"] == "remote" and cached(first) == 0
    assert first.receipt["kv_bytes"] == layout.size_bytes(899)
    for region, tokens in ((PREFILL_REGION, 899), (PD_REGION, 999)):
        await eventually(partial(grown, cluster, region, kv[region] + units(tokens) // UNIT, states[region] + 1))
    again = await complete(cluster, prompt, 100)
    assert again.token_ids == first.token_ids == model.answer(prompt, 100)
    assert cached(again) == units(899)
    assert again.receipt["kv_bytes"] == layout.state_bytes + layout.bytes_per_token * (899 - units(898))
    turn = prompt + first.token_ids + token_ids(80, seed=5)
    second = await complete(cluster, turn, 20)
    assert cached(second) >= units(899)
    held = units(999)
    assert second.receipt["kv_bytes"] == layout.state_bytes + layout.bytes_per_token * (len(turn) - 1 - held)
    assert second.token_ids == model.answer(turn, 20)
    await eventually(partial(at_rest, cluster))
