"""The ports of `flows.control` in a simulated router."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from prfaas.cluster import ClusterView, LinkState, Node, Plan, Pool
from prfaas.errors import PeerUnavailable, StaleEpoch
from prfaas.flows.control import Pinned
from prfaas.membership.direct import publish_plan
from prfaas.membership.store import Store
from prfaas.request import Mode
from prfaas.scheduling.demand import DemandSnapshot
from prfaas.scheduling.rebalance import Hold, Proposal
from prfaas.scheduling.rule import Pair, Profiles
from prfaas.scheduling.threshold import ThresholdDecision
from prfaas.sim.kernel import Kernel
from prfaas.sim.router import SimRouter
from prfaas.sim.store import SimStore

T = TypeVar("T")


class SimControlPorts:
    """`flows.control.ControlPorts`. `demand` is that of all routers, `leads` says whether this one runs the slow
    loop."""

    def __init__(
        self,
        kernel: Kernel,
        router: SimRouter,
        store: SimStore,
        store_name: str,
        demand: Callable[[], DemandSnapshot],
        leads: Callable[[], bool],
    ) -> None:
        self._kernel, self._router, self._store, self._store_name = kernel, router, store, store_name
        self._demand, self._leads = demand, leads
        #: Rounds of the slow loop: when, and what came of it.
        self.rounds: list[tuple[float, Proposal | Hold]] = []
        self.published: list[tuple[float, Plan]] = []

    def now(self) -> float:
        return self._kernel.now()

    async def sleep(self, seconds: float) -> None:
        await self._kernel.sleep(seconds)

    async def within(self, seconds: float, stage: str, awaitable: Awaitable[T]) -> T:
        return await self._kernel.within(seconds, stage, awaitable)

    async def race(self, contenders: Mapping[str, Awaitable[Any]]) -> tuple[str, Any]:
        return await self._kernel.race(contenders)

    def view(self) -> ClusterView:
        return self._router.fold.view(self.now())

    def reports(self) -> Iterable[tuple[Node, float]]:
        return self._router.reports()

    def pool_reports(self) -> Iterable[tuple[Pool, float]]:
        return ()

    def demand(self) -> DemandSnapshot:
        return self._demand()

    def profiles(self) -> Profiles:
        return self._router.routing.profiles

    def pinned(self) -> Pinned:
        pin = self._router.fold.direction.pin
        if pin is None:
            return Pinned()
        mode = Mode(pin.mode) if pin.mode in {known.value for known in Mode} else None
        return Pinned(pin.threshold_tokens, mode)

    def apply(self, decision: ThresholdDecision, links: Mapping[Pair, LinkState], abundant: bool) -> None:
        self._router.apply(decision, links, abundant)

    def threshold_tokens(self) -> int:
        return self._router.routing.threshold_tokens

    def leads(self) -> bool:
        return self._leads()

    def plan_lost(self) -> bool:
        return self._router.fold.direction.plan_lost

    def considered(self, outcome: Proposal | Hold) -> None:
        self.rounds.append((self.now(), outcome))

    async def publish(self, plan: Plan) -> bool:
        try:
            await publish_plan(cast(Store, self._store), self._store_name, plan, self._router.name)
        except (StaleEpoch, PeerUnavailable):
            return False
        self.published.append((self.now(), plan))
        return True
