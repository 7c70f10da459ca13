"""A Mooncake Store that fails: our calls end with our error, in time, and nothing wrong is served."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.blockstore.mooncake import MooncakeBlockStore
from prfaas.blockstore.mooncake_calls import MooncakeSettings
from prfaas.blockstore.port import StoreFailed
from tests.mooncake_cluster import MooncakeCluster, missing, start_mooncake

MIB = 1 << 20
LIMIT_S = 60.0
KEY, DATA = b"k" + bytes(16), bytes(range(256)) * 100


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[MooncakeCluster]:
    if why := missing():
        pytest.skip(f"Mooncake Store is not here: {why}")
    with start_mooncake(tmp_path, 16 * MIB) as cluster:
        yield cluster


def settings(cluster: MooncakeCluster) -> MooncakeSettings:
    return MooncakeSettings(
        master=cluster.master, admin=cluster.admin, host="127.0.0.1", max_object_bytes=MIB, threads=2, deadline_s=5.0
    )


async def get(store: MooncakeBlockStore) -> bytes | None:
    """The header; the data is right, or the memory for it is as it was."""
    into = bytearray(len(DATA))
    try:
        header = await store.get(KEY, memoryview(into))
    except StoreFailed:
        assert into == bytes(len(DATA))
        raise
    assert into == (bytes(len(DATA)) if header is None else DATA)
    return header


async def listed(store: MooncakeBlockStore) -> list[bytes]:
    async with aclosing(store.stored()) as found:
        return [stored.key async for stored in found]


async def test_shards_and_namespaces_do_not_meet(cluster: MooncakeCluster):
    """The same key in another shard or of another model is another object."""
    stores = [
        await MooncakeBlockStore.open(settings(cluster), namespace, shard)
        for namespace, shard in (("model-a", "0"), ("model-a", "1"), ("model-b", "0"))
    ]
    await stores[0].put(KEY, b"h", memoryview(DATA))
    assert [await get(store) for store in stores] == [b"h", None, None]
    assert [await listed(store) for store in stores] == [[KEY], [], []]
    for store in stores:
        await store.close()


async def test_without_the_admin_port_nothing_is_recovered(cluster: MooncakeCluster):
    """Nobody else lists keys; what is asked for by its key is there all the same."""
    store = await MooncakeBlockStore.open(settings(cluster), "model-a", "0")
    await store.put(KEY, b"h", memoryview(DATA))
    await store.close()
    store = await MooncakeBlockStore.open(replace(settings(cluster), admin=""), "model-a", "0")
    assert await listed(store) == []
    assert await get(store) == b"h"
    await store.close()


async def test_objects_of_a_machine_that_is_gone_are_not_served(cluster: MooncakeCluster):
    """Reading them fails until the master knows, then they are not there; puts fail as well."""
    store = await MooncakeBlockStore.open(settings(cluster), "model-a", "0")
    await store.put(KEY, b"h", memoryview(DATA))
    cluster.holder.kill()
    cluster.holder.wait(10)
    with pytest.raises(StoreFailed):
        await get(store)
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                assert await get(store) is None
                break
            except StoreFailed:
                await asyncio.sleep(0.2)
    assert store.damaged == 0 and store.used_bytes == 0
    await store.close()


async def test_a_master_that_hangs_costs_no_more_than_the_deadline(cluster: MooncakeCluster):
    """Calls fail in time, other work goes on, and when it answers again the store does too."""
    store = await MooncakeBlockStore.open(replace(settings(cluster), deadline_s=0.5), "model-a", "0")
    await store.put(KEY, b"h", memoryview(DATA))
    cluster.master_process.send_signal(signal.SIGSTOP)
    await asyncio.to_thread(os.waitid, os.P_PID, cluster.master_process.pid, os.WSTOPPED | os.WNOWAIT)
    try:
        for _ in range(3):
            with pytest.raises(StoreFailed, match="not done"):
                await get(store)
    finally:
        cluster.master_process.send_signal(signal.SIGCONT)
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                assert await get(store) == b"h"
                break
            except StoreFailed:
                await asyncio.sleep(0.1)
    await store.close()


async def test_a_master_that_is_gone_fails_every_call(cluster: MooncakeCluster):
    """None hangs, and the store can still be closed."""
    store = await MooncakeBlockStore.open(settings(cluster), "model-a", "0")
    await store.put(KEY, b"h", memoryview(DATA))
    cluster.master_process.kill()
    cluster.master_process.wait(10)
    with pytest.raises(StoreFailed):
        await store.put(KEY[:-1] + b"\1", b"h", memoryview(DATA))
    with pytest.raises(StoreFailed):
        await get(store)
    with pytest.raises(StoreFailed):
        await store.delete(KEY)
    with pytest.raises(StoreFailed):
        await listed(store)
    async with asyncio.timeout(LIMIT_S):
        await store.close()


async def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    """It is an optional dependency."""
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    nowhere = MooncakeSettings(master="127.0.0.1:1", host="127.0.0.1", max_object_bytes=1)
    with pytest.raises(StoreFailed, match="extra `mooncake`"):
        await MooncakeBlockStore.open(nowhere, "model-a", "0")
