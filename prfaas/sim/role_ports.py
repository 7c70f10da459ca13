"""The ports of `flows.convert_role` on a simulated worker, by the rules of `prfaas.node.role`."""

from collections.abc import Awaitable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from prfaas.cluster import NodeId, Plan, Role
from prfaas.errors import StaleEpoch
from prfaas.flows.convert_role import Standing, role_of
from prfaas.membership.plans import PlanRecord, plan_key, read
from prfaas.membership.store import Batch, Put, Resync
from prfaas.sim.kernel import Kernel
from prfaas.sim.reporter import Reporter
from prfaas.sim.task import Future
from prfaas.sim.worker import SimWorker

T = TypeVar("T")


class PlanBoard:
    """The plan in force, as workers read it in the store. While it is gone the last one stands."""

    def __init__(self, store_name: str) -> None:
        self._key = plan_key(store_name)
        self.plan: Plan | None = None
        self._changed = Future[None]("plan")

    def told(self, events: Batch) -> None:
        for event in events:
            match event:
                case Resync(snapshot):
                    for entry in snapshot.entries:
                        if entry.key == self._key:
                            self._read(entry.value)
                case Put(entry) if entry.key == self._key:
                    self._read(entry.value)

    async def other_than(self, seen: Plan | None) -> Plan:
        while self.plan is None or self.plan == seen:
            await self._changed
        return self.plan

    def _read(self, value: bytes) -> None:
        record = read(PlanRecord, value)
        if record is not None:
            self.plan = record.to_plan()
            changed, self._changed = self._changed, Future("plan")
            changed.set_result(None)


class SimRolePorts:
    """`flows.convert_role.RolePorts` of one life of a node. `conversion_s` is how long an engine takes to change."""

    def __init__(
        self, kernel: Kernel, worker: SimWorker, reporter: Reporter, board: PlanBoard, conversion_s: float
    ) -> None:
        self._kernel, self._worker, self._reporter, self._board = kernel, worker, reporter, board
        self._conversion_s = conversion_s
        #: Roles taken on, and plans that came too late.
        self.changes = self.refusals = 0

    def now(self) -> float:
        return self._kernel.now()

    async def sleep(self, seconds: float) -> None:
        await self._kernel.sleep(seconds)

    async def within(self, seconds: float, stage: str, awaitable: Awaitable[T]) -> T:
        return await self._kernel.within(seconds, stage, awaitable)

    async def race(self, contenders: Mapping[str, Awaitable[Any]]) -> tuple[str, Any]:
        return await self._kernel.race(contenders)

    @property
    def node(self) -> NodeId:
        return self._worker.node.id

    async def plan_other_than(self, seen: Plan | None) -> Plan:
        return await self._board.other_than(seen)

    def stand(self, standing: Standing) -> None:
        accepts, assignment = standing.accepts, standing.assignment
        self._worker.accepts = accepts
        self._reporter.update(
            msgspec.structs.replace(
                self._reporter.record,
                role=accepts or assignment.role,
                prefill_share=assignment.share if accepts is Role.MIXED else None,
                epoch=assignment.epoch,
                phase=standing.phase.value,
                accepting=accepts is not None,
            )
        )

    async def drained(self, keeps: Role | None) -> None:
        await self._worker.drained(keeps)

    async def reconfigure(self, share: float) -> None:
        await self._kernel.sleep(self._conversion_s)
        mixed = share if 0 < share < 1 else None
        self._worker.become(replace(self._worker.node, role=role_of(share), prefill_share=mixed))
        self.changes += 1

    def refused(self, error: StaleEpoch) -> None:
        self.refusals += 1
