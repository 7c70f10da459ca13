"""Routers that follow the cache pools' indexes over gRPC: real servers with the shard's own feed, real connections."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from prfaas.cluster import ClusterView, Incarnation, Namespace, Node, NodeId, NodeKind, Pool, RegionId, Role
from prfaas.kvcache.feed import Copy
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS, unit_keys
from prfaas.kvcache.placement import shard_of
from prfaas.kvcache.prefix import Change, ChangeKind
from prfaas.live.pools import CachePools
from prfaas.node.pool_feed import Feed
from prfaas.request import NO_MATCHES, Match, Request, RequestId, Sampling
from prfaas.rpc.cache_translate import unpack_watch
from prfaas.rpc.cache_updates import pack_update
from prfaas.rpc.identity import Identity, dial
from prfaas.rpc.v1 import cache_pb2 as pb
from prfaas.rpc.v1 import cache_pb2_grpc
from prfaas.security import PeerRole
from services.certificates import pem_files, write_all

NS, SALT = Namespace("ns"), b"salt"
FAR, NEAR = RegionId("far"), RegionId("near")
PATIENCE_S = 10.0
STALE_S = 2.0


def a_prompt(tokens: int, first: int = 1) -> Request:
    packed = b"".join((first + at).to_bytes(4, "little") for at in range(tokens))
    return Request(id=RequestId("r"), model="m", prompt=packed, sampling=Sampling(max_tokens=1), salt=SALT)


def a_node(name: str, region: RegionId) -> Node:
    pd = region == NEAR
    return Node(
        id=NodeId(name),
        region=region,
        kind=NodeKind.PD if pd else NodeKind.PREFILL_WORKER,
        role=Role.DECODE if pd else Role.PREFILL,
        incarnation=Incarnation(1),
        namespace=NS,
        model="m",
        rpc_address="",
        max_context_tokens=1 << 20,
    )


NODES = {node.id: node for node in (a_node("p0", FAR), a_node("d0", NEAR))}


@dataclass
class Shard(cache_pb2_grpc.CachePoolServicer):
    """A shard as far as its index goes: what it holds, and the feed that a real one has."""

    name: str
    region: RegionId = FAR
    incarnation: int = 1
    log: list[Change] = field(default_factory=list)
    port: int = 0
    #: Called with each message before it is sent; None sends nothing of it.
    tamper: Callable[[pb.Update], pb.Update | None] = field(default=lambda message: message)
    watches: list[pb.WatchRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.feed = Feed(Incarnation(self.incarnation), NS, lambda _bytes: iter([(each,) for each in self.log]))

    def hold(self, *changes: Change) -> None:
        self.log.extend(changes)
        self.feed.publish(changes)

    @property
    def pool(self) -> Pool:
        return Pool(
            id=NodeId(self.name),
            region=self.region,
            incarnation=Incarnation(self.incarnation),
            namespace=NS,
            rpc_address=f"127.0.0.1:{self.port}",
        )

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.Update]:
        self.watches.append(request)
        async for update in self.feed.watch(unpack_watch(request)):
            message = self.tamper(pack_update(update))
            if message is not None:
                yield message


def identity(folder: Path, role: PeerRole) -> Identity:
    ca, cert, key = pem_files(folder, role)
    return Identity(role, ca=ca, cert=cert, key=key)


@asynccontextmanager
async def serving(shard: Shard, own: Identity | None = None) -> AsyncIterator[Shard]:
    server = grpc.aio.server()
    cache_pb2_grpc.add_CachePoolServicer_to_server(shard, server)
    address = f"127.0.0.1:{shard.port}"
    if own is None:
        shard.port = server.add_insecure_port(address)
    else:
        shard.port = server.add_secure_port(address, own.server_credentials(lambda: None))
    await server.start()
    try:
        yield shard
    finally:
        shard.feed.close()
        await server.stop(None)


class Router:
    def __init__(self, *shards: Shard, own: Identity | None = None) -> None:
        self.show(*shards)
        self.caches = CachePools(
            "r0",
            lambda: self.view,
            partial(dial, own, PeerRole.CACHE_POOL),
            bound_bytes=1 << 24,
            stale_s=STALE_S,
        )

    def show(self, *shards: Shard) -> None:
        pools = {shard.pool.id: shard.pool for shard in shards}
        self.view = ClusterView(nodes=NODES, remote_prefill=(NodeId("p0"),), decode=(NodeId("d0"),), pools=pools)

    def states(self) -> list[Copy]:
        return [self.caches.state(each) for each in self.caches.followed()]

    async def match(self, request: Request, node: str = "p0") -> Match:
        return (await self.caches.matches(request)).get(NodeId(node)) or Match()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def finds(self, request: Request, match: Match) -> None:
        found = Match()
        try:
            async with asyncio.timeout(PATIENCE_S):
                while (found := await self.match(request)) != match:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        except TimeoutError:
            pytest.fail(f"finds {found}, not {match}; {self.caches.stale}")


@asynccontextmanager
async def following(*shards: Shard, own: Identity | None = None) -> AsyncIterator[Router]:
    router = Router(*shards, own=own)
    task = asyncio.create_task(router.caches.run())
    try:
        yield router
    finally:
        task.cancel()
        await asyncio.wait([task])


def cached(request: Request, tokens: int, state: int = 0) -> list[Change]:
    """What a shard tells that holds so much of a prompt."""
    keys = unit_keys(request.prompt, NS, SALT)
    told = [Change(ChangeKind.KV_ADDED, keys[: tokens // HASH_UNIT_TOKENS * 16])]
    return told + ([Change(ChangeKind.STATE_ADDED, keys[: state // HASH_UNIT_TOKENS * 16])] if state else [])


async def test_what_a_shard_holds_is_found_and_followed():
    """First by the snapshot, then change by change; only for nodes of its region."""
    request, other = a_prompt(1000), a_prompt(1000, first=7)
    async with serving(Shard("c0")) as shard:
        shard.hold(*cached(request, 640, 512))
        async with following(shard) as router:
            await router.finds(request, Match(512, 640))
            assert await router.match(request, "d0") == Match()
            assert await router.match(replace(request, salt=b"another tenant's")) == Match()
            shard.hold(*cached(other, 960, 960))
            await router.finds(other, Match(960, 960))
            shard.hold(Change(ChangeKind.KV_REMOVED, unit_keys(request.prompt, NS, SALT)[:32]))
            await router.finds(request, Match(0, 64))
            assert list(await router.caches.matches(other)) == ["p0"]


async def test_a_prompt_is_looked_for_where_it_belongs():
    """However long it is; what another shard has of it, as from before there were two, is of no use."""
    request = a_prompt(40_960)
    keys = unit_keys(request.prompt, NS, SALT)
    async with serving(Shard("c0")) as c0, serving(Shard("c1")) as c1:
        shards = {c0.pool.id: c0, c1.pool.id: c1}
        right = shards.pop(shard_of(keys, list(shards)))
        [wrong] = shards.values()
        async with following(c0, c1) as router:
            wrong.hold(Change(ChangeKind.KV_ADDED, keys), Change(ChangeKind.STATE_ADDED, keys[: 16 * 256]))
            right.hold(Change(ChangeKind.KV_ADDED, keys[: 16 * 384]), Change(ChangeKind.STATE_ADDED, keys[: 16 * 128]))
            await router.finds(request, Match(8192, 24_576))
            right.hold(Change(ChangeKind.KV_ADDED, keys), Change(ChangeKind.STATE_ADDED, keys))
            # The last token is never taken from a cache, and so neither is the state behind it.
            await router.finds(request, Match(8192, 40_959))


async def test_field_I4_a_lost_message_costs_a_snapshot_and_no_wrong_match():
    """The copy is stale from the gap on, and right again after the snapshot that it asks for."""
    request = a_prompt(1000)
    async with serving(Shard("c0")) as shard, following(shard) as router:
        shard.hold(*cached(request, 640, 512))
        await router.finds(request, Match(512, 640))
        shard.tamper = lambda message: None if message.WhichOneof("kind") == "changes" else message
        shard.hold(Change(ChangeKind.KV_REMOVED, unit_keys(request.prompt, NS, SALT)[:16]))
        await router.until(lambda: router.caches.stale["gap"] > 0)
        assert router.caches.followed()[0].feed.known_seq() is None
        shard.log.clear()
        shard.tamper = lambda message: message
        await router.until(lambda: router.states() == [Copy.CURRENT])
        assert await router.match(request) == Match()
        assert [request.known_seq for request in shard.watches] == [0] * len(shard.watches)


async def test_field_I4_a_restarted_shard_is_learned_anew():
    """Whatever its former life held is not scored from once the connection is gone."""
    request = a_prompt(1000)
    async with following() as router:
        async with serving(Shard("c0")) as shard:
            router.show(shard)
            shard.hold(*cached(request, 640, 640))
            await router.finds(request, Match(640, 640))
        await router.finds(request, Match())
        assert router.states() == [Copy.HELD]
        async with serving(Shard("c0", incarnation=2, port=shard.port)) as again:
            await router.until(lambda: router.caches.stale["incarnation"] > 0)
            assert await router.match(request) == Match()
            router.show(again)
            await router.until(lambda: router.states() == [Copy.CURRENT])
            again.hold(*cached(request, 64))
            await router.finds(request, Match(0, 64))


async def test_a_connection_that_breaks_for_a_moment_costs_no_snapshot():
    """The router says how far it knows the shard, and is told what came since."""
    request = a_prompt(1000)
    shard = Shard("c0")
    async with following() as router:
        async with serving(shard):
            router.show(shard)
            shard.hold(*cached(request, 640, 512))
            await router.finds(request, Match(512, 640))
        await router.finds(request, Match())
        shard.feed._closed = False
        shard.hold(*cached(request, 704))
        async with serving(shard):
            await router.finds(request, Match(512, 704))
        assert shard.feed.snapshots == 1


async def test_a_silent_shard_is_not_counted_on():
    """It may be stuck, or cut off: after a while it finds nothing, and is asked anew."""
    request = a_prompt(1000)
    async with serving(Shard("c0")) as shard, following(shard) as router:
        shard.hold(*cached(request, 640))
        await router.finds(request, Match(0, 640))
        shard.tamper = lambda message: None
        begun = time.monotonic()
        await router.finds(request, Match())
        assert time.monotonic() - begun < STALE_S + 2.0
        await router.until(lambda: router.caches.stale["silent"] > 0)
        shard.tamper = lambda message: message
        await router.finds(request, Match(0, 640))


async def test_field_I8_a_large_index_comes_in_bounded_messages_and_a_larger_message_is_refused():
    """A snapshot of many blocks is chunked; what exceeds the bound ends the stream, and nothing of it is believed."""
    request = a_prompt(1000)
    sizes: list[int] = []

    def weigh(message: pb.Update) -> pb.Update:
        sizes.append(message.ByteSize())
        return message

    async with serving(Shard("c0")) as shard:
        for first in range(400):
            keys = unit_keys(a_prompt(8192, first=first).prompt, NS, SALT)
            shard.log.append(Change(ChangeKind.KV_ADDED, keys))
        shard.log.extend(cached(request, 640))
        shard.tamper = weigh
        async with following(shard) as router:
            await router.finds(a_prompt(8192, first=399), Match(0, 8191))
            assert sum(sizes) > 400 * 128 * 16
            assert max(sizes) <= 256 << 10
            huge = pb.Update(incarnation=1, seq=0)
            huge.snapshot_begin.namespace = "x" * (400 << 10)
            shard.tamper = lambda message: huge
            await router.until(lambda: router.caches.stale["malformed"] > 0)
            assert await router.match(request) == Match()


async def test_field_I9_three_routers_converge():
    """Each follows by itself, and within a moment all find the same, whatever was lost on the way to one of them."""
    prompts = [a_prompt(1000, first=first) for first in range(0, 4000, 1000)]
    async with serving(Shard("c0")) as shard, following(shard) as r0, following(shard) as r1, following(shard) as r2:
        routers = (r0, r1, r2)
        for router in routers:
            await router.until(lambda router=router: router.states() == [Copy.CURRENT])
        lost = iter(range(100))
        shard.tamper = lambda message: (
            None if message.WhichOneof("kind") == "changes" and next(lost, 1) % 4 == 0 else message
        )
        for at, request in enumerate(prompts):
            shard.hold(*cached(request, 64 * (at + 1), 64))
        shard.hold(Change(ChangeKind.KV_REMOVED, unit_keys(prompts[1].prompt, NS, SALT)[:16]))
        shard.tamper = lambda message: message
        for router in routers:
            for at, request in enumerate(prompts):
                await router.finds(request, Match() if at == 1 else Match(64, 64 * (at + 1)))


async def test_field_I1_a_shard_that_left_takes_its_blocks_along():
    """Nothing stays behind of what is not in the view any more, and no task either."""
    request = a_prompt(1000)
    async with serving(Shard("c0")) as shard, following(shard) as router:
        empty = router.caches.index.nbytes
        shard.hold(*cached(request, 960, 960))
        await router.finds(request, Match(960, 960))
        assert router.caches.index.nbytes > empty
        router.show()
        assert await router.caches.matches(request) is NO_MATCHES
        await router.until(lambda: not router.caches.followed())
        assert router.caches.index.nbytes == empty
        await router.until(lambda: not any(task.get_name() == "cache index c0" for task in asyncio.all_tasks()))


async def test_with_certificates_only_a_cache_pool_is_believed(tmp_path: Path):
    """A worker that answers at a shard's address is not asked what it holds."""
    write_all(tmp_path)
    request, own = a_prompt(1000), identity(tmp_path, PeerRole.ROUTER)
    async with (
        serving(Shard("c0"), identity(tmp_path, PeerRole.CACHE_POOL)) as shard,
        serving(Shard("c1"), identity(tmp_path, PeerRole.DECODE_WORKER)) as pretender,
        following(shard, pretender, own=own) as router,
    ):
        shard.hold(*cached(request, 640))
        pretender.hold(*cached(request, 960))
        await router.until(lambda: router.caches.stale["disconnected"] > 1)
        await router.until(lambda: Copy.CURRENT in router.states())
        assert router.states() == [Copy.CURRENT, Copy.STALE]
        assert not pretender.watches
