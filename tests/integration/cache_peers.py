"""A shard of the cache as a process, and what puts into it and gets from it: pumps of their own with known contents."""

import asyncio
import hashlib
import json
import mmap
import secrets
import signal
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from prfaas.cluster import Incarnation, NodeId, RegionId
from prfaas.config import CacheConfig, StoreConfig
from prfaas.engine.describe import Description, describe
from prfaas.errors import TransferFailed
from prfaas.kvcache.hashing import unit_keys
from prfaas.kvcache.layout import Extent, Part, TensorKind, Window
from prfaas.kvcache.placement import unit_ends
from prfaas.membership.memory import MemoryStore
from prfaas.membership.server import EmbeddedStoreServer
from prfaas.node.children import pump_child
from prfaas.node.pool_client import Fetch, Hit, NoOffer, Offer, PoolClient
from prfaas.node.pump_client import PumpClient
from prfaas.node.tenure import Place
from prfaas.process import end
from prfaas.request import AttemptId, Permit
from prfaas.rpc.commands import Destination
from prfaas.rpc.identity import Identity
from prfaas.stores import open_store
from prfaas.transfer.pump.messages import Send, Start
from services.http_client import fetch

LIVENESS_S = 40.0
GRACE_S = 15.0
POOL_BYTES = 64 << 20
REGION = RegionId("b")
SHARD = NodeId("pool-0")
SETTINGS = CacheConfig(lookup_timeout_s=5.0, lease_ttl_s=5.0)


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    """Look again and again, at another process, until something is so."""
    async with asyncio.timeout(LIVENESS_S):
        while not await true():  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.05)


def name() -> AttemptId:
    return AttemptId(secrets.token_hex(16))


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens that begin as those of other prompts of the same number do. `salt` is the tenant's."""

    tokens: int
    number: int = 0
    salt: bytes = b"salt"
    tenant: str = "t"

    def keys(self, model: Description) -> bytes:
        ids = np.arange(self.tokens, dtype="<u4") * 31 + self.number
        return unit_keys((ids % 500).astype("<u4").tobytes(), model.namespace, self.salt)


def content(prompt: Prompt, model: Description, part: Part) -> bytes:
    """What an engine would have written there: rows depend on their place alone, so that however they were divided for
    crossing does not show."""
    spec = model.layout.layers[part.layer][part.tensor]
    place = f"{prompt.number} {prompt.salt.hex()} {part.layer} {part.tensor}".encode()
    if spec.kind is TensorKind.STATE:
        seed = int.from_bytes(hashlib.sha256(place + struct.pack("<I", part.stop)).digest()[:8], "little")
        return np.random.default_rng(seed).bytes(part.nbytes)
    seed = int.from_bytes(hashlib.sha256(place).digest()[:8], "little")
    row = np.frombuffer(np.random.default_rng(seed).bytes(spec.nbytes), "u1")
    return (row[None, :] + np.arange(part.start, part.stop, dtype="u4")[:, None] * 7).astype("u1").tobytes()


@dataclass(slots=True)
class ShardProcess:
    """`prfaas cache-pool`, with what it says on its standard error."""

    process: asyncio.subprocess.Process
    said: str = ""
    serving: dict[str, Any] = field(default_factory=dict)

    async def until_serving(self) -> dict[str, Any]:
        """The log line with which it begins to serve."""
        assert self.process.stderr is not None
        async with asyncio.timeout(LIVENESS_S):
            while line := (await self.process.stderr.readline()).decode():
                self.said += line
                if '"cache pool is serving"' in line:
                    self.serving = json.loads(line)
                    return self.serving
        raise AssertionError(f"it never served: {self.said}")

    async def exit_code(self) -> int:
        assert self.process.stderr is not None
        async with asyncio.timeout(LIVENESS_S):
            self.said += (await self.process.stderr.read()).decode()
            return await self.process.wait()

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


