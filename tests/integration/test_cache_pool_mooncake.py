"""A shard of the cache on Mooncake Store: a cluster's memory below its own, and what its failures cost."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest

from prfaas.engine.cost_model import write_config
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS
from services.free_ports import free_ports
from tests.integration.cache_peers import (
    LIVENESS_S,
    SHARD,
    CacheWorld,
    Peer,
    Prompt,
    cache_world,
    comes_back,
    found,
    metric,
    until,
    written,
)
from tests.mooncake_cluster import MooncakeCluster, missing, start_mooncake

CLUSTER_BYTES = 64 << 20
#: Less than the prompts below, of which each takes 400 KB, most of it for the state.
MEMORY_BYTES = 2 << 20
TOKENS = 1024
PROMPTS = [Prompt(TOKENS, number=number) for number in range(8)]
#: Of each: its units and its state.
OBJECTS = TOKENS // HASH_UNIT_TOKENS + 1


@pytest.fixture
def mooncake(tmp_path: Path) -> Iterator[MooncakeCluster]:
    if why := missing():
        pytest.skip(f"Mooncake Store is not here: {why}")
    with start_mooncake(tmp_path, CLUSTER_BYTES) as cluster:
        yield cluster


@pytest.fixture
async def world(mooncake: MooncakeCluster, tmp_path: Path) -> AsyncIterator[CacheWorld]:
    write_config(tmp_path / "model", time_scale=0.0, byte_scale=0.002)
    async with cache_world(tmp_path / "model") as made:
        yield made


@pytest.fixture
def free_port() -> int:
    return free_ports(1)[0]


def on_mooncake(cluster: MooncakeCluster, port: int, *more: str) -> list[str]:
    """A shard that gives the cluster no memory, so that what it stores there outlives it."""
    where = ["--mooncake-master", cluster.master, "--mooncake-host", "127.0.0.1", "--mooncake-segment-bytes", "0"]
    return ["--store", "mooncake", *where, "--metrics-port", str(port), "--memory-bytes", str(MEMORY_BYTES), *more]


async def fill(peer: Peer, port: int) -> None:
    """Each prompt is put once Mooncake has those before it."""
    for number, each in enumerate(PROMPTS):
        await until(partial(peer.put, each, TOKENS, (TOKENS,)))
        await written(port, OBJECTS * (number + 1))


async def test_more_than_memory_holds_comes_back_from_mooncake(
    world: CacheWorld, mooncake: MooncakeCluster, free_port: int
):
    """Memory drops what Mooncake has; a get brings the same bytes back, KV and state."""
    await world.shard(*on_mooncake(mooncake, free_port))
    peer = await world.peer("w0")
    await peer.sees(SHARD)
    await fill(peer, free_port)
    assert await metric(free_port, "prfaas_pool_cooled_total") > 0
    assert [await found(peer, each, joint=True) for each in PROMPTS] == [TOKENS] * len(PROMPTS)
    assert await metric(free_port, 'prfaas_pool_store_reads_total{outcome="read"}') >= OBJECTS
    assert not peer.client.failures


async def test_a_shard_that_was_killed_finds_its_objects_again_by_the_admin_port(
    world: CacheWorld, mooncake: MooncakeCluster, free_port: int
):
    """They are in the cluster's memory, and the same bytes come from there; without the port nobody knows of them."""
    options = on_mooncake(mooncake, free_port, "--mooncake-admin", mooncake.admin)
    first = await world.shard(*options)
    peer = await world.peer("w0")
    await peer.sees(SHARD)
    await fill(peer, free_port)
    await first.kill()
    again = await world.shard(*options)
    assert again.serving["recovered"] == OBJECTS * len(PROMPTS)
    await comes_back(again, peer)
    assert [await found(peer, each, joint=True) for each in PROMPTS] == [TOKENS] * len(PROMPTS)
    await again.kill()
    blind = await world.shard(*on_mooncake(mooncake, free_port))
    assert blind.serving["recovered"] == 0


async def test_requests_go_on_without_a_master(world: CacheWorld, mooncake: MooncakeCluster, free_port: int):
    """What only Mooncake has is a miss, in time; what comes now is served from memory; and the shard still ends."""
    shard = await world.shard(*on_mooncake(mooncake, free_port))
    peer = await world.peer("w0")
    await peer.sees(SHARD)
    await fill(peer, free_port)
    mooncake.master_process.kill()
    mooncake.master_process.wait(10)
    async with asyncio.timeout(LIVENESS_S):
        # Each is brought and compared, or is not there.
        outcomes = [await found(peer, each, joint=True) for each in PROMPTS]
    assert 0 in outcomes and TOKENS in outcomes, outcomes
    assert await metric(free_port, 'prfaas_pool_store_reads_total{outcome="failed"}') > 0
    fresh = [Prompt(TOKENS, number=number) for number in range(100, 103)]
    for each in fresh:
        assert await peer.put(each, TOKENS, (TOKENS,))
        assert await found(peer, each, joint=True) == TOKENS
    assert shard.process.returncode is None
    shard.process.terminate()
    assert await shard.exit_code() == 0, shard.said


async def test_a_shard_that_finds_no_master_says_so(world: CacheWorld, mooncake: MooncakeCluster, free_port: int):
    """It does not serve, and names the setting."""
    mooncake.master_process.kill()
    mooncake.master_process.wait(10)
    shard = await world.start_shard(*on_mooncake(mooncake, free_port))
    assert await shard.exit_code() != 0
    assert "pool.mooncake_master" in shard.said
