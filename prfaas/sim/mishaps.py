"""Lets the faults of a scenario happen at their times."""

from functools import partial
from typing import TYPE_CHECKING, assert_never

from prfaas.cluster import NodeId, RegionId
from prfaas.errors import ConfigError
from prfaas.profile import GBPS
from prfaas.sim.cluster import Faults
from prfaas.sim.fault_plan import Chances, Fault, LinkStep, NodeDeath, StoreOutage

if TYPE_CHECKING:
    from prfaas.sim.world import World


def schedule(world: "World") -> None:
    """Raises ConfigError for a node or a link that the scenario does not have."""
    for fault in world.scenario.faults:
        _schedule(world, fault)


def _schedule(world: "World", fault: Fault) -> None:
    later, cluster = world.kernel.call_later, world.cluster
    match fault:
        case LinkStep():
            pair = RegionId(fault.source), RegionId(fault.target)
            if pair not in cluster.lines:
                raise ConfigError("faults", f"no link from {fault.source} to {fault.target}")
            later(fault.at_s, partial(cluster.step, *pair, fault.gbps * GBPS))
        case NodeDeath():
            name = NodeId(fault.node)
            if name not in cluster.workers:
                raise ConfigError("faults", f"no node {name}")
            later(fault.at_s, partial(cluster.kill, name))
            if fault.down_s is not None:
                later(fault.at_s + fault.down_s, partial(world.restart, name))
        case StoreOutage():
            later(fault.at_s, world.store.fail)
            later(fault.at_s + fault.for_s, partial(world.store.recover, fault.empty))
        case Chances():
            chances = Faults(refuse=fault.refuse, lose=fault.lose, transfer=fault.transfer, engine=fault.engine)
            later(fault.at_s, partial(setattr, cluster, "faults", chances))
        case _:
            assert_never(fault)
