"""A worker from start to stop: children, self-check, registration, serving, drain.

A worker is not in the cluster before its advertised addresses lead back to it, and it leaves the cluster before it
stops serving. Whatever part of it ends unasked ends all of it.
"""

import asyncio
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import structlog

from prfaas.cluster import Incarnation, Node, NodeId, NodeKind, RegionId, Role
from prfaas.config import Config
from prfaas.engine.port import EngineInfo
from prfaas.errors import ConfigError
from prfaas.membership.records import Measured
from prfaas.membership.registration import Registration
from prfaas.node.admission import Admission, Limits
from prfaas.node.children import children
from prfaas.node.engine_client import EngineClient
from prfaas.node.link_server import Runtime, serve_worker
from prfaas.node.pages import WorkerPages
from prfaas.node.pump_client import PumpClient
from prfaas.node.self_check import check_addresses
from prfaas.node.tenure import Place
from prfaas.node.worker import Worker
from prfaas.process import StopSignals
from prfaas.stores import open_store
from prfaas.transfer.frames import WIRE
from prfaas.transfer.pump.messages import Start

STOP_GRACE_S = 1.0

log = structlog.get_logger()


async def run_worker(config: Config, kind: NodeKind, limits: Limits, runtime: Callable[[Worker], Runtime]) -> None:
    """Serve until SIGTERM or SIGINT, then drain. `runtime` may put a policy of its service before the worker.

    Raises PeerUnavailable when engine or pump dies, ConfigError when a setting cannot work.
    """
    own = config.worker
    for name in ("id", "region", "model_dir"):
        if not getattr(own, name):
            raise ConfigError(f"worker.{name}", "is required")
    stop = StopSignals()
    try:
        async with children(Path(own.model_dir), config.kv.pool_bytes) as (engine_child, pump_child):
            engine, pump = EngineClient(own.id, engine_child.channel), PumpClient(own.id, pump_child.channel)
            async with asyncio.TaskGroup() as group:
                crew = [
                    group.create_task(engine.run(), name="engine events"),
                    group.create_task(pump.run(), name="pump events"),
                    group.create_task(engine_child.watch(), name="engine process"),
                    group.create_task(pump_child.watch(), name="pump process"),
                ]
                info = await engine.info()
                place = await _start_pump(config, info, pump)
                worker = Worker(place, info, engine, pump, Admission(limits), group.create_task)
                pages = WorkerPages(worker, engine, pump)
                await _serve(config, kind, worker, runtime(worker), pages, stop, group)
                for task in crew:
                    task.cancel()
    except asyncio.CancelledError:
        if not stop.cancelled:
            raise


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
) -> None:
    own = config.worker
    async with AsyncExitStack() as stack:
        server = await serve_worker(runtime, own.rpc_host, own.rpc_port)
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        await stack.enter_async_context(await pages.serve(own.metrics_host, own.metrics_port))
        node = _node(config, kind, worker, server.port)
        await check_addresses(node, pages.pump)
        await server.set_serving(True)
        pages.role, pages.ready = node.role, True
        store = open_store(config.store)
        stack.push_async_callback(store.close)
        registration = Registration(
            store, config.cluster.name, node, lambda: Measured(worker.load()), lease_ttl_s=config.store.lease_ttl_s
        )
        # A worker whose id was taken over by a newer process ends: its registration fails, and with it the group.
        registering = group.create_task(registration.run(), name="registration")
        stack.push_async_callback(_end, registering)
        stop.ready()
        log.info(
            "worker is serving", node=node.id, rpc=node.rpc_address, kv=dict(node.kv_addresses), role=node.role.value
        )
        await stop.wait()
        await server.set_serving(False)
        await worker.drain(own.drain_timeout_s)


def _node(config: Config, kind: NodeKind, worker: Worker, rpc_port: int) -> Node:
    own, place, info = config.worker, worker.place, worker.info
    return Node(
        id=place.node,
        region=place.region,
        kind=kind,
        role=Role.PREFILL if kind is NodeKind.PREFILL_WORKER else Role(own.role),
        incarnation=place.incarnation,
        namespace=info.namespace,
        model=info.model,
        rpc_address=own.rpc_advertise or f"{own.rpc_host}:{rpc_port}",
        kv_addresses=place.kv_addresses,
        wire=WIRE,
        max_context_tokens=info.max_context_tokens,
        eos_token_ids=info.eos_token_ids,
    )


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
