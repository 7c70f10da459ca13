"""A shard of the cache over real sockets: what is put is what is got, or nothing is, whatever happens between."""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from prfaas.blockstore.directory import folder_of
from prfaas.blockstore.envelope import seal, tag_of
from prfaas.cluster import Budget, ClusterView, RegionId
from prfaas.config import CacheConfig
from prfaas.engine.cost_model import write_config
from prfaas.errors import PrfaasError, TransferFailed
from prfaas.kvcache.feed import Changes, Heartbeat, SnapshotBegin, SnapshotChunk, SnapshotEnd, Update
from prfaas.kvcache.hashing import KEY_BYTES
from prfaas.kvcache.prefix import Change, ChangeKind
from prfaas.membership.budgets import BudgetWriter
from prfaas.membership.follow import ClusterFollower
from prfaas.membership.store import Store
from prfaas.node.pool_client import Hit, NoOffer, Offer
from prfaas.rpc import cache_translate
from prfaas.rpc.cache import Watch
from prfaas.rpc.cache_updates import unpack_update
from prfaas.rpc.identity import Identity, dial
from prfaas.rpc.v1 import cache_pb2
from prfaas.rpc.v1.cache_pb2_grpc import CachePoolStub
from prfaas.security import PeerRole
from services.certificates import pem_files, write_all
from services.free_ports import free_ports
from tests.integration.cache_peers import (
    LIVENESS_S,
    REGION,
    SHARD,
    CacheWorld,
    Peer,
    Prompt,
    cache_world,
    comes_back,
    found,
    metric,
    open_store_of,
    until,
    written,
)

A = Prompt(640)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "cost"
    write_config(directory, time_scale=0.0, byte_scale=0.002)
    return directory


@pytest.fixture
async def world(model_dir: Path) -> AsyncIterator[CacheWorld]:
    async with cache_world(model_dir) as made:
        yield made


@pytest.fixture
def free_port() -> int:
    return free_ports(1)[0]


async def pair(world: CacheWorld) -> tuple[Peer, Peer]:
    writer, reader = await world.peer("w0"), await world.peer("w1")
    for each in (writer, reader):
        await each.sees(SHARD)
    return writer, reader


async def negated(answer: Awaitable[bool]) -> bool:
    return not await answer


# ---- put and get --------------------------------------------------------------


async def test_what_one_node_puts_another_gets(world: CacheWorld):
    """Byte for byte, KV and state, and only up to where both are when a prefill is to resume (M1, M2)."""
    await world.shard()
    writer, reader = await pair(world)
    assert not (await reader.match(A, joint=False)).kv_tokens
    assert await writer.put(A, 512, (512,))
    assert await writer.put(A, 640)
    kv, joint = await reader.match(A, joint=False), await reader.match(A, joint=True)
    assert (kv.kv_tokens, joint.kv_tokens, joint.state_tokens) == (640, 512, 512)
    assert await reader.get(A, kv)
    assert await reader.get(A, joint, state=True)
    assert await reader.client.release(kv) and await reader.client.release(joint)


async def test_what_is_there_is_not_sent_again(world: CacheWorld):
    """A prompt that goes on from a known one leaves only what is new, and so does a state on known KV."""
    await world.shard()
    writer, _ = await pair(world)
    assert await writer.put(A, 256)
    offer = await writer.offer(A, 640)
    assert isinstance(offer, Offer) and (offer.extent.first, offer.extent.stop) == (256, 640)
    await writer.send(A, offer)
    assert await writer.client.published(offer, LIVENESS_S)
    assert await writer.offer(A, 640) is NoOffer.KNOWN
    state = await writer.offer(A, 640, (640,))
    assert isinstance(state, Offer) and state.extent.states == (640,) and state.extent.first == state.extent.stop


