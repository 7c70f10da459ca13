"""A simulated cluster: its workers, how far apart they are, what may go wrong, and what routers see of it."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from prfaas.cluster import ClusterView, Incarnation, Node, NodeId, NodeKind
from prfaas.errors import EngineFailed, Overloaded, PrfaasError
from prfaas.sim.kernel import Kernel
from prfaas.sim.worker import Costs, SimWorker


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
    """One-way delays within the PD region and to another one, and what a transfer gets of the line between them."""

    hop_s: float = 0.0005
    far_hop_s: float = 0.02
    far_bytes_per_s: float = 1e6
    view_lag_s: float = 0.5


class SimCluster:
    """Workers by node, of which some may be dead; and the chances of faults, which a test may change as it goes."""

    def __init__(
        self,
        kernel: Kernel,
        nodes: Iterable[Node],
        costs: Costs,
        network: Network = Network(),
        faults: Faults = Faults(),
    ) -> None:
        self.kernel, self.network, self.faults = kernel, network, faults
        self._costs = costs
        self.workers = {node.id: SimWorker(kernel, node, costs) for node in nodes}
        self._left_view: set[NodeId] = set()
        self._planned: dict[str, deque[Fault]] = {}

    def kill(self, name: NodeId) -> None:
        worker = self.workers[name]
        worker.die()
        self.kernel.call_later(self.network.view_lag_s, lambda: self._leave_view(worker))

    def restart(self, name: NodeId) -> None:
        """A new incarnation at the same address; it knows nothing of what the old one did."""
        old = self.workers[name].node
        self._left_view.discard(name)
        again = replace(old, incarnation=Incarnation(old.incarnation + 1))
        self.workers[name] = SimWorker(self.kernel, again, self._costs)

    def view(self) -> ClusterView:
        """What the last reports say; a dead node is still in it for a while."""
        nodes = [w.registration() for name, w in self.workers.items() if name not in self._left_view]
        nodes.sort(key=lambda node: (node.load.queued_prefill_tokens + node.load.committed_tokens, node.id))
        pd = [node for node in nodes if node.kind is NodeKind.PD]
        return ClusterView(
            nodes={node.id: node for node in nodes},
            remote_prefill=tuple(node.id for node in nodes if node.kind is NodeKind.PREFILL_WORKER),
            local_prefill=tuple(node.id for node in pd if node.role.prefills),
            decode=tuple(node.id for node in pd if node.role.decodes),
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
        return self.kernel.random.random() < probability

    def hop_s(self, worker: SimWorker) -> float:
        far = worker.node.kind is NodeKind.PREFILL_WORKER
        return self.network.far_hop_s if far else self.network.hop_s

    def check(self) -> None:
        for worker in self.workers.values():
            worker.check()

    def check_idle(self) -> None:
        """Everybody let go of everything."""
        for worker in self.workers.values():
            worker.check_idle()

    def _leave_view(self, worker: SimWorker) -> None:
        if self.workers[worker.node.id] is worker:
            self._left_view.add(worker.node.id)
