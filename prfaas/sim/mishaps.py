"""Lets the faults of a scenario happen at their times."""

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, assert_never

from prfaas.cluster import NodeId, RegionId
from prfaas.errors import ConfigError, DeadlineExceeded, PeerUnavailable
from prfaas.membership.plans import DrainRecord, drains_prefix, readable
from prfaas.profile import GBPS
from prfaas.sim.cluster import Faults
from prfaas.sim.fault_plan import (
    BrokenWatch,
    Chances,
    Fault,
    Freeze,
    LeaderChange,
    LinkStep,
    NodeDeath,
    Repetition,
    Replacement,
    SlowPrefill,
    StoreOutage,
)
from prfaas.sim.router import SimRouter
from prfaas.sim.worker import SimWorker

if TYPE_CHECKING:
    from prfaas.sim.world import World


def schedule(world: "World") -> None:
    """Raises ConfigError for a node, a link or a router that the scenario does not have."""
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
            name = _node(world, fault.node)
            later(fault.at_s, partial(cluster.kill, name))
            if fault.down_s is not None:
                later(fault.at_s + fault.down_s, partial(_revive, world, name))
        case SlowPrefill():
            name = _node(world, fault.node)
            later(fault.at_s, lambda: setattr(cluster.workers[name], "slowness", fault.factor))
        case Freeze():
            later(fault.at_s, partial(_freeze, world, _node(world, fault.node), fault.for_s))
        case Replacement():
            name = _node(world, fault.node)
            later(fault.at_s, lambda: _spawn_replacement(world, name, fault))
        case LeaderChange():
            _router(world, fault.router)
            later(fault.at_s, partial(world.lead, fault.router, fault.stale_s))
        case BrokenWatch():
            later(fault.at_s, partial(world.store.break_watch, _router(world, fault.router).told, fault.for_s))
        case Repetition():
            later(fault.at_s, partial(world.store.repeat, _router(world, fault.router).told, fault.changes))
        case StoreOutage():
            later(fault.at_s, world.store.fail)
            later(fault.at_s + fault.for_s, partial(world.store.recover, fault.empty))
        case Chances():
            chances = Faults(refuse=fault.refuse, lose=fault.lose, transfer=fault.transfer, engine=fault.engine)
            later(fault.at_s, partial(setattr, cluster, "faults", chances))
        case _:
            assert_never(fault)


def _node(world: "World", name: str) -> NodeId:
    if name not in world.cluster.workers:
        raise ConfigError("faults", f"no node {name}")
    return NodeId(name)


def _router(world: "World", number: int) -> SimRouter:
    if number >= len(world.routers):
        raise ConfigError("faults", f"no router {number}")
    return world.routers[number]


def _revive(world: "World", name: NodeId) -> None:
    """Unless something else has, when the node died twice."""
    if world.cluster.workers[name].died.is_set:
        world.restart(name)


def _freeze(world: "World", name: NodeId, for_s: float) -> None:
    worker = world.cluster.workers[name]
    world.cluster.freeze(worker)
    world.kernel.call_later(for_s, partial(world.cluster.thaw, worker))


def _spawn_replacement(world: "World", name: NodeId, fault: Replacement) -> None:
    world.kernel.spawn(_replace(world, world.cluster.workers[name], fault), f"replacement of {name}")


async def _replace(world: "World", worker: SimWorker, fault: Replacement) -> None:
    """As `prfaas drain` and a restart do. While the store cannot be reached nobody is told, and the time runs all the
    same."""
    node = worker.node
    record = DrainRecord(incarnation=f"{node.incarnation:016x}", made_by="operator")
    with suppress(PeerUnavailable):
        await world.store.put(drains_prefix(world.store_name) + node.id, readable(record))
    with suppress(DeadlineExceeded):
        await world.kernel.within(fault.drain_s, "drain", worker.drained(None))
    if not worker.died.is_set:
        world.cluster.kill(node.id)
        world.kernel.call_later(fault.down_s, partial(_revive, world, node.id))
