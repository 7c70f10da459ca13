"""Routers that follow what engines keep by themselves: real workers' servers and feeds, real connections."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from prfaas.cluster import OWN_PREFIXES, RESUMES_ANYWHERE, ClusterView, Incarnation, Namespace, Node, NodeId
from prfaas.kvcache.prefix import Change, ChangeKind
from prfaas.live.engine_caches import EngineCaches
from prfaas.live.link_grpc import ChannelOptions
from prfaas.live.pools import CachePools
from prfaas.node.engine_prefixes import EnginePrefixes
from prfaas.node.link_server import serve_worker
from prfaas.request import NO_MATCHES, Match, Request
from prfaas.rpc.identity import Identity, dial
from prfaas.security import PeerRole, role_of
from services.certificates import write_all
from tests.integration.scripted_worker import ScriptedRuntime
from tests.integration.test_cache_index import (
    FAR,
    NEAR,
    NS,
    PATIENCE_S,
    STALE_S,
    Shard,
    a_node,
    a_prompt,
    cached,
    identity,
    serving,
)

P0, P1, D0 = map(NodeId, ("p0", "p1", "d0"))


class Worker:
    """As far as it tells what its engine has."""

    def __init__(self, name: NodeId, *capabilities: str, incarnation: int = 1) -> None:
        self.node = replace(
            a_node(name, NEAR if name == D0 else FAR),
            incarnation=Incarnation(incarnation),
            capabilities=(OWN_PREFIXES, *capabilities),
        )
        self.engine = EnginePrefixes()

    @asynccontextmanager
    async def running(self, own: Identity | None = None, port: int = 0) -> AsyncIterator["Worker"]:
        feed = self.engine.feed(self.node.incarnation, self.node.namespace)
        runtime = ScriptedRuntime(self.node.id, self.node.incarnation)
        server = await serve_worker(runtime, "127.0.0.1", port, own, prefixes=feed)
        self.node = replace(self.node, rpc_address=f"127.0.0.1:{server.port}")
        try:
            yield self
        finally:
            feed.close()
            await server.stop(0)


class Router:
    def __init__(self, own: Identity | None = None) -> None:
        self.show()

        def worker(node: Node, options: ChannelOptions) -> object:
            return dial(own, role_of(node.kind), node.rpc_address, options)

        self.engines = EngineCaches("r0", lambda: self.view, worker, bound_bytes=1 << 24, stale_s=STALE_S)
        self.caches = CachePools(
            "r0",
            lambda: self.view,
            partial(dial, own, PeerRole.CACHE_POOL),
            bound_bytes=1 << 24,
            stale_s=STALE_S,
            engines=self.engines,
        )

    def show(self, *workers: Worker, shards: tuple[Shard, ...] = ()) -> None:
        nodes = {node.id: node for node in (a_node("d9", NEAR), *(each.node for each in workers))}
        pools = {shard.pool.id: shard.pool for shard in shards}
        self.view = ClusterView(nodes=nodes, remote_prefill=(P0, P1), decode=(NodeId("d9"),), pools=pools)

    async def finds(self, request: Request, **expected: Match) -> None:
        """Of these nodes exactly that, and of no others anything."""
        found: dict[str, Match] = {}
        try:
            async with asyncio.timeout(PATIENCE_S):
                while (found := dict(await self.caches.matches(request))) != expected:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"finds {found}, not {expected}") from None


@asynccontextmanager
async def following(*workers: Worker, own: Identity | None = None) -> AsyncIterator[Router]:
    router = Router(own)
    router.show(*workers)
    task = asyncio.create_task(router.caches.run())
    try:
        yield router
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_what_an_engine_has_is_found_on_its_node_alone():
    """First by the snapshot, then change by change; where a model goes on anywhere its KV counts, and else a state."""
    request, other = a_prompt(1000), a_prompt(1000, first=7)
    async with Worker(P0).running() as p0, Worker(P1, RESUMES_ANYWHERE).running() as p1:
        p0.engine.apply(cached(request, 640, 512))
        p1.engine.apply(cached(request, 320))
        async with following(p0, p1) as router:
            await router.finds(request, p0=Match(own=512), p1=Match(own=320))
            assert list(await router.caches.matches(request)) == ["p0", "p1"]
            assert await router.caches.matches(replace(request, salt=b"another tenant's")) is NO_MATCHES
            p1.engine.apply(cached(other, 960))
            await router.finds(other, p1=Match(own=960))
            p1.engine.apply([Change(ChangeKind.KV_REMOVED, cached(request, 64)[0].keys)])
            await router.finds(request, p0=Match(own=512))


async def test_it_is_beside_what_the_regions_cache_has():
    request = a_prompt(1000)
    async with Worker(P0, RESUMES_ANYWHERE).running() as p0, serving(Shard("c0")) as shard:
        p0.engine.apply(cached(request, 640))
        shard.hold(*cached(request, 960, 128))
        async with following(p0) as router:
            router.show(p0, shards=(shard,))
            await router.finds(request, p0=Match(128, 960, 640))


async def test_who_is_gone_or_new_has_nothing():
    """A restarted worker is somebody else, and so is one with other weights."""
    request = a_prompt(1000)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(Worker(P0, RESUMES_ANYWHERE).running())
        first.engine.apply(cached(request, 640))
        router = await stack.enter_async_context(following(first))
        await router.finds(request, p0=Match(own=640))
        router.show()
        await router.finds(request)
        again = await stack.enter_async_context(Worker(P0, RESUMES_ANYWHERE, incarnation=2).running())
        router.show(again)
        again.engine.apply(cached(request, 64))
        await router.finds(request, p0=Match(own=64))
        again.node = replace(again.node, namespace=Namespace("other"))
        router.show(again)
        await router.finds(request)
    assert Namespace("other") != NS


async def test_a_worker_that_leaves_before_it_is_called_ends_nobody_elses_stream():
    """It is in the view when it is looked for, and no more when its index is to be followed."""
    here, asked = ClusterView(nodes={P0: Worker(P0).node}), list[str]()

    def view() -> ClusterView:
        asked.append("")
        return here if len(asked) == 1 else ClusterView()

    engines = EngineCaches("r0", view, lambda node, options: None, bound_bytes=1 << 24, stale_s=STALE_S)
    task = asyncio.create_task(engines.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            while engines.followed() or not engines.stale:
                assert not task.done()
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_worker_that_keeps_nothing_is_not_asked():
    """As all workers of the embedded engine."""
    quiet = Worker(P0)
    quiet.node = replace(quiet.node, capabilities=())
    async with quiet.running(), following(quiet) as router:
        await asyncio.sleep(0)
        await router.finds(a_prompt(1000))
        assert not router.engines.followed()


async def test_only_routers_may_follow_it(tmp_path: Path):
    """With certificates: who calls shows in its own."""
    write_all(tmp_path)
    request = a_prompt(1000)
    worker = Worker(P0, RESUMES_ANYWHERE)
    worker.engine.apply(cached(request, 640))
    async with worker.running(identity(tmp_path, PeerRole.PREFILL_WORKER)):
        async with following(worker, own=identity(tmp_path, PeerRole.ROUTER)) as router:
            await router.finds(request, p0=Match(own=640))
        async with following(worker, own=identity(tmp_path, PeerRole.CACHE_POOL)) as stranger:
            async with asyncio.timeout(PATIENCE_S):
                while not stranger.engines.stale:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert await stranger.caches.matches(request) is NO_MATCHES
