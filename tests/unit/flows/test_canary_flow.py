"""Canaries over the simulated cluster: what damage to the path they find, and that they leave nothing behind."""

from collections.abc import Callable

import pytest

from prfaas.cluster import Incarnation, Namespace, Node, NodeId, NodeKind, RegionId, Role
from prfaas.errors import DeadlineExceeded, EngineFailed, Overloaded, PeerUnavailable, TransferFailed
from prfaas.flows.canary import Answer, Lesson, canary_loop
from prfaas.flows.ports import PrefillReport, Reservation
from prfaas.flows.serve import ServeParams
from prfaas.request import AttemptId, Request, Route
from prfaas.scheduling.canary import Canary, CanaryParams, Probe, Verdict
from prfaas.scheduling.routing import RoutingParams
from prfaas.sim.cluster import SimCluster
from prfaas.sim.instance import Costs
from prfaas.sim.kernel import Kernel
from prfaas.sim.serve_ports import SimServePorts

PERIOD_S = 10.0
PARAMS = ServeParams(
    reserve_timeout_s=1.0,
    prefill_timeout_s=5.0,
    prefill_timeout_s_per_token=0.01,
    first_token_timeout_s=5.0,
    token_gap_timeout_s=2.0,
)
LESSON = Lesson(
    prompts=[b"".join((start + at).to_bytes(4, "little") for at in range(200)) for start in (0, 1000, 2000)],
    output_tokens=6,
)


def node(name: str, role: Role, kind: NodeKind, region: str) -> Node:
    return Node(
        id=NodeId(name),
        region=RegionId(region),
        kind=kind,
        role=role,
        incarnation=Incarnation(1),
        namespace=Namespace("ns"),
        model="m",
        rpc_address="",
        kv_addresses={"": f"{name}:7000"},
        max_context_tokens=100_000,
    )


def far(name: str) -> Node:
    return node(name, Role.PREFILL, NodeKind.PREFILL_WORKER, "far")


def near(name: str, role: Role = Role.DECODE) -> Node:
    return node(name, role, NodeKind.PD, "near")


#: What happens to KV on its way from a node to a node: what arrives instead of it, or an error.
Damage = Callable[[str, str, bytes], bytes]


class Ports(SimServePorts):
    """With a path that may be damaged."""

    def __init__(self, cluster: SimCluster, canary: Canary) -> None:
        super().__init__(cluster, RoutingParams(threshold_tokens=100))
        self._canary, self.damage = canary, lambda source, target, kv: kv
        self.judgements: list[tuple[Probe, Verdict, str]] = []
        self.demand = 0
        self.prefilled: list[Request] = []

    def routed(self, request: Request, route: Route) -> None:
        self.demand += 1

    def live_routers(self) -> int:
        return 1

    def judged(self, probe: Probe, verdict: Verdict, detail: str) -> None:
        self.judgements.append((probe, verdict, detail))

    async def prefill(
        self, route: Route, attempt: AttemptId, request: Request, reservation: Reservation
    ) -> PrefillReport:
        assert not route.use_cache
        self.prefilled.append(request)
        report = await super().prefill(route, attempt, request, reservation)
        if route.moves_kv:
            worker, content = self._cluster.workers[route.decode], self._cluster.workers[route.prefill]
            kv = content.instance.content.kv_of(request)
            worker.complete(attempt, self.damage(route.prefill, route.decode, kv))
        return report


class World:
    def __init__(self, *nodes: Node, **planned: list[Exception]) -> None:
        self.kernel = Kernel(seed=0)
        self.cluster = SimCluster(self.kernel, nodes, Costs())
        for call, faults in planned.items():
            self.cluster.plan(call, *faults)  # type: ignore[arg-type]
        self.canary = Canary(CanaryParams(period_s=PERIOD_S, max_share=1.0), lambda: 0.0)
        self.ports = Ports(self.cluster, self.canary)

    def run(self, seconds: float) -> list[Verdict]:
        """The verdicts meanwhile. Whatever was asked, nothing is left of it afterwards."""
        before = len(self.ports.judgements)

        async def some_time() -> None:
            loop = canary_loop(self.ports, self.canary, PARAMS, LESSON)
            await self.kernel.race({"canaries": loop, "end": self.kernel.sleep(seconds)})

        self.kernel.run(some_time())
        self.kernel.run_until(self.kernel.now() + 0.5)
        self.cluster.check_idle()
        self.canary.check()
        return [verdict for _, verdict, _ in self.ports.judgements[before:]]