class Peer:
    """A node beside the cache: a pump with a pool of its own, and the worker's client of the cache."""

    def __init__(
        self, model: Description, place: Place, pump: PumpClient, memory: memoryview, client: PoolClient
    ) -> None:
        self.model, self.place, self.pump, self.memory, self.client = model, place, pump, memory, client

    async def sees(self, shard: str, incarnation: int | None = None, region: RegionId | None = None) -> None:
        """Until this shard (in this life) is in the cluster, as the client sees it."""

        async def there() -> bool:
            pool = self.client.shards(region).get(NodeId(shard))
            return pool is not None and incarnation in (None, pool.incarnation)

        await until(there)

    async def gone(self, shard: str) -> None:

        async def away() -> bool:
            return NodeId(shard) not in self.client.shards()

        await until(away)

    async def offer(
        self, prompt: Prompt, stop: int, states: tuple[int, ...] = (), **checksums: tuple[int, ...]
    ) -> Offer | NoOffer:
        keys = prompt.keys(self.model)
        return await self.client.offer(name(), keys, stop, states, tenant=prompt.tenant, ttl_s=30.0, **checksums)

    async def put(self, prompt: Prompt, stop: int, states: tuple[int, ...] = ()) -> bool:
        """Whether all of it is in the cache now."""
        offer = await self.offer(prompt, stop, states)
        if isinstance(offer, NoOffer):
            return False
        await self.send(prompt, offer)
        return await self.client.published(offer, LIVENESS_S)

    async def send(self, prompt: Prompt, offer: Offer) -> None:
        """Raises TransferFailed."""
        extent, ends = offer.extent, unit_ends(offer.extent.first, offer.extent.stop)
        span = await self.pump.reserve(offer.put, extent, LIVENESS_S, receive=False)
        window = Window(extent.first, extent.stop, span.span, bool(extent.states))
        parts = self.model.layout.extent_parts(extent, ends, (window,))
        for part in parts:
            self.memory[part.offset : part.offset + part.nbytes] = content(prompt, self.model, part)
        try:
            self.pump.send(
                Send(
                    attempt=offer.put,
                    address=offer.kv_address,
                    peer_incarnation=offer.incarnation,
                    generation=offer.generation,
                    chunk_ends=ends,
                    region=offer.region,
                    ticket=offer.permit.ticket,
                    key_out=offer.permit.key_out,
                    key_back=offer.permit.key_back,
                )
            )
            self.pump.parts_ready(offer.put, range(len(parts)))
            await self.pump.moved(offer.put)
        finally:
            await self.pump.release(offer.put)

    async def match(self, prompt: Prompt, *, joint: bool, region: RegionId | None = None) -> Hit:
        keys = prompt.keys(self.model)
        return await self.client.match(
            keys, prompt.tokens, joint=joint, tenant=prompt.tenant, holder=name(), region=region
        )

    async def get(self, prompt: Prompt, hit: Hit, stop: int | None = None, *, state: bool = False) -> bool:
        """Bring what was found. True when all of it has come; then it is what was put, or this fails."""
        fetches = hit.fetches(0, hit.kv_tokens if stop is None else stop, state)
        assert fetches
        return all(await asyncio.gather(*(self.bring(prompt, each) for each in fetches)))

    async def bring(self, prompt: Prompt, fetch: Fetch) -> bool:
        attempt, extent = name(), fetch.extent
        span = await self.pump.reserve(attempt, extent, LIVENESS_S, receive=True, source=fetch.source)
        try:
            permit = Permit(ticket=span.ticket, key_out=span.key_out, key_back=span.key_back)
            destination = Destination(
                node=self.place.node,
                incarnation=self.place.incarnation,
                kv_address=self.place.kv_addresses[""],
                generation=span.generation,
                region=self.place.region,
                permit=permit,
            )
            if not await self.client.fetch(fetch, attempt, destination, LIVENESS_S):
                return False
            async with asyncio.timeout(LIVENESS_S):
                await self.pump.moved(attempt)
            self.assert_content(prompt, extent, span.span)
            return True
        except TransferFailed:
            return False
        finally:
            await self.pump.release(attempt)

    def assert_content(self, prompt: Prompt, extent: Extent, span: int) -> None:
        window = Window(extent.first, extent.stop, span, bool(extent.states))
        ends = (extent.stop,) if extent.stop > extent.first else ()
        for part in self.model.layout.extent_parts(extent, ends, (window,)):
            found = self.memory[part.offset : part.offset + part.nbytes]
            assert found == content(prompt, self.model, part), f"other bytes in {part}"


