"""The router process: store -> view -> flow -> OpenAI endpoint, and its end in the reverse order."""

import asyncio
import secrets
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import structlog

from prfaas.cluster import Node, RegionId
from prfaas.config import Config, RouterConfig
from prfaas.errors import ConfigError
from prfaas.flows.serve import ServeParams
from prfaas.live.clock import AsyncioClock
from prfaas.live.link import GrpcTokenLink, LinkParams, LinkPool, TokenLink
from prfaas.live.link_stream import LinkCounters
from prfaas.live.serve_ports import LiveServePorts
from prfaas.membership.follow import ClusterFollower
from prfaas.process import StopSignals
from prfaas.scheduling.routing import RoutingParams
from prfaas.stores import open_store
from prfaas.tokenizer.text import load_tokenizer
from services.router.backend import ClusterBackend, new_attempt_id
from services.router.http.limits import Limits
from services.router.http.server import HttpServer
from services.router.metrics import RouterMetrics
from services.router.openai.api import OpenAiApi
from services.router.openai.settings import OpenAiSettings

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
    async with AsyncExitStack() as stack:
        store = open_store(config.store)
        stack.push_async_callback(store.close)
        follower = ClusterFollower(store, config.cluster.name, RegionId(config.cluster.pd_region))
        following = asyncio.create_task(follower.run(), name="cluster view")
        stack.push_async_callback(_end, following)

        links = LinkPool(partial(_connect, LinkParams(), LinkCounters()))
        stack.push_async_callback(links.close)
        ports = LiveServePorts(AsyncioClock(), follower.view, links, new_attempt_id)
        metrics = RouterMetrics([Path(own.model_dir).name], config.routing.threshold_tokens, follower.age_s)
        backend = ClusterBackend(follower.view, ports, _params(config), metrics, own.max_in_flight)
        api = OpenAiApi(
            backend,
            tokenizer,
            OpenAiSettings(),
            now=time.monotonic,
            wall=time.time,
            new_seed=partial(secrets.randbits, 64),
            observe=metrics.request_ended,
        )
        server = HttpServer(api.handle, Limits(max_body_bytes=own.max_body_bytes))
        port = await _listen(server, own)
        stop.ready()
        log.info("router is serving", host=own.host, port=port, threshold_tokens=config.routing.threshold_tokens)
        await stop.wait()
        backend.draining = True
        await server.drain(own.drain_timeout_s)


async def _listen(server: HttpServer, own: RouterConfig) -> int:
    try:
        return await server.start(own.host, own.port)
    except OSError as error:
        raise ConfigError("router.port", f"cannot listen on {own.host}:{own.port}: {error.strerror}") from error


def _params(config: Config) -> ServeParams:
    own, routing = config.router, config.routing
    return ServeParams(
        routing=RoutingParams(routing.threshold_tokens, abundant=routing.bandwidth == "abundant"),
        reserve_timeout_s=own.reserve_timeout_s,
        prefill_timeout_s=own.prefill_timeout_s,
        prefill_timeout_s_per_token=own.prefill_timeout_s_per_token,
        first_token_timeout_s=own.first_token_timeout_s,
        token_gap_timeout_s=own.token_gap_timeout_s,
        max_attempts=own.max_attempts,
        on_prefill_failure=own.on_prefill_failure,
    )


def _connect(params: LinkParams, counters: LinkCounters, node: Node) -> TokenLink:
    return GrpcTokenLink(node.rpc_address, node.id, node.incarnation, params=params, counters=counters)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
