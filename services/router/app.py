"""The router process: store -> view -> flow -> OpenAI endpoint, the control loops beside it, and its end in the reverse
order."""

import asyncio
import secrets
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import structlog

from prfaas.cluster import Node
from prfaas.config import Config, RouterConfig
from prfaas.errors import ConfigError
from prfaas.flows.serve import ServeParams
from prfaas.identities import open_identity
from prfaas.live.clock import AsyncioClock
from prfaas.live.link import GrpcTokenLink, LinkParams, LinkPool, TokenLink
from prfaas.live.link_stream import LinkCounters
from prfaas.live.pools import CachePools
from prfaas.live.serve_ports import LiveServePorts
from prfaas.process import StopSignals
from prfaas.rpc.identity import Identity, dial
from prfaas.security import PeerRole, role_of
from prfaas.stores import open_store
from prfaas.tokenizer.text import load_tokenizer
from services.router.admin import AdminApi
from services.router.backend import ClusterBackend, new_attempt_id
from services.router.control import Control
from services.router.explain import remembering
from services.router.http.limits import Limits
from services.router.http.messages import Handle
from services.router.http.server import HttpServer
from services.router.metrics import RouterMetrics
from services.router.openai.api import OpenAiApi
from services.router.openai.settings import OpenAiSettings
from services.router.tenants import Tenants

ADMIN_DRAIN_S = 1.0
#: What a router that is about to stop leaves to others at once.
LEADING = frozenset({"election", "slow loop", "pacing"})

log = structlog.get_logger()


async def run(config: Config) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends the drain."""
    stop = StopSignals()
    try:
        await _serve(config, stop)
    except asyncio.CancelledError:
        if not stop.cancelled:
            raise


async def _serve(config: Config, stop: StopSignals) -> None:
    own = config.router
    if not own.model_dir:
        raise ConfigError("router.model_dir", "is required")
    tokenizer = load_tokenizer(Path(own.model_dir))
    model = Path(own.model_dir).name
    identity = open_identity(config.security, PeerRole.ROUTER)
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        store = open_store(config.store)
        stack.push_async_callback(store.close)
        control = Control(config, store, model, secrets.token_hex(4))

        counters = LinkCounters()
        links = LinkPool(partial(_connect, LinkParams(), counters, identity))
        stack.push_async_callback(links.close)
        view, steering = control.follower.view, control.steering
        caches = _caches(config, control, identity) if config.cache.enabled else None
        ports = LiveServePorts(AsyncioClock(), view, links, new_attempt_id, steering, caches=config.cache.enabled)
        metrics = RouterMetrics([model], control.follower.age_s, lambda: control.election.leads, counters, caches)
        backend = ClusterBackend(
            view,
            ports,
            steering,
            _params(config),
            metrics,
            own.max_in_flight,
            Tenants.of(config.cache, config.cluster.name).salt,
            caches.matches if caches is not None else None,
        )
        api = OpenAiApi(
            backend,
            tokenizer,
            OpenAiSettings(),
            now=time.monotonic,
            wall=time.time,
            new_seed=partial(secrets.randbits, 64),
            observe=remembering(steering.decisions, metrics.request_ended),
        )
        server, port = await _listen(api.handle, own, "router.port", own.host, own.port)
        if own.admin_key:
            handle = AdminApi(control.operator(caches), own.admin_key).handle
            admin, admin_port = await _listen(handle, own, "router.admin_port", own.admin_host, own.admin_port)
            stack.push_async_callback(admin.drain, ADMIN_DRAIN_S)
            control.admin = f"{own.admin_host}:{admin_port}"
        beside = {name: group.create_task(story, name=name) for name, story in control.stories(caches).items()}
        stop.ready()
        log.info("router is serving", host=own.host, port=port, router=control.router, admin=control.admin or None)
        await stop.wait()
        for name in LEADING & beside.keys():
            beside[name].cancel()
        backend.draining = True
        await server.drain(own.drain_timeout_s)
        for task in beside.values():
            task.cancel()


async def _listen(handle: Handle, own: RouterConfig, setting: str, host: str, port: int) -> tuple[HttpServer, int]:
    server = HttpServer(handle, Limits(max_body_bytes=own.max_body_bytes))
    try:
        return server, await server.start(host, port)
    except OSError as error:
        raise ConfigError(setting, f"cannot listen on {host}:{port}: {error.strerror}") from error


def _caches(config: Config, control: Control, identity: Identity | None) -> CachePools:
    return CachePools(
        control.router,
        control.follower.view,
        partial(dial, identity, PeerRole.CACHE_POOL),
        bound_bytes=config.cache.index_bytes,
        stale_s=config.cache.stale_s,
    )


def _params(config: Config) -> ServeParams:
    own = config.router
    return ServeParams(
        reserve_timeout_s=own.reserve_timeout_s,
        prefill_timeout_s=own.prefill_timeout_s,
        prefill_timeout_s_per_token=own.prefill_timeout_s_per_token,
        first_token_timeout_s=own.first_token_timeout_s,
        token_gap_timeout_s=own.token_gap_timeout_s,
        max_attempts=own.max_attempts,
        on_prefill_failure=own.on_prefill_failure,
    )


def _connect(params: LinkParams, counters: LinkCounters, identity: Identity | None, node: Node) -> TokenLink:
    channel = partial(dial, identity, role_of(node.kind))
    return GrpcTokenLink(node.rpc_address, node.id, node.incarnation, params=params, counters=counters, channel=channel)
