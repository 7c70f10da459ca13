"""A shard of the cache pool from start to stop: pump, tier below, self-check, registration, serving, drain.

As a worker, it is not in the cluster before its advertised addresses lead back to it, and it leaves the cluster before
it stops serving. What the tier below still has is in the index before anybody can ask.
"""

import asyncio
import mmap
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import structlog

from prfaas.cluster import Incarnation, NodeId, Pool, RegionId
from prfaas.config import Config, PoolConfig
from prfaas.engine.describe import Description
from prfaas.errors import ConfigError
from prfaas.identities import open_identity
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS
from prfaas.kvcache.shard import Shard, ShardSpec
from prfaas.membership.follow_budget import BudgetFollower
from prfaas.membership.registration import Registration
from prfaas.node.children import pump_child
from prfaas.node.model_description import describe_model
from prfaas.node.pool_dock import Terms
from prfaas.node.pool_pages import PoolPages
from prfaas.node.pool_shard import PoolShard
from prfaas.node.pool_store import lower_bytes, open_tier
from prfaas.node.pool_tier import Tier
from prfaas.node.pump_client import SILENCE_S, PumpClient
from prfaas.node.rpc_server import RpcServer
from prfaas.node.run import STOP_GRACE_S, end, listening
from prfaas.node.self_check import check_pool_addresses
from prfaas.node.telemetry import PoolTelemetry
from prfaas.process import StopSignals
from prfaas.rpc.identity import Identity
from prfaas.security import PeerRole, protection
from prfaas.stores import open_store
from prfaas.transfer.pump.messages import Start

LEAST_BLOCK_BYTES, MOST_BLOCK_BYTES = 4 << 10, 64 << 10

log = structlog.get_logger()

#: Serves a shard at host and port.
Serve = Callable[[PoolShard, str, int, Identity | None], Awaitable[RpcServer]]


