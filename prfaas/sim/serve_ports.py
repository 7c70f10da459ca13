"""The flows' ports over simulated workers: commands and answers that travel, are lost, and meet dead workers.

A connection keeps its messages in order, and falls silent once it has lost one. The death of a worker shows at once on
the broken connection, and in the view only later.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from prfaas.cluster import ClusterView, NodeId
from prfaas.errors import PrfaasError
from prfaas.flows.ports import PrefillReport, Reservation, TokenBatch
from prfaas.request import AttemptId, Matches, Request, Route
from prfaas.scheduling.hedging import Hedging
from prfaas.scheduling.routing import RoutingParams
from prfaas.sim.answers import Answers
from prfaas.sim.cluster import Lost, SimCluster
from prfaas.sim.worker import Reply, SimWorker

T = TypeVar("T")
#: What a worker does with a command, and where it says what came of it.
Job = Callable[[SimWorker, Reply], None]


class SimServePorts:
    """`flows.ports.ServePorts` of one simulated router that sees the cluster as it is and follows a fixed rule."""

    def __init__(self, cluster: SimCluster, routing: RoutingParams) -> None:
        self._cluster, self._routing = cluster, routing
        #: How many requests have got their first route.
        self.demand = 0
        self._kernel = cluster.kernel

    def now(self) -> float:
        return self._kernel.now()

    # Not async themselves: a coroutine around each of the kernel's would only cost.
    def sleep(self, seconds: float) -> Coroutine[Any, Any, None]:
        return self._kernel.sleep(seconds)

    def within(self, seconds: float, stage: str, awaitable: Awaitable[T]) -> Coroutine[Any, Any, T]:
        return self._kernel.within(seconds, stage, awaitable)

    def race(self, contenders: Mapping[str, Awaitable[Any]]) -> Coroutine[Any, Any, tuple[str, Any]]:
        return self._kernel.race(contenders)

    def view(self) -> ClusterView:
        return self._cluster.view()

    def routing(self) -> RoutingParams:
        return self._routing

    def routed(self, request: Request, route: Route) -> None:
        self.demand += 1

    async def matches(self, request: Request) -> Matches:
        return self._cluster.caches.matches(request)

    def new_attempt(self) -> AttemptId:
        return AttemptId(f"{self._kernel.random.getrandbits(128):032x}")

    async def reserve(self, attempt: AttemptId, request: Request, route: Route) -> Reservation:
        def job(worker: SimWorker, reply: Reply) -> None:
            reply(worker.reserve(attempt, request))

        reservation: Reservation = await self._command(route.decode, attempt, "reserve", job).next()
        return reservation

    def prefill_lost(self, attempt: AttemptId, error: PrfaasError) -> None:
        """This router has no breakers."""

    def due_at(self, attempt: AttemptId) -> float | None:
        return None

    def is_hopeless(self, attempt: AttemptId) -> bool:
        return False

    def hedging(self) -> Hedging | None:
        return None

    async def prefill(
        self, route: Route, attempt: AttemptId, request: Request, reservation: Reservation
    ) -> PrefillReport:
        def job(worker: SimWorker, reply: Reply) -> None:
            worker.prefill(attempt, request, self._cluster.way(worker, reservation), reply)

        report: PrefillReport = await self._command(route.prefill, attempt, "prefill", job).next()
        return report

    async def decode(self, reservation: Reservation, request: Request) -> AsyncIterator[TokenBatch]:
        def job(worker: SimWorker, reply: Reply) -> None:
            worker.decode(reservation.attempt, request, reply)

        answers = self._command(reservation.decode, reservation.attempt, "decode", job)
        while True:
            batch: TokenBatch = await answers.next()
            yield batch
            if batch.finish is not None:
                return

    def release(self, node: NodeId, attempt: AttemptId) -> None:
        worker = self._cluster.workers[node]
        # A worker that is cut off finds out by itself that the connection is broken, later.
        wait_s = self._cluster.network.give_up_s if self._cluster.cut_off(worker) else self._cluster.hop_s(worker)

        def arrive() -> None:
            there = self._cluster.workers[node]
            self._cluster.once_awake(there, lambda: there.end(attempt))

        self._kernel.call_later(wait_s, arrive)

    def _command(self, node: NodeId, attempt: AttemptId, name: str, job: Job) -> Answers:
        cluster, worker = self._cluster, self._cluster.workers[node]
        answers, hop_s, fault = Answers(node), cluster.hop_s(worker), cluster.fault(name, node)
        answers.silent = fault is Lost.COMMAND
        worker.listen(attempt, answers)

        def travel(arrive: Callable[[], None]) -> None:
            if cluster.loses_message(worker):
                answers.silent = True
            if not answers.silent:
                self._kernel.call_later(hop_s, arrive)

        def reply(answer: Any) -> None:
            cluster.once_awake(worker, lambda: travel(lambda: answers.put(answer)))

        def arrive() -> None:
            if worker.died.is_set:
                return
            try:
                if isinstance(fault, PrfaasError):
                    raise fault
                job(worker, reply)
            except PrfaasError as error:
                reply(error)

        travel(lambda: cluster.once_awake(worker, arrive))
        return answers
