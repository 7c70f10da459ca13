"""How a worker follows the plan: serving -> draining -> converting -> serving.

A node that loses a role takes nothing new of it and finishes what it has: its prefills, its streams. Only then does it
change, so that no request is lost. While it drains, a newer plan that leaves it the role calls the change off, and so
does a drain that takes too long. What must hold: an older plan never has an effect (StaleEpoch), and the epoch that a
node reports never falls, whatever comes of a plan.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Never, Protocol

from prfaas.cluster import NodeId, Plan, Role
from prfaas.errors import DeadlineExceeded, StaleEpoch
from prfaas.flows.ports import Clock


class Phase(Enum):
    SERVING = "serving"
    DRAINING = "draining"
    CONVERTING = "converting"


NEXT: Mapping[Phase, frozenset[Phase]] = {
    Phase.SERVING: frozenset({Phase.DRAINING}),
    Phase.DRAINING: frozenset({Phase.CONVERTING, Phase.SERVING}),
    Phase.CONVERTING: frozenset({Phase.SERVING}),
}


class OnDrainTimeout(Enum):
    """ABORT: keep the role, and the plan is not carried out. PROCEED: change with work left, which goes on at the least
    share that any work gets."""

    ABORT = "abort"
    PROCEED = "proceed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertParams:
    """`drain_timeout_s` should exceed the longest stream that is usual; longer delays a change that does not come
    off."""

    drain_timeout_s: float
    on_drain_timeout: OnDrainTimeout = OnDrainTimeout.ABORT


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a node is for: its share of time for prefill, and the epoch of the plan that says so (0: its own start)."""

    share: float
    epoch: int = 0

    @property
    def role(self) -> Role:
        return role_of(self.share)


@dataclass(frozen=True, slots=True)
class Standing:
    """What a node tells the cluster about itself. `accepts` is None while it takes nothing new at all."""

    assignment: Assignment
    phase: Phase
    accepts: Role | None


class RolePorts(Clock, Protocol):
    """The world as `follow_plans` sees it: this one node."""

    @property
    def node(self) -> NodeId: ...

    async def plan_other_than(self, seen: Plan | None) -> Plan:
        """The plan in force, as soon as it is another than this."""
        ...

    def stand(self, standing: Standing) -> None:
        """Take new work only of the role that it accepts, from now on, and let the cluster know as soon as the store
        can be reached. Never waits."""
        ...

    async def drained(self, keeps: Role | None) -> None:
        """Until nothing is left here but work of the role that it keeps."""
        ...

    async def reconfigure(self, share: float) -> None:
        """Make the engine divide its time by this share."""
        ...

    def refused(self, error: StaleEpoch) -> None:
        """A plan was not followed."""
        ...


def role_of(share: float) -> Role:
    if share <= 0:
        return Role.DECODE
    return Role.PREFILL if share >= 1 else Role.MIXED


def kept(before: Role, after: Role) -> Role | None:
    """The part of a role that a change leaves in place; None when it turns over altogether."""
    match before, after:
        case (Role.MIXED, role) | (role, Role.MIXED):
            return role
        case _:
            return before if before is after else None


def assigned(plan: Plan, node: NodeId, held: Assignment) -> Assignment:
    """What the plan makes of the node; a node that it does not name stays what it is. Raises StaleEpoch."""
    if plan.epoch < held.epoch:
        raise StaleEpoch(seen=plan.epoch, current=held.epoch)
    share = plan.shares.get(node, held.share)
    # Not a number compares false: such a share says nothing.
    return Assignment(min(1.0, max(0.0, share)) if share == share else held.share, plan.epoch)


async def follow_plans(ports: RolePorts, start: Assignment, params: ConvertParams) -> Never:
    """Carry out one plan after the other. A node begins with the assignment that it started with."""
    member = _Member(ports, start, params)
    while True:
        await member.follow(await ports.plan_other_than(member.seen))


class _Member:
    """One node on its way through the phases. `seen` is the plan last read, followed or not."""

    def __init__(self, ports: RolePorts, start: Assignment, params: ConvertParams) -> None:
        self._ports, self._params = ports, params
        self._held, self._phase = start, Phase.SERVING
        self.seen: Plan | None = None

    async def follow(self, plan: Plan) -> None:
        self.seen = plan
        target = self._read(plan)
        if target is None or target == self._held:
            return
        if target.share == self._held.share:
            self._enter(Phase.SERVING, target, target.role)
            return
        keeps = kept(self._held.role, target.role)
        self._enter(Phase.DRAINING, Assignment(self._held.share, target.epoch), keeps)
        if await self._drained(target, keeps):
            self._enter(Phase.CONVERTING, self._held, keeps)
            await self._ports.reconfigure(target.share)
            self._enter(Phase.SERVING, Assignment(target.share, self._held.epoch), target.role)
        else:
            self._enter(Phase.SERVING, self._held, self._held.role)

    async def _drained(self, target: Assignment, keeps: Role | None) -> bool:
        """Whether the node may change now. Not when a newer plan wants something else of it: that one comes next."""
        deadline = self._ports.now() + self._params.drain_timeout_s
        while True:
            waits = {"drained": self._ports.drained(keeps), "plan": self._ports.plan_other_than(self.seen)}
            left_s = max(0.0, deadline - self._ports.now())
            try:
                first, plan = await self._ports.within(left_s, "role drain", self._ports.race(waits))
            except DeadlineExceeded:
                return self._params.on_drain_timeout is OnDrainTimeout.PROCEED
            if first == "drained":
                return True
            wanted = self._read(plan)
            if wanted is not None and wanted.share != target.share:
                return False
            self.seen = plan
            if wanted is not None:
                self._enter(Phase.DRAINING, Assignment(self._held.share, wanted.epoch), keeps)

    def _read(self, plan: Plan) -> Assignment | None:
        try:
            return assigned(plan, self._ports.node, self._held)
        except StaleEpoch as error:
            self._ports.refused(error)
            return None

    def _enter(self, phase: Phase, held: Assignment, accepts: Role | None) -> None:
        assert phase is self._phase or phase in NEXT[self._phase], f"{self._phase} -> {phase}"
        assert held.epoch >= self._held.epoch, "an epoch never falls"
        self._phase, self._held = phase, held
        self._ports.stand(Standing(held, phase, accepts))