async def test_a_long_prompt_is_one_tree_on_one_shard_and_moves_in_pieces(world: CacheWorld):
    """Each put and each get moves 8192 tokens at most; a piece counts only with all before it (R22)."""
    for number in range(3):
        await world.shard(shard=f"pool-{number}")
    writer, reader = await world.peer("w0"), await world.peer("w1")
    for each in (writer, reader):
        for number in range(3):
            await each.sees(f"pool-{number}")
    long = Prompt(3 * 8192 + 640)
    first = await writer.offer(long, long.tokens)
    assert isinstance(first, Offer) and (first.extent.first, first.extent.stop) == (0, 8192)
    second = await reader.offer(long, 16384, (16384,))
    assert isinstance(second, Offer) and (second.extent.first, second.extent.stop) == (8192, 16384)
    await reader.send(long, second)
    hole = await reader.match(long, joint=False)
    assert hole == Hit(), "its beginning is not there yet"
    await writer.send(long, first)
    assert await writer.client.published(first, LIVENESS_S)
    assert await reader.client.published(second, LIVENESS_S)
    assert await writer.put(long, 24576)
    assert await writer.put(long, 24576 + 640)
    hit = await reader.match(long, joint=False)
    assert hit.kv_tokens == long.tokens
    fetches = hit.fetches(64, hit.kv_tokens, state=False)
    assert [(each.extent.first, each.extent.stop) for each in fetches] == [
        (64, 8192),
        (8192, 16384),
        (16384, 24576),
        (24576, long.tokens),
    ]
    assert await reader.get(long, hit)
    joint = await reader.match(long, joint=True)
    assert (joint.kv_tokens, joint.state_tokens, joint.matched_tokens) == (16384, 16384, long.tokens)
    assert await reader.get(long, joint, state=True)
    for each in (hit, joint):
        assert await reader.client.release(each)


async def test_two_tenants_share_nothing(world: CacheWorld):
    """Equal tokens of two tenants have different keys, and what one puts the other neither finds nor spares."""
    await world.shard()
    writer, reader = await pair(world)
    other = Prompt(A.tokens, salt=b"another", tenant="u")
    assert await writer.put(A, 640, (640,))
    assert not (await reader.match(other, joint=False)).kv_tokens
    assert await reader.put(other, 640, (640,))
    for each in (A, other):
        hit = await writer.match(each, joint=True)
        assert hit.kv_tokens == 640 and await writer.get(each, hit, state=True)


async def test_a_look_up_is_one_question(world: CacheWorld, free_port: int):
    """One lease says how far the KV reaches and pins the last state, however long the prompt is and wherever that
    is."""
    await world.shard("--metrics-port", str(free_port))
    writer, reader = await pair(world)
    long = Prompt(2 * 8192 + 640)

    async def leases(prompt: Prompt) -> tuple[int, int, int]:
        """That a look-up has taken, and what it found."""
        before = await metric(free_port, "prfaas_pool_lookups_total")
        hit = await reader.match(prompt, joint=True)
        await reader.client.release(hit)
        asked = await metric(free_port, "prfaas_pool_lookups_total") - before
        return int(asked), hit.state_tokens, hit.matched_tokens

    assert await writer.put(long, 8192, (8192,))
    assert await leases(Prompt(640)) == (1, 0, 640)
    assert await leases(long) == (1, 8192, 8192)
    assert await writer.put(long, 16384)
    assert await leases(long) == (1, 8192, 16384)
    assert await writer.put(long, 16384 + 512, (16384 + 512,))
    assert await writer.put(long, 16384 + 640)
    assert await leases(long) == (1, 16384 + 512, 16384 + 640)
    assert not reader.client._held


async def test_what_is_offered_and_not_sent_can_be_put_by_others_at_once(world: CacheWorld, free_port: int):
    """Long before its time is over; and what has come stays, whatever is said of it afterwards."""
    await world.shard("--metrics-port", str(free_port))
    writer, reader = await pair(world)
    left = await writer.offer(A, 640)
    assert isinstance(left, Offer)
    assert await reader.offer(A, 640) is NoOffer.KNOWN
    for _ in range(2):
        writer.client.abandon(left)

    async def open_to_others() -> bool:
        return await reader.put(A, 640)

    await until(open_to_others)
    assert await metric(free_port, 'prfaas_pool_puts_total{outcome="abandoned"}') == 1
    assert not await writer.client.published(left, LIVENESS_S)
    with pytest.raises(TransferFailed):
        await writer.send(A, left)
    other = Prompt(640, number=1)
    sent = await writer.offer(other, 640)
    assert isinstance(sent, Offer)
    await writer.send(other, sent)
    assert await writer.client.published(sent, LIVENESS_S)
    await writer.client._abandon(writer.client.shards()[SHARD], sent.put)
    assert await found(reader, other, joint=False) == 640
    assert not writer.client.failures


