"""The router's part in steering the cluster: it follows the store, may lead, and runs the loops."""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec
import structlog

from prfaas.cluster import NodeId, RegionId
from prfaas.config import Config, RouterConfig, RoutingConfig
from prfaas.flows.control import ControlParams, fast_loop, slow_loop
from prfaas.flows.pacing import pacing_loop
from prfaas.live.control_ports import LiveControlPorts
from prfaas.live.demand_report import record_of
from prfaas.live.pools import CachePools
from prfaas.live.steering import Steering
from prfaas.membership.announce import Announcement
from prfaas.membership.election import Election
from prfaas.membership.follow import ClusterFollower
from prfaas.membership.plans import RouterRecord
from prfaas.membership.store import Store
from prfaas.profiles import load_profiles
from prfaas.scheduling.admission import Admission
from prfaas.scheduling.breaker import BreakerParams
from prfaas.scheduling.budget import Budgeter, BudgetParams
from prfaas.scheduling.congestion import LinkEstimator, LinkParams
from prfaas.scheduling.demand import DemandParams
from prfaas.scheduling.hedging import HedgeParams, Hedging
from prfaas.scheduling.planner import Roles
from prfaas.scheduling.rebalance import RebalanceParams, Rebalancer
from prfaas.scheduling.rule import RoutingParams
from prfaas.scheduling.threshold import ThresholdController, ThresholdParams
from services.router.live_page.nodes import Departures
from services.router.live_page.state import LiveState
from services.router.live_page.tally import Tally
from services.router.operator import Operator

Story = Callable[[], Coroutine[Any, Any, None]]
#: How long something that failed rests before it is begun again.
AGAIN_S = 5.0

log = structlog.get_logger()


class Control:
    """One per router process, which is known as `router` to the others."""

    def __init__(self, config: Config, store: Store, model: str, router: str) -> None:
        self.router, self.admin = router, ""
        self._routing, self._store, self._cluster = config.routing, store, config.cluster.name
        self.pd_region = RegionId(config.cluster.pd_region)
        self.follower = ClusterFollower(store, self._cluster, self.pd_region, reported=self._reported)
        self.election = Election(store, self._cluster, router, lambda: self.follower.view().highest_epoch)
        demand = DemandParams(lengths_half_life_s=self._routing.demand_half_life_s)
        self.steering = Steering(
            self.pd_region,
            _rule(config, model, self.pd_region),
            time.monotonic(),
            demand,
            breakers=BreakerParams(**msgspec.structs.asdict(config.breakers)),
            hedging=_hedging(config.router),
        )
        self.ports = LiveControlPorts(
            store, self._cluster, router, self.follower, self.election, self.steering, self._routing.bandwidth
        )
        self._params = ControlParams(
            model=model,
            pd_region=self.pd_region,
            threshold_tokens=self._routing.threshold_tokens,
            report_s=self._routing.report_s,
            slow_period_s=self._routing.slow_period_s if self._routing.rebalance == "on" else math.inf,
        )

    def live_routers(self) -> int:
        """Router processes that share the tenants' limits, this one included, also before it is announced."""
        return len(self.follower.direction.routers.keys() | {self.router})

    def operator(self, caches: CachePools | None) -> Operator:
        return Operator(
            self._store,
            self._cluster,
            self.router,
            self.follower,
            self.election,
            self.steering,
            self.ports,
            self._routing.threshold_tokens,
            caches,
        )

    def live(self, operator: Operator, admission: Admission, tally: Tally, caches: CachePools | None) -> LiveState:
        return LiveState(
            router=self.router,
            cluster=self._cluster,
            model=self._params.model,
            operator=operator,
            follower=self.follower,
            election=self.election,
            steering=self.steering,
            ports=self.ports,
            admission=admission,
            tally=tally,
            caches=caches,
            now=time.monotonic,
            begun_s=time.monotonic(),
            departures=Departures(),
        )

    def stories(self, caches: CachePools | None) -> Mapping[str, Coroutine[Any, Any, None]]:
        """What runs beside the serving, by name, until it is cancelled."""
        routing = self._routing
        lines = {(RegionId(region), self.pd_region): rate for region, rate in routing.lines.items()}
        links = LinkEstimator(LinkParams(line_bytes_per_s=lines))
        thresholds = ThresholdParams(mode=routing.mode, t_min=routing.t_min_tokens, t_force=routing.t_force_tokens)
        pacing = BudgetParams(line_share=routing.line_share)
        announcement = Announcement(self._store, self._cluster, self.router, self._describe)
        beside: dict[str, Story] = {
            "announcement": announcement.run,
            "election": self.election.run,
            "fast loop": lambda: fast_loop(self.ports, links, ThresholdController(thresholds), self._params),
            "pacing": lambda: pacing_loop(self.ports, Budgeter(lines, pacing), self._params.report_s),
            "slow loop": lambda: slow_loop(self.ports, links, Rebalancer(_rebalancing(routing)), self._params),
            **({"cache index": caches.run} if caches is not None else {}),
        }
        return {"cluster view": self.follower.run(), **{name: kept_up(name, story) for name, story in beside.items()}}

    def _reported(self, node: NodeId, at: float) -> None:
        self.ports.report(node, at)

    def _describe(self, seq: int) -> RouterRecord:
        return record_of(self.router, self.steering.demand.snapshot(time.monotonic()), seq, self.admin)


async def kept_up(name: str, story: Story) -> None:
    """Steering is worth much, but not the requests that are being served: what fails is logged and begun anew, and
    meanwhile everything stays as it was set last."""
    while True:
        try:
            await story()
        except Exception:
            log.exception("control_failed", what=name)
        await asyncio.sleep(AGAIN_S)


def _rebalancing(routing: RoutingConfig) -> RebalanceParams:
    return RebalanceParams(
        roles=Roles(routing.roles),
        step_limit_s=routing.itl_slo_s,
        dwell_s=routing.role_dwell_s,
        warm_up_s=routing.role_warm_up_s,
    )


def _hedging(router: RouterConfig) -> Hedging | None:
    return Hedging(HedgeParams(factor=router.hedge_factor, share=router.hedge_share)) if router.hedge else None


def _rule(config: Config, model: str, pd_region: RegionId) -> RoutingParams:
    routing = config.routing
    return RoutingParams(
        routing.threshold_tokens,
        abundant=routing.bandwidth == "abundant",
        mode=routing.mode,
        t_min=routing.t_min_tokens,
        t_force=routing.t_force_tokens,
        ttft_slo_s=routing.ttft_slo_s,
        cache_pulls=config.cache.enabled,
        profiles=load_profiles(routing.profiles, model),
        rtt_s={(RegionId(region), pd_region): rtt_s for region, rtt_s in routing.rtts_s.items()},
    )
