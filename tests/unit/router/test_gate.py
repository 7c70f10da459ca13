"""Opposite `services/router/admission.py`: whatever ends a wait or a run, the machine knows nothing of it after."""

import asyncio
import random
import time

import pytest

from prfaas.errors import Overloaded, PeerUnavailable
from prfaas.request import Request, RequestId, Sampling
from prfaas.scheduling.admission import Admission, AdmissionParams
from prfaas.scheduling.allowance import Quota
from services.router.admission import Gate
from services.router.admission_port import Caller

LIVENESS_S = 20.0


class Nobody:
    def admitted(self, tenant: str, waited_s: float) -> None: ...

    def refused(self, tenant: str, reason: str) -> None: ...


async def unknown(request: Request) -> float | None:
    return None


def gate(machine: Admission) -> Gate:
    return Gate(machine, None, Nobody(), unknown, time.monotonic, lambda: 1, lambda: None)


def asked(tokens: int = 1) -> list[Request]:
    sampling = Sampling(max_tokens=tokens)
    return [Request(id=RequestId("0" * 32), model="m", prompt=b"\0" * 4, sampling=sampling)]


class Run:
    """A request that runs until it is let go."""

    def __init__(self, gate: Gate, tenant: str = "") -> None:
        self.entered, self.let_go = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._run(gate, Caller(tenant=tenant)))

    async def _run(self, gate: Gate, caller: Caller) -> None:
        async with gate.admitted(caller, asked(), time.monotonic()):
            self.entered.set()
            await self.let_go.wait()


async def ended(*runs: Run) -> None:
    async with asyncio.timeout(LIVENESS_S):
        await asyncio.gather(*(run.task for run in runs), return_exceptions=True)


def nothing_is_left(machine: Admission) -> None:
    machine.check()
    assert (machine.running, machine.running_tokens, len(machine.turns)) == (0, 0, 0)


@pytest.mark.parametrize("cancel_first", [True, False])
async def test_who_leaves_as_its_turn_comes_passes_it_on(cancel_first: bool):
    """In the same turn of the loop, one way or the other."""
    machine = Admission(AdmissionParams(max_running=1))
    door = gate(machine)
    first, second, third = Run(door), Run(door), Run(door)
    await first.entered.wait()
    assert len(machine.turns) == 2
    steps = [second.task.cancel, lambda: first.task.cancel()]
    first.let_go.set()
    if cancel_first:
        steps[0]()
    else:  # the first ends, and so lets the second in, one turn before that one runs
        await asyncio.sleep(0)
        steps[0]()
    async with asyncio.timeout(LIVENESS_S):
        await third.entered.wait()
    assert second.task.cancelled() and not second.entered.is_set()
    third.let_go.set()
    await ended(first, second, third)
    nothing_is_left(machine)


async def test_nobody_waits_longer_than_allowed():
    machine = Admission(AdmissionParams(max_running=1, max_wait_s=0.02))
    door = gate(machine)
    first, second = Run(door), Run(door)
    await ended(second)
    assert isinstance(second.task.exception(), Overloaded)
    first.let_go.set()
    await ended(first)
    nothing_is_left(machine)


@pytest.mark.parametrize("seed", range(5))
async def test_after_a_storm_nothing_is_left(seed: int):
    """Runs that end, fail, are cancelled while they wait or run, and are refused, in any order."""
    chance = random.Random(seed)
    machine = Admission(AdmissionParams(max_running=3, max_queued_requests=8, max_queued_tokens=30))
    door, runs = gate(machine), list[Run]()
    for _ in range(400):
        runs.append(Run(door, chance.choice("abc")))
        for run in chance.sample(runs, min(len(runs), 3)):
            chance.choice((run.task.cancel, run.let_go.set, lambda: None))()
        for _ in range(chance.randrange(3)):
            await asyncio.sleep(0)
        machine.check()
    assert any(run.entered.is_set() and not run.task.cancelled() for run in runs)
    for run in runs:
        run.let_go.set()
    await ended(*runs)
    nothing_is_left(machine)


async def test_a_failure_of_the_cluster_is_not_charged_and_one_after_tokens_is():
    """What was generated, and the prompt with it."""
    machine = Admission(AdmissionParams(max_running=1))
    door, caller = gate(machine), Caller(quota=Quota(tokens_per_min=100))

    async def failing(produced: int) -> None:
        async with door.admitted(caller, asked(99), time.monotonic()) as grant:
            grant.produced(produced)
            raise PeerUnavailable("d0", "gone")

    for produced in (0, 0, 5):
        with pytest.raises(PeerUnavailable):
            await failing(produced)
        nothing_is_left(machine)
    with pytest.raises(Overloaded, match="tenant's tokens"):
        await door.admitted(caller, asked(94), time.monotonic()).__aenter__()