async def test_a_refusal_is_told_from_what_is_known(world: CacheWorld, free_port: int):
    """A shard without room for it, one that has it, and none."""
    await world.shard("--metrics-port", str(free_port), "--memory-bytes", str(1 << 18))
    writer, _ = await pair(world)
    assert await writer.put(A, 640)
    assert await writer.offer(A, 640) is NoOffer.KNOWN
    big = Prompt(8192, number=1)
    assert await writer.offer(big, 8192) is NoOffer.REFUSED
    assert await metric(free_port, 'prfaas_pool_puts_total{outcome="quota"}') == 1


async def test_objects_are_counted_wherever_they_are(world: CacheWorld, tmp_path: Path, free_port: int):
    """By kind, in memory alone or with a tier below."""
    for options in (["--metrics-port", str(free_port)], disk(tmp_path, free_port)):
        shard = await world.shard(*options)
        writer = await world.peer("w0")
        await comes_back(shard, writer)
        assert await writer.put(A, 640, (640,))
        for series in ("objects", "resident_objects"):
            counted = [await metric(free_port, f'prfaas_pool_{series}{{kind="{kind}"}}') for kind in ("kv", "state")]
            assert counted == [10, 1]
        shard.process.terminate()
        assert await shard.exit_code() == 0


# ---- leases -------------------------------------------------------------------


async def test_a_read_under_a_lease_that_has_ended_is_a_failed_read(world: CacheWorld):
    """R17: a holder that did not renew gets nothing, and is told so."""
    await world.shard()
    writer = await world.peer("w0")
    hasty = await world.peer("w1", settings=CacheConfig(lookup_timeout_s=5.0, lease_ttl_s=0.3))
    for each in (writer, hasty):
        await each.sees(SHARD)
    assert await writer.put(A, 640)
    held = await hasty.match(A, joint=False)
    await asyncio.sleep(1.0)
    assert await hasty.get(A, held), "who renews holds"
    hasty.client._held.clear()  # as if the node stood still: it renews no more
    await until(lambda: negated(hasty.get(A, held)))
    assert hasty.client.failures["expired"] and not await hasty.client.release(held)


async def test_room_for_a_put_that_never_comes_is_free_again(world: CacheWorld):
    """R16: it ends by its time, and whoever sends after that is refused; then the same can be put again."""
    await world.shard("--put-ttl-s", "0.5")
    writer, reader = await pair(world)
    late = await writer.offer(A, 640)
    assert isinstance(late, Offer)
    assert not await writer.client.published(late, LIVENESS_S)
    with pytest.raises(TransferFailed):
        await writer.send(A, late)
    assert await writer.put(A, 640)
    hit = await reader.match(A, joint=False)
    assert hit.kv_tokens == 640 and await reader.get(A, hit)


# ---- the tier below -----------------------------------------------------------


def disk(tmp_path: Path, port: int, **more: str) -> list[str]:
    options = ["--store", "disk", "--disk-dir", str(tmp_path / "tier"), "--metrics-port", str(port)]
    return options + [part for option, value in more.items() for part in (f"--{option.replace('_', '-')}", value)]


async def test_a_shard_that_was_killed_finds_again_what_it_had(world: CacheWorld, tmp_path: Path, free_port: int):
    """Its memory is gone, its disk is not: the same bytes come from there."""
    options = disk(tmp_path, free_port)
    first = await world.shard(*options)
    writer, reader = await pair(world)
    assert await writer.put(A, 640, (640,))
    await written(free_port, 11)
    await first.kill()
    again = await world.shard(*options)
    assert again.serving["recovered"] == 11
    await comes_back(again, reader)
    assert await found(reader, A, joint=True) == 640


