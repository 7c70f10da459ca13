"""The router process: store -> view -> flow -> OpenAI endpoint, the control loops beside it, and its end in the reverse
order."""

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import structlog

from prfaas.cluster import Node
from prfaas.config import Config
from prfaas.errors import ConfigError
from prfaas.flows.serve import ServeParams
from prfaas.identities import open_identity
from prfaas.live.clock import AsyncioClock
from prfaas.live.link import LinkParams, LinkPool, TokenLink
from prfaas.live.link_grpc import GrpcTokenLink
from prfaas.live.link_stream import LinkCounters
from prfaas.live.link_tcp import TcpTokenLink
from prfaas.live.pools import CachePools
from prfaas.live.serve_ports import LiveServePorts
from prfaas.observe.tracing import open_tracing
from prfaas.process import StopSignals
from prfaas.rpc.identity import Identity, dial
from prfaas.scheduling.admission import Admission, AdmissionParams
from prfaas.security import PeerRole, role_of
from prfaas.stores import open_store
from prfaas.tokenizer.text import load_tokenizer
from services.router import memory
from services.router.admin import AdminApi
from services.router.admission import Gate
from services.router.admission_keys import LiveKeys
from services.router.backend import ClusterBackend, new_attempt_id
from services.router.control import Control
from services.router.explain import remembering
from services.router.listening import Listening
from services.router.live_page.tally import Tally
from services.router.metrics import RouterMetrics
from services.router.openai.api import OpenAiApi
from services.router.openai.record import Observe
from services.router.openai.settings import OpenAiSettings
from services.router.request_log import RequestLogFile
from services.router.same_tokenizer import SameTokenizer
from services.router.tenants import Tenants

ADMIN_DRAIN_S = 1.0
#: What a router that is about to stop leaves to others at once.
LEADING = frozenset({"election", "slow loop", "pacing"})

log = structlog.get_logger()


async def run(config: Config, serving: Callable[[], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends the drain. One of several processes on the same
    port is given `serving`, which tells its supervisor."""
    memory.return_large_pieces()
    stop = StopSignals(supervised=serving is not None)
    try:
        await _serve(config, stop, serving)
    except asyncio.CancelledError:
        if not stop.cancelled:
            raise


async def _serve(config: Config, stop: StopSignals, serving: Callable[[], None] | None) -> None:
    own = config.router
    if not own.model_dir:
        raise ConfigError("router.model_dir", "is required")
    tokenizer = load_tokenizer(Path(own.model_dir))
    await tokenizer.test()
    model = Path(own.model_dir).name
    keys = LiveKeys(Path(config.admission.keys_file)) if config.admission.keys_file else None
    admission = Admission(_admission(config))
    identity = open_identity(config.security, PeerRole.ROUTER)
    listening = Listening(config, shared=serving is not None)
    salt, name = Tenants.of(config.cache, config.cluster.name).salt, secrets.token_hex(4)
    tracing = open_tracing("prfaas-router", name)
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        stack.push_async_callback(tracing.close)
        store = open_store(config.store)
        stack.push_async_callback(store.close)
        control = Control(config, store, model, name)

        counters = LinkCounters()
        links = LinkPool(partial(_connect, LinkParams(), counters, identity, own.token_link))
        stack.push_async_callback(links.close)
        view, steering = SameTokenizer(control.follower.view, tokenizer.digest), control.steering
        caches = _caches(config, control, identity) if config.cache.enabled else None
        ports = LiveServePorts(AsyncioClock(), view, links, new_attempt_id, steering, caches=config.cache.enabled)
        metrics = RouterMetrics(
            [model], control.follower.age_s, lambda: control.election.leads, counters, admission, caches, keys
        )
        metrics.listening = listening
        backend = ClusterBackend(
            view,
            ports,
            steering,
            _params(config),
            metrics,
            own.max_in_flight,
            salt,
            caches.matches if caches is not None else None,
        )
        tally = Tally(time.monotonic)
        observe: Observe = metrics.request_ended
        if own.request_log:
            metrics.request_log = request_log = RequestLogFile(Path(own.request_log), salt)
            stack.callback(request_log.close)
            observe = request_log.besides(observe)
        gate = Gate(
            admission, keys, metrics, backend.predicted_ttft_s, time.monotonic, control.live_routers, backend.places
        )
        api = OpenAiApi(
            backend,
            tokenizer,
            OpenAiSettings(),
            gate,
            now=time.monotonic,
            wall=time.time,
            new_seed=partial(secrets.randbits, 64),
            observe=remembering(steering.decisions, tally.besides(observe)),
            tracing=tracing,
        )
        pages, metrics_at = await listening.pages(backend) or (None, None)
        if pages is not None:
            stack.callback(pages.close)
        server, port = await listening.endpoint(api.handle, api.refused_by_head)
        if own.admin_key:
            operator = control.operator(caches)
            live = control.live(operator, admission, tally, caches)
            handle = AdminApi(operator, own.admin_key, live).handle
            admin, admin_port = await listening.admin(handle)
            stack.push_async_callback(admin.drain, ADMIN_DRAIN_S)
            control.admin = f"{own.admin_host}:{admin_port}"
        beside = {name: group.create_task(story, name=name) for name, story in control.stories(caches).items()}
        if keys is not None:
            beside["API keys"] = group.create_task(keys.run(), name="API keys")
        if listening.tls is not None:
            beside["certificate"] = group.create_task(listening.tls.run(), name="certificate")
        memory.settle()
        stop.ready()
        log.info(
            "router is serving",
            host=own.host,
            port=port,
            router=control.router,
            admin=control.admin or None,
            metrics=metrics_at,
        )
        if serving is not None:
            serving()
        await stop.wait()
        for name in LEADING & beside.keys():
            beside[name].cancel()
        backend.draining = True
        await server.drain(own.drain_timeout_s)
        for task in beside.values():
            task.cancel()


def _caches(config: Config, control: Control, identity: Identity | None) -> CachePools:
    return CachePools(
        control.router,
        control.follower.view,
        partial(dial, identity, PeerRole.CACHE_POOL),
        bound_bytes=config.cache.index_bytes,
        stale_s=config.cache.stale_s,
    )


def _admission(config: Config) -> AdmissionParams:
    own = config.admission
    return AdmissionParams(
        max_running=config.router.max_in_flight,
        max_running_tokens=own.max_in_flight_tokens,
        max_queued_requests=own.max_queued_requests,
        max_queued_tokens=own.max_queued_tokens,
        max_wait_s=own.max_wait_s,
        ageing_s=own.ageing_s,
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


def _connect(params: LinkParams, counters: LinkCounters, identity: Identity | None, how: str, node: Node) -> TokenLink:
    who, peer = (node.id, node.incarnation), role_of(node.kind)
    if how == "tcp" and node.link_address:
        return TcpTokenLink(node.link_address, *who, params=params, counters=counters, identity=identity, peer=peer)
    channel = partial(dial, identity, peer)
    return GrpcTokenLink(node.rpc_address, *who, params=params, counters=counters, channel=channel)
