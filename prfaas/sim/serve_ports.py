"""The flows' ports over simulated workers: commands and answers that travel, are lost, and meet dead workers.

A connection keeps its messages in order, and falls silent once it has lost one. The death of a worker shows at once on
the broken connection, and in the view only later.
"""

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from prfaas.cluster import ClusterView, NodeId
from prfaas.errors import PeerUnavailable, PrfaasError, TransferFailed
from prfaas.flows.ports import PrefillReport, Reservation, TokenBatch
from prfaas.request import AttemptId, Request
from prfaas.sim.cluster import Lost, SimCluster
from prfaas.sim.kernel import Kernel
from prfaas.sim.task import Event
from prfaas.sim.worker import Reply, SimWorker

T = TypeVar("T")


class Answers:
    """What one command is answered with, in order."""

    def __init__(self, kernel: Kernel, worker: SimWorker) -> None:
        self.silent = False
        self._kernel = kernel
        self._worker = worker
        self._arrived: deque[Any] = deque()
        self._more = Event("answer")

    def put(self, answer: Any) -> None:
        self._arrived.append(answer)
        self._more.set()

    async def next(self) -> Any:
        """The next answer; an error is raised. PeerUnavailable when the worker dies first."""
        if not self._arrived:
            self._more = Event("answer")
            await self._kernel.race({"answer": self._more.wait(), "death": self._worker.died.wait()})
        if not self._arrived:
            raise PeerUnavailable(self._worker.node.id, "connection lost")
        answer = self._arrived.popleft()
        if isinstance(answer, PrfaasError):
            raise answer
        return answer


class SimServePorts:
    """`flows.ports.ServePorts` of one simulated router."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._kernel = cluster.kernel

    def now(self) -> float:
        return self._kernel.now()

    async def sleep(self, seconds: float) -> None:
        await self._kernel.sleep(seconds)

    async def within(self, seconds: float, stage: str, awaitable: Awaitable[T]) -> T:
        return await self._kernel.within(seconds, stage, awaitable)

    async def race(self, contenders: Mapping[str, Awaitable[Any]]) -> tuple[str, Any]:
        return await self._kernel.race(contenders)

    def view(self) -> ClusterView:
        return self._cluster.view()

    def new_attempt(self) -> AttemptId:
        return AttemptId(f"{self._kernel.random.getrandbits(128):032x}")

    async def reserve(self, decode: NodeId, attempt: AttemptId, request: Request, source: NodeId) -> Reservation:
        async def job(worker: SimWorker, _: Reply) -> Reservation:
            return await worker.reserve(attempt, request)

        reservation: Reservation = await self._command(decode, attempt, "reserve", job).next()
        return reservation

    async def prefill(
        self, prefill: NodeId, attempt: AttemptId, request: Request, reservation: Reservation
    ) -> PrefillReport:
        async def push(content: bytes, nbytes: int) -> None:
            await self._transfer(prefill, reservation, content, nbytes)

        async def job(worker: SimWorker, _: Reply) -> PrefillReport:
            return await worker.prefill(attempt, request, reservation, push)

        report: PrefillReport = await self._command(prefill, attempt, "prefill", job).next()
        return report

    async def decode(self, reservation: Reservation, request: Request) -> AsyncIterator[TokenBatch]:
        async def job(worker: SimWorker, reply: Reply) -> TokenBatch:
            return await worker.decode(reservation.attempt, request, reply)

        answers = self._command(reservation.decode, reservation.attempt, "decode", job)
        while True:
            batch: TokenBatch = await answers.next()
            yield batch
            if batch.finish is not None:
                return

    def release(self, node: NodeId, attempt: AttemptId) -> None:
        hop_s = self._cluster.hop_s(self._cluster.workers[node])
        self._kernel.call_later(hop_s, lambda: self._cluster.workers[node].end(attempt))

    def _command(
        self, node: NodeId, attempt: AttemptId, name: str, job: Callable[[SimWorker, Reply], Awaitable[Any]]
    ) -> Answers:
        worker = self._cluster.workers[node]
        answers, hop_s = Answers(self._kernel, worker), self._cluster.hop_s(worker)
        fault = self._cluster.fault(name, node)
        answers.silent = fault is Lost.COMMAND

        async def work(at: SimWorker) -> Any:
            if isinstance(fault, PrfaasError):
                raise fault
            return await job(at, reply)

        def travel(arrive: Callable[[], None]) -> None:
            answers.silent = answers.silent or self._cluster.chance(self._cluster.faults.lose)
            if not answers.silent:
                self._kernel.call_later(hop_s, arrive)

        def reply(answer: Any) -> None:
            travel(lambda: answers.put(answer))

        def arrive() -> None:
            if not worker.died.is_set:
                worker.start(attempt, name, work, reply)

        travel(arrive)
        return answers

    async def _transfer(self, source: NodeId, reservation: Reservation, content: bytes, nbytes: int) -> None:
        """Move KV between two workers; done when it is acknowledged."""
        cluster = self._cluster
        near = cluster.workers[source].node.region == cluster.workers[reservation.decode].node.region
        hop_s = cluster.network.hop_s if near else cluster.network.far_hop_s
        await self._kernel.sleep(hop_s if near else hop_s + nbytes / cluster.network.far_bytes_per_s)
        if cluster.chance(cluster.faults.transfer):
            raise TransferFailed(reservation.attempt, "line")
        cluster.workers[reservation.decode].receive(reservation, content)
        await self._kernel.sleep(hop_s)
