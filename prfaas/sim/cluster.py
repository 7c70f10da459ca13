"""A simulated cluster: its workers, the lines between its regions, and what may go wrong."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from prfaas.cluster import ClusterView, Incarnation, Node, NodeId, NodeKind, RegionId
from prfaas.errors import EngineFailed, Overloaded, PrfaasError
from prfaas.flows.ports import Reservation
from prfaas.sim.caches import Caches
from prfaas.sim.instance import Costs, Instance
from prfaas.sim.kernel import Kernel
from prfaas.sim.link import Line
from prfaas.sim.prefill_leg import Way
from prfaas.sim.step_times import StepTimes
from prfaas.sim.worker import SimWorker

Pair = tuple[RegionId, RegionId]


class Lost(Enum):
    """A message that does not arrive."""

    COMMAND = "command"


Fault = PrfaasError | Lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Chances: that a reservation is refused, a message is lost (and all that follow on its stream), a transfer breaks,
    an engine fails a prefill."""

    refuse: float = 0.0
    lose: float = 0.0
    transfer: float = 0.0
    engine: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """One-way delays within a region and between two (`far_hops_s`, there as back; `far_hop_s` where it says nothing),
    what lines between regions carry, and what two nodes of one region have between them. `home` is where routers are.
    `view_lag_s`: how long a dead node stays in the view. `give_up_s`: how long a transfer or a connection lasts on a
    line that is cut."""

    hop_s: float = 0.0005
    far_hop_s: float = 0.02
    far_hops_s: Mapping[Pair, float] = field(default_factory=dict)
    home: RegionId | None = None
    far_bytes_per_s: float = 1e6
    fabric_bytes_per_s: float = 50e9
    view_lag_s: float = 0.5
    give_up_s: float = 10.0

    def between_s(self, source: RegionId, target: RegionId | None) -> float:
        """One way."""
        if source == target:
            return self.hop_s
        if target is None:
            return self.far_hop_s
        back_s = self.far_hops_s.get((target, source), self.far_hop_s)
        return self.far_hops_s.get((source, target), back_s)


