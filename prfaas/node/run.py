"""A worker from start to stop: children, self-check, registration, serving, drain.

A worker is not in the cluster before its advertised addresses lead back to it, and it leaves the cluster before it
stops serving. Whatever part of it ends unasked ends all of it.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import structlog

from prfaas.cluster import OWN_PREFIXES, Incarnation, Node, NodeId, NodeKind, RegionId, Role
from prfaas.config import Config, WorkerConfig
from prfaas.engine.port import EngineInfo
from prfaas.errors import ConfigError
from prfaas.flows.convert_role import Assignment
from prfaas.identities import open_identity
from prfaas.membership.follow_budget import BudgetFollower
from prfaas.membership.follow_plan import PlanFollower
from prfaas.membership.registration import Registration
from prfaas.node.admission import Admission, Limits
from prfaas.node.children import children, engine_of
from prfaas.node.engine_client import EngineClient
from prfaas.node.link_server import Runtime, serve_worker
from prfaas.node.link_tcp import serve_link
from prfaas.node.pages import WorkerPages
from prfaas.node.pool_client import PoolClient
from prfaas.node.pool_feed import Feed
from prfaas.node.pump_client import SILENCE_S, PumpClient
from prfaas.node.role import RoleSeat
from prfaas.node.self_check import check_addresses
from prfaas.node.telemetry import Telemetry
from prfaas.node.tenure import Place
from prfaas.node.worker import Worker
from prfaas.observe.tracing import open_tracing
from prfaas.process import StopSignals
from prfaas.profiles import load_profile
from prfaas.rpc.identity import Identity
from prfaas.security import protection, role_of
from prfaas.stores import open_store
from prfaas.transfer.frames import WIRE
from prfaas.transfer.pump.messages import Start

STOP_GRACE_S = 1.0

#: Carries out plans on a worker; started beside the serving, and ended with it.
RoleStory = Callable[[RoleSeat, PlanFollower], Coroutine[Any, Any, None]]

log = structlog.get_logger()


async def run_worker(
    config: Config,
    kind: NodeKind,
    limits: Limits,
    runtime: Callable[[Worker], Runtime],
    role_story: RoleStory | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain. `runtime` may put a policy of its service before the worker;
    `role_story` carries out the cluster's plans on a worker that can take another role.

    Raises PeerUnavailable when engine or pump dies, ConfigError when a setting cannot work.
    """
    own = config.worker
    for name in ("id", "region", "model_dir"):
        if not getattr(own, name):
            raise ConfigError(f"worker.{name}", "is required")
    identity = open_identity(config.security, role_of(kind))
    tracing = open_tracing(f"prfaas-{role_of(kind).value}", own.id)
    stop = StopSignals()
    try:
        running = children(Path(own.model_dir), config.kv.pool_bytes, engine_of(own))
        async with running as (engine_child, pump_child):
            engine, pump = EngineClient(own.id, engine_child.channel), PumpClient(own.id, pump_child.channel)
            async with asyncio.TaskGroup() as group:
                crew = [
                    group.create_task(engine.run(), name="engine events"),
                    group.create_task(pump.run(), name="pump events"),
                    group.create_task(engine_child.watch(), name="engine process"),
                    group.create_task(pump_child.watch(), name="pump process"),
                    group.create_task(engine.pulse.watch(own.engine_silence_s), name="engine pulse"),
                    # Longer, because silence is no work either, and the first to be named.
                    group.create_task(engine.progress.watch(2 * own.engine_silence_s), name="engine progress"),
                    group.create_task(pump.pulse.watch(SILENCE_S), name="pump pulse"),
                ]
                info = await engine.info()
                place = await _start_pump(config, info, pump)
                pool = PoolClient(place, info.namespace, config.cache, identity) if config.cache.enabled else None
                worker = Worker(
                    place, info, engine, pump, Admission(limits), group.create_task, pool, config.cache, tracing
                )
                pages = WorkerPages(worker, engine, pump, _regions(config))
                await _serve(config, kind, worker, runtime(worker), pages, stop, group, role_story, identity, pool)
                for task in crew:
                    task.cancel()
    except asyncio.CancelledError:
        if not stop.cancelled:
            raise
    finally:
        await tracing.close()


async def _start_pump(config: Config, info: EngineInfo, pump: PumpClient) -> Place:
    incarnation = Incarnation(secrets.randbits(64))
    port = await pump.start(
        Start(
            node=config.worker.id,
            incarnation=incarnation,
            namespace=info.namespace,
            layout=info.layout,
            pool_bytes=config.kv.pool_bytes,
            listen_host=config.kv.host,
            listen_port=config.kv.port,
            no_progress_s=config.kv.no_progress_s,
            connect_s=config.kv.connect_s,
            integrity=protection(config.security.mode, config.security.kv).value,
            congestion=config.kv.congestion,
            min_lanes=config.kv.min_lanes,
            max_lanes=config.kv.max_lanes,
            lane_idle_s=config.kv.lane_idle_s,
        )
    )
    addresses = {"": f"{config.kv.host}:{port}"} | config.kv.advertise
    return Place(NodeId(config.worker.id), RegionId(config.worker.region), incarnation, addresses)


