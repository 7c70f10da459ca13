"""The pacing loop in virtual time: the leader speaks, and repeats what did not get through."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from prfaas.cluster import Budget, ClusterView
from prfaas.flows.pacing import pacing_loop
from prfaas.scheduling.budget import Budgeter, BudgetParams
from prfaas.sim.kernel import Kernel
from tests.unit.scheduling.steering_scenes import FAR, NEAR, sending, view_of

REPEAT_S = BudgetParams().repeat_s


@dataclass
class Router:
    """`PacingPorts` over a store that can be out of reach."""

    kernel: Kernel
    leading: bool = True
    reachable: bool = True
    written: list[tuple[float, Budget]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now, self.sleep = self.kernel.now, self.kernel.sleep
        self.within, self.race = self.kernel.within, self.kernel.race

    def view(self) -> ClusterView:
        return view_of(sending("p0", sent=900.0, queued=9000))

    def leads(self) -> bool:
        return self.leading

    async def allow(self, budgets: Sequence[Budget]) -> Sequence[Budget]:
        if not self.reachable:
            return ()
        self.written += [(self.now(), budget) for budget in budgets]
        return budgets


def started(**settings: bool) -> Router:
    router = Router(Kernel(seed=0), **settings)
    router.kernel.spawn(pacing_loop(router, Budgeter({(FAR, NEAR): 1000.0}), 1.0), "pacing")
    return router


def test_only_the_leader_says_who_may_send():
    """And goes on saying it while it leads."""
    router = started(leading=False)
    router.kernel.run_until(30.0)
    assert not router.written
    router.leading = True
    router.kernel.run_until(60.5)
    assert [at for at, _ in router.written] == [31.0, 31.0 + REPEAT_S, 31.0 + 2 * REPEAT_S]


def test_what_was_not_written_is_tried_again_in_the_next_round():
    """It does not count as said."""
    router = started(reachable=False)
    router.kernel.run_until(5.5)
    router.reachable = True
    router.kernel.run_until(8.0)
    assert [at for at, _ in router.written] == [6.0]
