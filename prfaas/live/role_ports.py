"""The ports of `flows.convert_role` on a real worker."""

from typing import Never

import structlog

from prfaas.cluster import NodeId, Plan, Role
from prfaas.errors import StaleEpoch
from prfaas.flows.convert_role import ConvertParams, Standing, follow_plans
from prfaas.live.clock import AsyncioClock
from prfaas.membership.follow_plan import PlanFollower
from prfaas.node.role import RoleSeat

log = structlog.get_logger()


class LiveRolePorts(AsyncioClock):
    def __init__(self, seat: RoleSeat, plans: PlanFollower) -> None:
        super().__init__()
        self._seat, self._plans = seat, plans

    @property
    def node(self) -> NodeId:
        return self._seat.worker.place.node

    async def plan_other_than(self, seen: Plan | None) -> Plan:
        return await self._plans.plan_other_than(seen)

    def stand(self, standing: Standing) -> None:
        log.info(
            "role",
            node=self.node,
            phase=standing.phase.value,
            role=standing.assignment.role.value,
            share=standing.assignment.share,
            epoch=standing.assignment.epoch,
            accepts=standing.accepts.value if standing.accepts else None,
        )
        self._seat.stand(standing)

    async def drained(self, keeps: Role | None) -> None:
        await self._seat.drained(keeps)

    async def reconfigure(self, share: float) -> None:
        self._seat.reconfigure(share)

    def refused(self, error: StaleEpoch) -> None:
        log.warning("plan_refused", node=self.node, seen=error.seen, current=error.current)
        self._seat.pages.refused_plan()


async def follow_roles(seat: RoleSeat, plans: PlanFollower, params: ConvertParams) -> Never:
    """Carry out the cluster's plans on this worker for as long as it lives."""
    await follow_plans(LiveRolePorts(seat, plans), seat.start, params)
