"""What serves requests in a router process, put together: from the cluster's view to the tokens of an answer."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import grpc

from prfaas.cluster import Node
from prfaas.config import Config
from prfaas.flows.serve import ServeParams
from prfaas.live.canary_ports import LiveCanaryPorts
from prfaas.live.clock import AsyncioClock
from prfaas.live.engine_caches import EngineCaches
from prfaas.live.link import LinkParams, LinkPool, TokenLink
from prfaas.live.link_grpc import ChannelOptions, GrpcTokenLink
from prfaas.live.link_stream import LinkCounters
from prfaas.live.link_tcp import TcpTokenLink
from prfaas.live.pools import CachePools
from prfaas.live.serve_ports import LiveServePorts
from prfaas.live.watchdog import Watchdog
from prfaas.rpc.identity import Identity, dial
from prfaas.scheduling.admission import Admission
from prfaas.scheduling.canary import Canary
from prfaas.scheduling.shunning import Shunned, shunning
from prfaas.security import PeerRole, role_of
from prfaas.tokenizer.text import TextTokenizer
from services.router.admission_keys import LiveKeys
from services.router.backend import ClusterBackend, new_attempt_id
from services.router.canary import Canaries, new_canary, obstacle
from services.router.control import Control
from services.router.metrics import RouterMetrics
from services.router.same_tokenizer import SameTokenizer


@dataclass(frozen=True, slots=True)
class Serving:
    """`links` are the caller's to close."""

    links: LinkPool
    caches: CachePools | None
    watchdog: Watchdog
    canary: Canary
    canaries: Canaries
    metrics: RouterMetrics
    backend: ClusterBackend


def assemble(
    config: Config,
    model: str,
    tokenizer: TextTokenizer,
    control: Control,
    identity: Identity | None,
    admission: Admission,
    keys: LiveKeys | None,
    salt: Callable[[str], bytes],
) -> Serving:
    own, steering, counters = config.router, control.steering, LinkCounters()
    links = LinkPool(partial(connect, LinkParams(), counters, identity, own.token_link))
    view = SameTokenizer(control.follower.view, tokenizer.digest)
    caches = _caches(config, control, identity) if config.cache.enabled else None
    find = caches.matches if caches is not None else None
    ports = LiveServePorts(
        AsyncioClock(), view, links, new_attempt_id, steering, caches=config.cache.enabled, find=find
    )
    metrics = RouterMetrics(
        [model], control.follower.age_s, lambda: control.election.leads, counters, admission, caches, keys
    )
    params, watchdog, canary = serve_params(config), Watchdog(own.no_progress_s), new_canary(config.canary)
    canary_ports = LiveCanaryPorts(
        canary, control.live_routers, AsyncioClock(), view, links, new_attempt_id, steering, caches=False
    )
    canaries = Canaries(config.canary, tokenizer, canary, canary_ports, params)
    metrics.watchdog, metrics.canaries, metrics.links = watchdog, canaries, links

    def shunned() -> Shunned:
        return Shunned(links.broken(), canary.distrusted)

    backend = ClusterBackend(
        view,
        ports,
        steering,
        replace(params, choose=shunning(params.choose, shunned), fallback=shunning(params.fallback, shunned)),
        metrics,
        own.max_in_flight,
        salt,
        find,
        watchdog=watchdog,
        poisoned=lambda: obstacle(view(), steering.routing.mode, canary),
    )
    return Serving(links, caches, watchdog, canary, canaries, metrics, backend)


def serve_params(config: Config) -> ServeParams:
    own = config.router
    return ServeParams(
        reserve_timeout_s=own.reserve_timeout_s,
        prefill_timeout_s=own.prefill_timeout_s,
        prefill_timeout_s_per_token=own.prefill_timeout_s_per_token,
        first_token_timeout_s=own.first_token_timeout_s,
        token_gap_timeout_s=own.token_gap_timeout_s,
        max_attempts=own.max_attempts,
        max_migrations=own.max_migrations,
        migration_timeout_s=own.migration_timeout_s,
        on_prefill_failure=own.on_prefill_failure,
        within_objective=own.prefill_within_objective,
    )


def connect(params: LinkParams, counters: LinkCounters, identity: Identity | None, how: str, node: Node) -> TokenLink:
    """The link to a worker. Over TCP, where both sides have it; a worker whose port for that cannot be reached has the
    one for gRPC."""
    who, peer = (node.id, node.incarnation), role_of(node.kind)
    channel = partial(dial, identity, peer)
    grpc = GrpcTokenLink(node.rpc_address, *who, params=params, counters=counters, channel=channel)
    if how != "tcp" or not node.link_address:
        return grpc
    return TcpTokenLink(
        node.link_address, *who, params=params, counters=counters, identity=identity, peer=peer, otherwise=grpc
    )


def _caches(config: Config, control: Control, identity: Identity | None) -> CachePools:
    def worker(node: Node, options: ChannelOptions) -> grpc.aio.Channel:
        return dial(identity, role_of(node.kind), node.rpc_address, options)

    view, bound_bytes, stale_s = control.follower.view, config.cache.index_bytes, config.cache.stale_s
    return CachePools(
        control.router,
        view,
        partial(dial, identity, PeerRole.CACHE_POOL),
        bound_bytes=bound_bytes,
        stale_s=stale_s,
        engines=EngineCaches(control.router, view, worker, bound_bytes=bound_bytes, stale_s=stale_s),
    )