async def test_flipped_bytes_on_the_disk_are_never_served(world: CacheWorld, tmp_path: Path, free_port: int):
    """A damaged object is as if it had never been, and so is what stands on it; the rest is served."""
    options = disk(tmp_path, free_port)
    first = await world.shard(*options)
    writer, reader = await pair(world)
    assert await writer.put(A, 640)
    await written(free_port, 10)
    await first.kill()
    files = [path for path in (tmp_path / "tier").glob("[0-9a-f][0-9a-f]/*") if path.is_file()]
    assert len(files) == 10
    for path in files[::3]:
        whole = bytearray(path.read_bytes())
        whole[-1] ^= 0x40
        path.write_bytes(whole)
    await comes_back(await world.shard(*options), writer, reader)
    async with asyncio.timeout(LIVENESS_S):
        while (hit := await reader.match(A, joint=False)).kv_tokens:
            if await reader.get(A, hit):  # which compares
                break
            await reader.client.release(hit)
    assert hit.kv_tokens < 640
    assert await writer.put(A, 640)
    assert await found(reader, A, joint=False) == 640
    assert await metric(free_port, "prfaas_pool_store_damaged_total") >= 1


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "small", str(folder)], check=False)
    if mount.returncode:
        pytest.skip("no small disk can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


async def test_a_full_disk_costs_what_is_below_memory_only(world: CacheWorld, tmp_path: Path, free_port: int):
    """What does not fit stays in memory, and is served from there."""
    with small_disk(tmp_path / "tier"):
        await world.shard(*disk(tmp_path, free_port))
        writer, reader = await pair(world)
        prompts = [Prompt(640, number=number) for number in range(40)]  # of 22 KiB each, in files of a page at least
        for each in prompts:
            assert await writer.put(each, 640)
        assert [await found(reader, each, joint=False) for each in prompts] == [640] * 40
        assert await metric(free_port, 'prfaas_pool_store_writes_total{outcome="full"}')


async def test_more_than_memory_holds_comes_back_from_the_disk(world: CacheWorld, tmp_path: Path, free_port: int):
    """Memory drops what the disk has; a get brings it back."""
    await world.shard(*disk(tmp_path, free_port, memory_bytes=str(1 << 18)))
    writer, reader = await pair(world)
    prompts = [Prompt(1024, number=number) for number in range(16)]  # a quarter of memory each
    for number, each in enumerate(prompts):
        await until(partial(writer.put, each, 1024))
        await written(free_port, 16 * (number + 1))
    assert [await found(reader, each, joint=False) for each in prompts] == [1024] * 16
    assert await metric(free_port, 'prfaas_pool_store_reads_total{outcome="read"}') > 16


async def test_killed_in_the_middle_of_puts_and_gets_it_serves_nothing_wrong(
    world: CacheWorld, tmp_path: Path, free_port: int
):
    """Clients go on all the while, without it; after each restart what is found is what was put."""
    options = disk(tmp_path, free_port)
    shard = await world.shard(*options)
    writer, reader = await pair(world)
    prompts = [Prompt(512, number=number) for number in range(6)]
    outcomes = {"got": 0, "failed": 0}
    stop = asyncio.Event()

    async def write() -> None:
        while not stop.is_set():
            for each in prompts:
                with contextlib.suppress(PrfaasError):
                    await writer.put(each, 512, (512,))
            await asyncio.sleep(0.01)

    async def read() -> None:
        while not stop.is_set():
            for each in prompts:
                hit = await reader.match(each, joint=True)
                if hit.kv_tokens:
                    outcomes["got" if await reader.get(each, hit, state=True) else "failed"] += 1
                    await reader.client.release(hit)
            await asyncio.sleep(0.01)

    async def got_more() -> None:
        before = outcomes["got"]

        async def ten() -> bool:
            return outcomes["got"] >= before + 10

        await until(ten)

    async with asyncio.TaskGroup() as group:
        group.create_task(write())
        group.create_task(read())
        for _ in range(3):
            await got_more()
            await shard.kill()
            shard = await world.shard(*options)
        await got_more()
        stop.set()
    assert shard.process.returncode is None
    for each in prompts:
        assert await found(reader, each, joint=True) in (0, 512)


# ---- the index feed -----------------------------------------------------------


class Follower:
    """A router's end of the feed."""

    def __init__(self, address: str, known: Update | None = None) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        watch = Watch("r", known.incarnation, known.seq) if known else Watch("r")
        self._call = CachePoolStub(self._channel).Watch(cache_translate.pack_watch(watch))
        self.updates: list[Update] = []

    async def next(self) -> Update:
        async with asyncio.timeout(LIVENESS_S):
            message = await self._call.read()
        assert message is not grpc.aio.EOF, "the feed has ended"
        self.updates.append(unpack_update(message))
        return self.updates[-1]

    async def until_heard(self) -> list[Change]:
        """All changes up to the first heartbeat."""
        while not isinstance((await self.next()).kind, Heartbeat):
            pass
        return [
            change
            for update in self.updates
            if isinstance(update.kind, Changes | SnapshotChunk)
            for change in update.kind.changes
        ]

    async def for_ever(self) -> None:
        while True:
            await self.next()

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()

    aclose = close


async def test_a_router_follows_the_index_over_restarts(world: CacheWorld, tmp_path: Path, free_port: int):
    """A snapshot for who knows nothing, what came since for who was there, and a new life begins anew."""
    options = disk(tmp_path, free_port)
    shard = await world.shard(*options)
    writer, _ = await pair(world)
    keys = A.keys(world.model)
    async with aclosing(Follower(shard.serving["rpc"])) as first:
        assert not await first.until_heard()
        assert isinstance(first.updates[0].kind, SnapshotBegin) and isinstance(first.updates[1].kind, SnapshotEnd)
        assert await writer.put(A, 256, (256,))
        told = await first.until_heard()
        known = first.updates[-1]
    assert set(told) == {Change(ChangeKind.KV_ADDED, keys[:64]), Change(ChangeKind.STATE_ADDED, keys[:64])}
    assert await writer.put(A, 640)
    async with aclosing(Follower(shard.serving["rpc"], known)) as second:
        assert await second.until_heard() == [Change(ChangeKind.KV_ADDED, keys)]
        assert all(isinstance(each.kind, Changes | Heartbeat) for each in second.updates)
        assert [each.seq for each in second.updates if isinstance(each.kind, Changes)] == [known.seq + 1]
        latest = second.updates[-1]
    await written(free_port, 11)
    await shard.kill()
    again = await world.shard(*options)
    async with aclosing(Follower(again.serving["rpc"], latest)) as third:
        recovered = await third.until_heard()
        assert third.updates[0].incarnation != latest.incarnation
        assert isinstance(third.updates[0].kind, SnapshotBegin)
    assert Change(ChangeKind.KV_ADDED, keys) in recovered and Change(ChangeKind.STATE_ADDED, keys[:64]) in recovered


# ---- the process --------------------------------------------------------------


async def test_sigterm_leaves_the_cluster_and_ends_what_follows(world: CacheWorld):
    """It is gone from the cluster before it is gone, and ends with 0."""
    shard = await world.shard()
    writer, reader = await pair(world)
    assert await writer.put(A, 640)
    async with aclosing(Follower(shard.serving["rpc"])) as follower:
        await follower.until_heard()
        shard.process.terminate()
        await reader.gone(SHARD)
        with pytest.raises((AssertionError, grpc.aio.AioRpcError)):
            await follower.for_ever()
    assert await shard.exit_code() == 0, shard.said
    assert not (await reader.match(A, joint=False)).kv_tokens


async def test_its_pumps_death_ends_the_shard(world: CacheWorld):
    """What the memory holds may not be trusted to anybody else; a new life begins with a new memory."""
    shard = await world.shard()
    [pump] = [one for one in psutil.Process(shard.process.pid).children() if "prfaas.transfer.pump" in one.cmdline()]
    os.kill(pump.pid, 9)
    assert await shard.exit_code() == 1
    assert f"pump of {SHARD} is unavailable" in shard.said or "pump is unavailable" in shard.said


async def test_without_any_shard_there_is_no_cache_and_no_failure(world: CacheWorld):
    """Nothing to ask is not an error."""
    peer = await world.peer("w0", RegionId("elsewhere"))
    assert not (await peer.match(A, joint=True)).kv_tokens
    assert await peer.offer(A, 640) is NoOffer.FAILED
    assert not peer.client.failures


async def test_a_shard_that_stands_still_is_left_alone(world: CacheWorld):
    """One look-up pays for it; those that follow do not wait."""
    shard = await world.shard()
    reader = await world.peer("w0", settings=CacheConfig(lookup_timeout_s=0.5))
    await reader.sees(SHARD)
    os.kill(shard.process.pid, 19)
    try:
        assert not (await reader.match(A, joint=False)).kv_tokens
        assert reader.client.failures["deadline"] == 1
        assert not (await reader.match(A, joint=False)).kv_tokens
        assert sum(reader.client.failures.values()) == 1, "it was asked again"
    finally:
        os.kill(shard.process.pid, 18)


# ---- between regions -----------------------------------------------------------


async def hold_back(store: Store, far: Peer, prompt: Prompt, hit: Hit) -> None:
    """Until the shard may send so little that the prompt takes some four seconds."""
    slow = far.model.layout.bytes_per_token * prompt.tokens / 4.0
    await BudgetWriter(store, "default", "r").publish(Budget(REGION, far.place.region, 1e6, {SHARD: slow}))

    async def slowed_down() -> bool:
        begun = asyncio.get_running_loop().time()
        assert await far.get(prompt, hit)
        return asyncio.get_running_loop().time() - begun > 2.0

    await until(slowed_down)


async def test_a_lease_that_ends_during_the_read_fails_it(world: CacheWorld):
    """R17: all of it has come, and looks good, and yet nobody vouched for it to the end."""
    await world.shard()
    writer = await world.peer("w0")
    far = await world.peer("far", RegionId("a"), CacheConfig(lookup_timeout_s=5.0, lease_ttl_s=1.2))
    await writer.sees(SHARD)
    await far.sees(SHARD, region=REGION)
    long = Prompt(8192)
    assert await writer.put(long, 8192)
    hit = await far.match(long, joint=False, region=REGION)
    store = open_store_of(world.store)
    try:
        await hold_back(store, far, long, hit)
        far.client._held.clear()  # as if the node stood still: it renews no more
        begun = asyncio.get_running_loop().time()
        assert not await far.get(long, hit)
        assert asyncio.get_running_loop().time() - begun > 1.5, "it was over before it began"
        assert far.client.failures["expired"] == 1
    finally:
        await store.close()


# ---- who may call, and what is told of it --------------------------------------


async def test_workers_read_and_write_and_routers_follow(world: CacheWorld, tmp_path: Path):
    """With certificates each role may do its own, and the KV between them is encrypted."""
    write_all(tmp_path)

    def identity(role: PeerRole) -> Identity:
        ca, cert, key = pem_files(tmp_path, role)
        return Identity(role, ca=ca, cert=cert, key=key)

    ca, cert, key = map(str, pem_files(tmp_path, PeerRole.CACHE_POOL))
    files = ["--security-ca", ca, "--security-cert", cert, "--security-key", key]
    shard = await world.shard("--security-mode", "mtls", *files)
    writer = await world.peer("w0", identity=identity(PeerRole.PREFILL_WORKER))
    reader = await world.peer("w1", identity=identity(PeerRole.DECODE_WORKER))
    for each in (writer, reader):
        await each.sees(SHARD)
    assert await writer.put(A, 640)
    assert await found(reader, A, joint=False) == 640
    heard = dict[PeerRole, grpc.StatusCode | None]()
    for role in (PeerRole.ROUTER, PeerRole.DECODE_WORKER, PeerRole.STORE):
        async with dial(identity(role), PeerRole.CACHE_POOL, shard.serving["rpc"]) as channel:
            stub = CachePoolStub(channel)
            watching = stub.Watch(cache_pb2.WatchRequest(router="r"))
            assert (await said(watching.read())) == (None if role is PeerRole.ROUTER else DENIED)
            watching.cancel()
            lease = stub.Lease(cache_pb2.LeaseRequest(namespace="other", keys=bytes(16)))
            heard[role] = await said(lease)
    assert heard == {
        PeerRole.ROUTER: DENIED,
        PeerRole.DECODE_WORKER: grpc.StatusCode.FAILED_PRECONDITION,
        PeerRole.STORE: DENIED,
    }


DENIED = grpc.StatusCode.PERMISSION_DENIED


async def said(answer: Awaitable[Any]) -> grpc.StatusCode | None:
    """How a call was refused, if it was."""
    try:
        async with asyncio.timeout(LIVENESS_S):
            await answer
    except grpc.aio.AioRpcError as error:
        return error.code()
    return None


async def test_other_content_under_the_same_key_raises_the_alarm(world: CacheWorld, free_port: int):
    """R14: what is there stays, whoever says that it should be something else."""
    await world.shard("--metrics-port", str(free_port))
    writer, reader = await pair(world)
    first = await writer.offer(A, 640, unit_checksums=tuple(range(10)))
    assert isinstance(first, Offer)
    await writer.send(A, first)
    assert await writer.client.published(first, LIVENESS_S)
    assert await reader.offer(A, 640, unit_checksums=tuple(range(10))) is NoOffer.KNOWN
    assert await metric(free_port, "prfaas_pool_integrity_alarms_total") == 0
    assert await reader.offer(A, 640, unit_checksums=(0, 1, 99, *range(3, 10))) is NoOffer.KNOWN
    assert await metric(free_port, "prfaas_pool_integrity_alarms_total") == 1
    assert await found(reader, A, joint=False) == 640


async def test_other_content_on_the_disk_under_the_same_key_raises_the_alarm(
    world: CacheWorld, tmp_path: Path, free_port: int
):
    """R14: the file stays as it is, which is no failure of the disk; what came is served from memory."""
    await world.shard(*disk(tmp_path, free_port))
    writer, reader = await pair(world)
    unit = A.keys(world.model)[:KEY_BYTES]
    key, data = b"k" + unit, b"other"
    file = tmp_path / "tier" / folder_of(key) / key.hex()
    whole = seal(tag_of(world.model.namespace), key, unit, memoryview(data)) + data
    file.write_bytes(whole)
    assert await writer.put(A, 640)

    async def refused() -> bool:
        return await metric(free_port, 'prfaas_pool_store_writes_total{outcome="conflict"}') == 1

    await until(refused)
    assert await metric(free_port, "prfaas_pool_integrity_alarms_total") == 1
    assert not await metric(free_port, 'prfaas_pool_store_writes_total{outcome="failed"}')
    assert file.read_bytes() == whole
    assert await found(reader, A, joint=False) == 640


async def test_what_goes_to_another_region_is_reported_and_kept_to_its_budget(world: CacheWorld):
    """The leader sees a pull as it sees a prefill worker's KV, and what it allows holds for the shard as well."""
    await world.shard()
    writer, far = await world.peer("w0"), await world.peer("far", RegionId("a"))
    await writer.sees(SHARD)
    long = Prompt(8192)
    assert await writer.put(long, 8192)
    store = open_store_of(world.store)
    follower = ClusterFollower(store, "default", RegionId("a"))
    following = asyncio.ensure_future(follower.run())
    try:
        await far.sees(SHARD, region=REGION)
        hit = await far.match(long, joint=False, region=REGION)
        assert hit.kv_tokens == 8192 and hit.region == REGION
        await hold_back(store, far, long, hit)

        def sending(view: ClusterView) -> bool:
            return any(each.region == "a" and each.sent_bytes_per_s > 0 for each in view.pool_egress.get(SHARD, ()))

        await follower.wait_for(sending, LIVENESS_S)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await store.close()