async def run_pool(config: Config, serve: Serve) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Raises PeerUnavailable when the pump dies, ConfigError when a setting
    cannot work."""
    own = config.pool
    for name in ("id", "region", "model_dir"):
        if not getattr(own, name):
            raise ConfigError(f"pool.{name}", "is required")
    identity = open_identity(config.security, PeerRole.CACHE_POOL)
    stop = StopSignals()
    try:
        described = await describe_model(Path(own.model_dir))
        async with pump_child("pool.memory_bytes", own.memory_bytes) as (child, pool_fd):
            pump = PumpClient(own.id, child.channel)
            async with asyncio.TaskGroup() as group:
                events = group.create_task(pump.run(), name="pump events")
                crew = [
                    events,
                    group.create_task(child.watch(), name="pump process"),
                    group.create_task(pump.pulse.watch(SILENCE_S), name="pump pulse"),
                ]
                terms = await _start_pump(config, described, pump)
                pages = PoolPages(pump, {config.cluster.pd_region, own.region, *own.kv_advertise} - {""})
                shard = PoolShard(terms, _machine(own, described), pump, events, group.create_task, pages.got)
                memory = memoryview(mmap.mmap(pool_fd, own.memory_bytes))
                async with AsyncExitStack() as stack:
                    below = await open_tier(own, described.namespace, _largest_object_bytes(described))
                    if below is not None:
                        stack.push_async_callback(below.close)
                        shard.tier = Tier(below, described.layout, memory, shard.answered, shard.spawn, pages.read)
                    await _serve(config, shard, pump, pages, serve, stop, group, identity, stack)
                for task in crew:
                    task.cancel()
    except asyncio.CancelledError:
        if not stop.cancelled:
            raise


def _largest_object_bytes(described: Description) -> int:
    layout = described.layout
    return max(layout.window_bytes(HASH_UNIT_TOKENS, False), layout.window_bytes(0, True))


def _block_bytes(unit_bytes: int) -> int:
    """Small enough that little of a unit's last block is empty, and for large ones few enough to be quick (R3)."""
    quarter = max(1, unit_bytes // 4)
    return min(MOST_BLOCK_BYTES, max(LEAST_BLOCK_BYTES, 1 << (quarter.bit_length() - 1)))


def _machine(own: PoolConfig, described: Description) -> Shard:
    layout = described.layout
    unit_bytes = layout.window_bytes(HASH_UNIT_TOKENS, False)
    return Shard(
        ShardSpec(
            memory_bytes=own.memory_bytes,
            unit_bytes=unit_bytes,
            block_bytes=_block_bytes(unit_bytes),
            state_bytes=layout.window_bytes(0, True) if layout.state_bytes else 0,
            lower_bytes=lower_bytes(own),
            quota_bytes=int(own.tenant_share * own.memory_bytes),
        )
    )


async def _start_pump(config: Config, described: Description, pump: PumpClient) -> Terms:
    own, incarnation = config.pool, Incarnation(secrets.randbits(64))
    try:
        port = await pump.start(
            Start(
                node=own.id,
                incarnation=incarnation,
                namespace=described.namespace,
                layout=described.layout,
                pool_bytes=own.memory_bytes,
                listen_host=own.kv_host,
                listen_port=own.kv_port,
                no_progress_s=config.kv.no_progress_s,
                connect_s=config.kv.connect_s,
                integrity=protection(config.security.mode, config.security.kv).value,
                congestion=config.kv.congestion,
                min_lanes=config.kv.min_lanes,
                max_lanes=config.kv.max_lanes,
                lane_idle_s=config.kv.lane_idle_s,
            )
        )
    except ConfigError as error:
        raise ConfigError("pool.kv_port", error.message) from error
    return Terms(
        shard=NodeId(own.id),
        region=own.region,
        incarnation=incarnation,
        namespace=described.namespace,
        layout=described.layout,
        kv_addresses={"": f"{own.kv_host}:{port}"} | own.kv_advertise,
        lease_ttl_s=own.lease_ttl_s,
        put_ttl_s=own.put_ttl_s,
    )


async def _serve(
    config: Config,
    shard: PoolShard,
    pump: PumpClient,
    pages: PoolPages,
    serve: Serve,
    stop: StopSignals,
    group: asyncio.TaskGroup,
    identity: Identity | None,
    stack: AsyncExitStack,
) -> None:
    own, terms = config.pool, shard.terms
    objects = await shard.recover()
    pages.shard = shard
    stack.push_async_callback(shard.close)
    stack.push_async_callback(end, group.create_task(shard.run(), name="shard clock"))
    with listening("pool.rpc_port"):
        server = await serve(shard, own.rpc_host, own.rpc_port, identity)
    stack.push_async_callback(server.stop, STOP_GRACE_S)
    pages.secured(server, identity)
    with listening("pool.metrics_port"):
        pages_server = await pages.serve(own.metrics_host, own.metrics_port)
    await stack.enter_async_context(pages_server)
    pool = Pool(
        id=terms.shard,
        region=RegionId(own.region),
        incarnation=terms.incarnation,
        namespace=terms.namespace,
        rpc_address=own.rpc_advertise or f"{own.rpc_host}:{server.port}",
        kv_addresses=terms.kv_addresses,
        capacity_bytes=own.memory_bytes,
        resumes_anywhere=not terms.layout.state_bytes,
    )
    await check_pool_addresses(pool, pump, identity=identity)
    await server.set_serving(True)
    pages.ready = True
    store = open_store(config.store)
    stack.push_async_callback(store.close)
    # A shard whose id was taken over by a newer process ends: its registration fails, and with it the group.
    telemetry = PoolTelemetry(pump, asyncio.get_running_loop().time)
    registration = Registration(
        store, config.cluster.name, pool, telemetry.measure, lease_ttl_s=config.store.lease_ttl_s
    )
    registering = group.create_task(registration.run(), name="registration")
    stack.push_async_callback(end, registering)
    budgets = BudgetFollower(store, config.cluster.name, pool.region, pool.id, pump.allow)
    stack.push_async_callback(end, group.create_task(budgets.run(), name="budgets"))
    stop.ready()
    log.info(
        "cache pool is serving",
        shard=pool.id,
        rpc=pool.rpc_address,
        kv=dict(pool.kv_addresses),
        incarnation=f"{pool.incarnation:016x}",
        recovered=objects,
    )
    await stop.wait()
    registration.stop()
    await server.set_serving(False)
    await asyncio.wait([registering], timeout=STOP_GRACE_S)
    await shard.drain(own.drain_timeout_s)