async def _serve(
    config: Config,
    kind: NodeKind,
    worker: Worker,
    runtime: Runtime,
    pages: WorkerPages,
    stop: StopSignals,
    group: asyncio.TaskGroup,
    role_story: RoleStory | None,
    identity: Identity | None,
    pool: PoolClient | None,
) -> None:
    own = config.worker
    async with AsyncExitStack() as stack:
        with listening("worker.rpc_port"):
            prefixes = _prefixes(worker, pages.engine)
            server = await serve_worker(runtime, own.rpc_host, own.rpc_port, identity, prefixes=prefixes)
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        if prefixes is not None:
            stack.callback(prefixes.close)
        with listening("worker.link_port"):
            links = await serve_link(runtime, own.rpc_host, own.link_port, identity)
        stack.push_async_callback(links.stop, STOP_GRACE_S)
        pages.secured(server, links, identity=identity)
        with listening("worker.metrics_port"):
            pages_server = await pages.serve(own.metrics_host, own.metrics_port)
        await stack.enter_async_context(pages_server)
        node = _node(config, kind, worker, server.port, links.port)
        await check_addresses(node, pages.pump, identity=identity)
        await server.set_serving(True)
        pages.role, pages.ready = node.role, True
        store = open_store(config.store)
        stack.push_async_callback(store.close)
        if pool is not None:
            stack.push_async_callback(end, group.create_task(pool.run(store, config.cluster.name), name="cache pool"))
        telemetry = Telemetry(worker, pages.engine, pages.pump, asyncio.get_running_loop().time)
        registration = Registration(
            store, config.cluster.name, node, telemetry.measure, lease_ttl_s=config.store.lease_ttl_s
        )
        # A worker whose id was taken over by a newer process ends: its registration fails, and with it the group.
        registering = group.create_task(registration.run(), name="registration")
        stack.push_async_callback(end, registering)
        plans = PlanFollower(store, config.cluster.name, node.id, node.incarnation, worker.hold)
        stack.push_async_callback(end, group.create_task(plans.run(), name="plan"))
        budgets = BudgetFollower(store, config.cluster.name, node.region, node.id, pages.pump.allow)
        stack.push_async_callback(end, group.create_task(budgets.run(), name="budgets"))
        if role_story is not None:
            seat = RoleSeat(
                worker,
                pages.engine,
                registration,
                pages,
                _start(config, kind),
                max_batch=_batches(config, worker.info.model),
                max_prefills=own.max_sequences,
                max_fallback_prefills=own.max_fallback_prefills,
            )
            stack.push_async_callback(end, group.create_task(role_story(seat, plans), name="role"))
        stop.ready()
        log.info(
            "worker is serving", node=node.id, rpc=node.rpc_address, kv=dict(node.kv_addresses), role=node.role.value
        )
        await stop.wait()
        await server.set_serving(False)
        await worker.drain(own.drain_timeout_s)


def _regions(config: Config) -> set[str]:
    """With which KV may be exchanged, as far as the configuration says."""
    return {config.cluster.pd_region, config.worker.region, *config.kv.advertise} - {""}


def _start(config: Config, kind: NodeKind) -> Assignment:
    """What the node is before it has read a plan."""
    role = Role.PREFILL if kind is NodeKind.PREFILL_WORKER else Role(config.worker.role)
    match role:
        case Role.PREFILL:
            return Assignment(1.0)
        case Role.DECODE:
            return Assignment(0.0)
        case Role.MIXED:
            return Assignment(config.worker.prefill_share)


def _batches(config: Config, model: str) -> Callable[[float], int]:
    """How many sequences a node decodes together that gives a share of its time to prefill: as many as the time per
    token allows in the rest, where that is known."""
    own = config.worker
    decode = load_profile(own.hardware, own.profile, model).decode if own.profile else None
    slo_s = own.itl_slo_s
    if decode is None or slo_s is None:
        return lambda _share: own.max_batch
    return lambda share: max(1, min(own.max_batch, decode.batch_within(slo_s * (1 - share))))


def _node(config: Config, kind: NodeKind, worker: Worker, rpc_port: int, link_port: int) -> Node:
    own, place, info = config.worker, worker.place, worker.info
    start = _start(config, kind)
    return Node(
        id=place.node,
        region=place.region,
        kind=kind,
        role=start.role,
        incarnation=place.incarnation,
        namespace=info.namespace,
        model=info.model,
        rpc_address=own.rpc_advertise or f"{own.rpc_host}:{rpc_port}",
        link_address=_link_address(own, link_port),
        kv_addresses=place.kv_addresses,
        wire=WIRE,
        max_context_tokens=info.max_context_tokens,
        eos_token_ids=info.eos_token_ids,
        hardware=own.hardware,
        prefill_share=start.share if start.role is Role.MIXED else None,
        capabilities=info.capabilities,
        tokenizer=info.tokenizer,
        max_sequences=own.max_sequences,
    )


def _prefixes(worker: Worker, engine: EngineClient) -> Feed | None:
    """Those that the engine keeps by itself, if it says which."""
    if OWN_PREFIXES not in worker.info.capabilities:
        return None
    return engine.prefixes.feed(worker.place.incarnation, worker.info.namespace)


def _link_address(own: WorkerConfig, port: int) -> str:
    """Where others reach the gRPC server by another address than it is bound to, the one bound here would lead them
    nowhere."""
    return own.link_advertise or ("" if own.rpc_advertise else f"{own.rpc_host}:{port}")


@contextmanager
def listening(setting: str) -> Iterator[None]:
    """An address that cannot be had is a setting that cannot work."""
    try:
        yield
    except OSError as error:
        raise ConfigError(setting, error.strerror or str(error)) from error


async def end(task: asyncio.Task[None]) -> None:
    """Where its group has cancelled it already, a second time would cut its leaving short: a dead worker's record would
    then live as long as its lease."""
    if not task.cancelling():
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
