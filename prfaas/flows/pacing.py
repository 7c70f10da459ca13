"""The loop by which the leader tells those that send KV between regions how much each of them may send."""

from collections.abc import Sequence
from typing import Never, Protocol

from prfaas.cluster import Budget, ClusterView
from prfaas.flows.ports import Clock
from prfaas.scheduling.budget import Budgeter


class PacingPorts(Clock, Protocol):
    def view(self) -> ClusterView: ...

    def leads(self) -> bool:
        """Whether this router is the leader now."""
        ...

    async def allow(self, budgets: Sequence[Budget]) -> Sequence[Budget]:
        """Put budgets in force; those that now are. The others could not be written, or somebody else has written
        one."""
        ...


async def pacing_loop(ports: PacingPorts, budgeter: Budgeter, period_s: float) -> Never:
    """With each round of reports, while this router leads. Nobody has to be told that it does so no more: what is not
    repeated lapses."""
    while True:
        await ports.sleep(period_s)
        if ports.leads() and (due := budgeter.due(ports.view(), ports.now())):
            for budget in await ports.allow(due):
                budgeter.published(budget, ports.now())