def test_a_path_that_is_well_is_found_right():
    """Each prefill node in turn, with every decode node."""
    world = World(far("p0"), far("p1"), near("d0"), near("d1", Role.MIXED))
    verdicts = world.run(10 * PERIOD_S)
    assert len(verdicts) >= 16 and set(verdicts) == {Verdict.RIGHT}
    assert len({probe for probe, _, _ in world.ports.judgements}) == 4
    assert not world.canary.distrusted


@pytest.mark.parametrize(
    "damage",
    [
        lambda source, target, kv: bytes(32) if source == "p0" else kv,
        lambda source, target, kv: bytes([kv[0] ^ 1, *kv[1:]]) if source == "p0" else kv,
    ],
    ids=["zeroed", "one bit"],
)
def test_field_C15_what_a_poisoned_path_delivers_is_found_wrong(damage: Damage):
    """Within a few turns its node is distrusted, and no other is."""
    world = World(far("p0"), far("p1"), near("d0"), near("d1"))
    world.ports.damage = damage
    verdicts = world.run(3 * PERIOD_S)
    assert Verdict.WRONG in verdicts
    assert world.canary.distrusted == {"p0"}
    assert "token 0" in world.canary.reasons()[NodeId("p0")]
    world.ports.damage = lambda source, target, kv: kv
    world.run(4 * PERIOD_S)
    assert not world.canary.distrusted


def test_kv_of_an_earlier_canary_is_not_taken_for_right():
    """A path that delivers what it had delivered before answers the prompt before."""
    world = World(far("p0"), near("d0"))
    stale: list[bytes] = []

    def late(source: str, target: str, kv: bytes) -> bytes:
        stale.append(kv)
        return stale[-2] if len(stale) > 1 else kv

    world.ports.damage = late
    assert world.run(3 * PERIOD_S)[:3] == [Verdict.RIGHT, Verdict.WRONG, Verdict.WRONG]
    assert world.canary.distrusted == {"p0"}


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (TransferFailed("a", "checksum"), Verdict.FAILED),
        (EngineFailed("p0", "x"), Verdict.FAILED),
        (Overloaded("room"), Verdict.SKIPPED),
        (DeadlineExceeded("prefill", 1.0), Verdict.SKIPPED),
        (PeerUnavailable("p0", "gone"), Verdict.SKIPPED),
    ],
    ids=lambda value: value.value if isinstance(value, Verdict) else type(value).__name__,
)
def test_what_is_nobodys_fault_is_no_failure(error: Exception, verdict: Verdict):
    """A node that is full, slow or gone is not one that does wrong; load and membership have words of their own."""
    world = World(far("p0"), near("d0"), prefill=[None, error])  # type: ignore[list-item]
    assert world.run(PERIOD_S / 4)[:1] == [verdict]


def test_canaries_are_no_demand_and_use_no_cache():
    """Nobody wanted them; what a cache has would hide what the path does. The right answer is learned once a life."""
    world = World(far("p0"), near("d0"))
    world.run(8 * PERIOD_S)
    asked = world.ports.prefilled
    here = len(asked) - len(world.ports.judgements)
    assert here == len(LESSON.prompts)
    assert {request.tenant for request in asked} == {"prfaas-canary"}


@pytest.mark.parametrize(
    ("other", "lead", "says"),
    [
        ((1, 2, 3), 1.0, ""),
        ((1, 9, 9), 1e-5, ""),
        ((1, 9, 3), 0.2, "token 1 is 9 and not 2"),
        ((1, 2), 1.0, "2 tokens and not 3"),
    ],
)
def test_two_answers_may_part_at_a_tie_and_nowhere_else(other: tuple[int, ...], lead: float, says: str):
    """After a tie both go on in their own way."""
    right = Answer((1, 2, 3), (1.0, lead, 1.0))
    assert right.differs(Answer(other, (1.0,) * len(other))) == says


def test_a_canary_that_is_cancelled_leaves_nothing():
    """The router stops in the middle of one."""
    world = World(far("p0"), near("d0"))
    for _ in range(20):
        world.run(0.02)
    assert len(world.ports.prefilled) > 2, "some of them were cut off"