class SimCluster:
    """Workers by node, of which some may be dead; and the chances of faults, which a test may change as it goes."""

    def __init__(
        self,
        kernel: Kernel,
        nodes: Iterable[Node],
        costs: Costs | Callable[[Node], Instance],
        network: Network = Network(),
        faults: Faults = Faults(),
        caches: Caches | None = None,
    ) -> None:
        self.kernel, self.network, self.faults = kernel, network, faults
        self._instance_of = costs.everywhere() if isinstance(costs, Costs) else costs
        nodes = list(nodes)
        #: Of all tokens of all nodes.
        self.step_times = StepTimes()
        self.caches = caches or Caches(self._instance_of(nodes[0]).profile)
        self.workers = {node.id: self._start(node) for node in nodes}
        self.lines: dict[Pair, Line] = {}
        self._left_view: set[NodeId] = set()
        self._cut: frozenset[RegionId] = frozenset()
        self._planned: dict[str, deque[Fault]] = {}
        self._frozen: dict[SimWorker, list[Callable[[], None]]] = {}

    def kill(self, name: NodeId) -> None:
        worker = self.workers[name]
        worker.die()
        self._frozen.pop(worker, None)
        self.kernel.call_later(self.network.view_lag_s, lambda: self._leave_view(worker))

    def freeze(self, worker: SimWorker) -> None:
        """As a process that is stopped: what it is told and what it would say waits. What it does meanwhile is seen
        only afterwards."""
        if not worker.died.is_set:
            self._frozen.setdefault(worker, [])

    def thaw(self, worker: SimWorker) -> None:
        """It goes on where it was, unless it has died."""
        for call in self._frozen.pop(worker, ()):
            call()

    def is_frozen(self, worker: SimWorker) -> bool:
        return worker in self._frozen

    def once_awake(self, worker: SimWorker, call: Callable[[], None]) -> None:
        """Now, or when it is thawed, in the order of the calls."""
        waiting = self._frozen.get(worker)
        if waiting is None:
            call()
        else:
            waiting.append(call)

    def restart(self, name: NodeId, as_node: Node | None = None) -> None:
        """A new incarnation at the same address; it knows nothing of what the old one did. It has the role of the old
        one, or is as given."""
        old = self.workers[name].node
        self._left_view.discard(name)
        self.workers[name] = self._start(replace(as_node or old, incarnation=Incarnation(old.incarnation + 1)))

    def view(self) -> ClusterView:
        """Who is there and how loaded, as of now; a dead node is still in it for a while."""
        nodes = [w.registration() for name, w in self.workers.items() if name not in self._left_view]
        nodes.sort(key=lambda node: (node.load.queued_prefill_tokens + node.load.committed_tokens, node.id))
        pd = [node for node in nodes if node.kind is NodeKind.PD]
        return ClusterView(
            nodes={node.id: node for node in nodes},
            remote_prefill=tuple(node.id for node in nodes if node.kind is NodeKind.PREFILL_WORKER),
            local_prefill=tuple(node.id for node in pd if node.role.prefills),
            decode=tuple(node.id for node in pd if node.role.decodes),
        )

    def line(self, source: RegionId, target: RegionId) -> Line:
        if (line := self.lines.get((source, target))) is None:
            line = self.lines[source, target] = Line(self.kernel, self.network.far_bytes_per_s, self.network.give_up_s)
        return line

    def way(self, source: SimWorker, reservation: Reservation) -> Way | None:
        """How KV gets from a worker to a reservation; None when it need not move."""
        if source.node.id == reservation.decode:
            return None
        target = self.workers[reservation.decode]
        near = source.node.region == target.node.region
        return Way(
            target=target,
            generation=reservation.generation if target.node.incarnation == reservation.incarnation else -1,
            route=self.network.fabric_bytes_per_s if near else self.line(source.node.region, target.node.region),
            hop_s=self.network.between_s(source.node.region, target.node.region),
            breaks=lambda: self.chance(self.faults.transfer),
        )

    def plan(self, call: str, *faults: Fault) -> None:
        """Let the next calls of this name ("reserve", "prefill", "decode") meet these, one each."""
        self._planned.setdefault(call, deque()).extend(faults)

    def fault(self, call: str, node: NodeId) -> Fault | None:
        """What a call meets: what was planned, or what chance brings."""
        if planned := self._planned.get(call):
            return planned.popleft()
        if call == "reserve" and self.chance(self.faults.refuse):
            return Overloaded(f"kv bytes of {node}")
        if call == "prefill" and self.chance(self.faults.engine):
            return EngineFailed(node, "by chance")
        return None

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.kernel.random.random() < probability

    def hop_s(self, worker: SimWorker) -> float:
        """From a router to it. PD nodes are where the routers are."""
        if worker.node.kind is NodeKind.PD:
            return self.network.hop_s
        return self.network.between_s(worker.node.region, self.network.home)

    def step(self, source: RegionId, target: RegionId, bytes_per_s: float) -> None:
        """The line is this fast from now on; 0 cuts it, for messages as well."""
        self.line(source, target).step(bytes_per_s)
        self._cut = frozenset(region for pair, line in self.lines.items() if line.down for region in pair)

    def loses_message(self, worker: SimWorker) -> bool:
        return (self.faults.lose > 0 and self.chance(self.faults.lose)) or (bool(self._cut) and self.cut_off(worker))

    def cut_off(self, worker: SimWorker) -> bool:
        """Whether nothing gets to a worker or back. The PD region's own nodes are always reached."""
        return worker.node.kind is NodeKind.PREFILL_WORKER and worker.node.region in self._cut

    def check(self) -> None:
        for worker in self.workers.values():
            worker.check()
        for line in self.lines.values():
            line.check()
        self.caches.check()

    def check_idle(self) -> None:
        """Everybody let go of everything."""
        self.check()
        for worker in self.workers.values():
            worker.check_idle()
        for line in self.lines.values():
            line.check_idle()

    def _start(self, node: Node) -> SimWorker:
        instance = self._instance_of(node)
        return SimWorker(self.kernel, node, instance, self.caches, self.step_times)

    def _leave_view(self, worker: SimWorker) -> None:
        if self.workers[worker.node.id] is worker:
            self._left_view.add(worker.node.id)