class CacheWorld:
    """A store, shards and peers, all stopped at the end."""

    def __init__(self, model_dir: Path, stack: AsyncExitStack, store: EmbeddedStoreServer) -> None:
        self.model_dir, self.model, self._stack, self.store = model_dir, describe(model_dir), stack, store

    async def shard(self, *options: str, shard: str = SHARD, region: str = REGION) -> ShardProcess:
        """A shard that serves."""
        started = await self.start_shard(*options, shard=shard, region=region)
        await started.until_serving()
        return started

    async def start_shard(self, *options: str, shard: str = SHARD, region: str = REGION) -> ShardProcess:
        command = [sys.executable, "-m", "services.cli", "cache-pool", "--id", shard, "--region", region]
        place = ["--model-dir", str(self.model_dir), "--store-endpoints", self.store.endpoint, "--log-format", "json"]
        process = await asyncio.create_subprocess_exec(
            *command, *place, "--memory-bytes", str(POOL_BYTES), *options, stderr=asyncio.subprocess.PIPE
        )
        self._stack.push_async_callback(end, process, GRACE_S)
        return ShardProcess(process)

    async def peer(
        self,
        node: str,
        region: RegionId = REGION,
        settings: CacheConfig = SETTINGS,
        identity: Identity | None = None,
    ) -> Peer:
        child, fd = await self._stack.enter_async_context(pump_child("kv.pool_bytes", POOL_BYTES))
        pump, incarnation = PumpClient(node, child.channel), Incarnation(secrets.randbits(63))
        await self._task(pump.run())
        port = await pump.start(
            Start(
                node=node,
                incarnation=incarnation,
                namespace=self.model.namespace,
                layout=self.model.layout,
                pool_bytes=POOL_BYTES,
                listen_host="127.0.0.1",
                listen_port=0,
                no_progress_s=5.0,
                connect_s=5.0,
                integrity="crc32c" if identity is None else "aes-gcm",
            )
        )
        place = Place(NodeId(node), region, incarnation, {"": f"127.0.0.1:{port}"})
        client = PoolClient(place, self.model.namespace, settings, identity)
        await self._task(client.run(open_store_of(self.store), "default"))
        return Peer(self.model, place, pump, memoryview(mmap.mmap(fd, POOL_BYTES)), client)

    async def _task(self, work: Any) -> None:
        task = asyncio.ensure_future(work)

        async def stop() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self._stack.push_async_callback(stop)


def open_store_of(store: EmbeddedStoreServer) -> Any:
    return open_store(StoreConfig(endpoints=(store.endpoint,)))


@asynccontextmanager
async def cache_world(model_dir: Path) -> AsyncIterator[CacheWorld]:
    async with AsyncExitStack() as stack:
        store = EmbeddedStoreServer(MemoryStore(), "127.0.0.1", 0)
        await store.start()
        stack.push_async_callback(store.stop)
        yield CacheWorld(model_dir, stack, store)


async def metric(port: int, series: str) -> float:
    """A series of the /metrics at a port; 0 when it is not there."""
    _, body = await asyncio.to_thread(fetch, f"http://127.0.0.1:{port}/metrics")
    return sum(float(line.split()[1]) for line in body.splitlines() if line.startswith(series))


async def written(port: int, objects: int) -> None:
    """Until the tier below has so many."""

    async def all_there() -> bool:
        return await metric(port, 'prfaas_pool_store_writes_total{outcome="written"}') >= objects

    await until(all_there)


async def comes_back(started: ShardProcess, *peers: Peer) -> None:
    """Until the shard's new life is in the cluster."""
    for peer in peers:
        await peer.sees(SHARD, int(started.serving["incarnation"], 16))


async def found(peer: Peer, prompt: Prompt, *, joint: bool) -> int:
    """How much of it is there, having been brought and compared."""
    hit = await peer.match(prompt, joint=joint)
    if not hit.kv_tokens or not await peer.get(prompt, hit, state=joint):
        return 0
    await peer.client.release(hit)
    return hit.kv_tokens
