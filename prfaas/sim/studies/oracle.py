"""A slow loop that knows what is coming: at the moment of each change it publishes the plan that is best after it.

It has to convert nodes as the product does, by the same flow; what it is spared is to notice. It is what the product is
compared with, and runs the same fast loop.
"""

from functools import partial

import msgspec

from prfaas.cluster import NodeId, NodeKind, Plan
from prfaas.scheduling.planner import RolePlan
from prfaas.sim.case_study_runs import shares
from prfaas.sim.studies.conditions import Condition
from prfaas.sim.world import World

#: Later than any run ends.
NEVER_S = 1e9


def oracle(condition: Condition) -> World:
    """The condition's cluster after it has been played under the oracle."""
    control = msgspec.structs.replace(condition.scenario.control, slow_period_s=NEVER_S)
    world = World(condition.scenario.but(control=control))
    for epoch, phase in enumerate(condition.phases, 1):
        # The first one only after the store has said who is there.
        world.kernel.call_later(max(phase.at_s, world.scenario.report_s), partial(_publish, world, epoch, phase.plan))
    world.play()
    world.check()
    return world


def _publish(world: World, epoch: int, best: RolePlan) -> None:
    """Nodes that prefill come first, so that as few as possible change."""
    names = sorted(name for name, worker in world.cluster.workers.items() if worker.node.kind is NodeKind.PD)
    prefilling = shares(best)
    wanted = {NodeId(name): prefilling[place] if place < len(prefilling) else 0.0 for place, name in enumerate(names)}
    plan = Plan(epoch, best.threshold_tokens, wanted, "known beforehand")
    world.kernel.spawn(world.control[0].publish(plan), f"plan {epoch}")
