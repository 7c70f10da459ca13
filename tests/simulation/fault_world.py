"""A small cluster of everything, what is done to it, and its clients; all drawn from one seed.

Routers with their control loops, breakers and hedges, nodes that follow plans, a store, a line between two regions.
Until `HEALED_S` faults happen; then all is well again, and whatever was begun has to come to its end. Meanwhile nothing
may break: `Safety` looks again and again.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from prfaas.cluster import NodeId, NodeKind, Plan
from prfaas.errors import PrfaasError
from prfaas.flows.convert_role import OnDrainTimeout, Phase
from prfaas.flows.serve import ServeParams, serve
from prfaas.flows.story import Ending, Story
from prfaas.membership.plans import PlanRecord, plan_key, read
from prfaas.membership.store import Batch, Entry, Put, Resync
from prfaas.request import TOKEN_BYTES, Request, RequestId, Sampling
from prfaas.sim.blueprint import MODEL
from prfaas.sim.content import DigestContent
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
from prfaas.sim.hardware import DecodeTable, HardwareTable
from prfaas.sim.instance import GIB
from prfaas.sim.policies import Policy
from prfaas.sim.scenario import ControlSpec, FleetSpec, LinkSpec, Scenario, ServeSpec
from prfaas.sim.serve_ports import SimServePorts
from prfaas.sim.task import Cancelled
from prfaas.sim.workload import Arrival, Arrivals, Fixed, Workload
from prfaas.sim.world import World
from tests.right_answers import expected_output

REQUESTS = 50
#: Of these, so many come when all is well again.
LATE_REQUESTS = 4
#: When the first fault may happen, and when all are over; when the last of the other requests comes.
BEGINS_S, HEALED_S, ARRIVED_S = 1.0, 11.0, 13.0
LAST_PLAN_S = 8.0
#: Longer than any request can take with all its attempts; whoever is not done by then never will be.
ENDED_S = 150.0
#: Leases that end, nodes that are kept in doubt and drains that come to nothing are over by then.
CONVERGED_S = 90.0
LINE_GBPS = 0.008
#: Around the threshold, and others.
PROMPT_TOKENS, OUTPUT_TOKENS = (1, 2, 64, 299, 300, 301, 700, 1500), (1, 2, 5, 20, 60)
FAR, NEAR = "a", "b"


@dataclass
class Client:
    """What one client sent and saw."""

    request: Request
    story: Story = field(default_factory=Story)
    received: bytes = b""
    error: PrfaasError | None = None
    left: bool = False
    ended: bool = False

    async def read(self, params: ServeParams, ports: SimServePorts, chance: random.Random) -> None:
        """Some are slow, and some go after a few tokens."""
        slow, batches = chance.random() < 0.1, 0
        leaves_after = chance.randint(1, 4) if chance.random() < 0.1 else None
        stream = serve(self.request, await ports.matches(self.request), params, ports, self.story)
        try:
            async for batch in stream:
                self.received += batch.tokens
                batches += 1
                if batches == leaves_after:
                    self.left = True
                    break
                if slow:
                    await ports.sleep(chance.uniform(0.0, 0.3))
        except PrfaasError as error:
            self.error = error
        except Cancelled:
            self.left = True
            raise
        finally:
            await stream.aclose()
            self.ended = True

    def check(self, params: ServeParams) -> None:
        """All tokens, or an error, or gone; in any case the right tokens in the right order."""
        expected, story = expected_output(self.request), self.story
        assert self.ended, "a request hangs"
        assert expected.startswith(self.received), "tokens are wrong, lost or repeated"
        assert self.error is not None or self.left or self.received == expected, "a request ended without a word"
        assert all(attempt.ending is not Ending.RUNNING for attempt in story.attempts)
        assert story.moves <= params.max_migrations
        assert story.output_tokens * TOKEN_BYTES == len(self.received), "tokens are counted that nobody got"
        assert not story.generated, "tokens of a request that has ended are still kept"


class Safety:
    """What must hold at any moment, whatever goes wrong."""

    def __init__(self, world: "FaultWorld") -> None:
        self._world, self._plan_key = world, plan_key(world.store_name)
        self._node_epochs: dict[tuple[str, str], int] = {}
        self._router_plans: dict[str, PlanRecord | None] = {}
        self._stored_epoch = 0

    def told(self, events: Batch) -> None:
        """The store: a plan is followed by a later one only, as long as the store keeps what it has."""
        for event in events:
            match event:
                case Resync(snapshot):
                    stored = [entry for entry in snapshot.entries if entry.key == self._plan_key]
                    self._stored_epoch = max((_epoch(entry) for entry in stored), default=0)
                case Put(entry) if entry.key == self._plan_key:
                    assert _epoch(entry) > self._stored_epoch, "a plan took the place of a later one"
                    self._stored_epoch = _epoch(entry)

    def check(self) -> None:
        """Nothing is held twice or by nobody, and epochs only rise: of each life of a node, and of each router's plan
        as long as it has one."""
        self._world.check()
        for name, reporter in self._world.reporters.items():
            record = reporter.record
            life = name, record.incarnation
            assert record.epoch >= self._node_epochs.get(life, 0), f"{name} follows an older plan"
            self._node_epochs[life] = record.epoch
        for router in self._world.routers:
            plan, before = router.fold.direction.plan, self._router_plans.get(router.name)
            assert plan is None or before is None or plan.epoch >= before.epoch, f"{router.name} follows an older plan"
            self._router_plans[router.name] = plan


def _epoch(entry: Entry) -> int:
    record = read(PlanRecord, entry.value)
    assert record is not None
    return record.epoch


class FaultWorld(World):
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(f"{seed}/faults")
        super().__init__(scenario(seed, self.chance), DigestContent())
        self.clients: list[Client] = []
        self.safety = Safety(self)
        self.store.watch(self.safety.told)
        for number in range(len(self.routers)):
            self.kernel.spawn(self._plan(number), f"plans of router-{number}")

    @property
    def injected(self) -> tuple[Fault, ...]:
        """Faults, without what ends them."""
        return tuple(fault for fault in self.scenario.faults if fault.at_s < HEALED_S)

    def run(self) -> None:
        """First nothing may break; then the faults stop, everything ends, and whoever comes is served."""
        self.play(lambda part: None if part % 4 else self.safety.check())
        assert not self.in_system, "a request hangs"
        self._converge()
        for number in range(LATE_REQUESTS):
            arrival = Arrival(self.kernel.now(), self._prompt_tokens(), self.chance.choice(OUTPUT_TOKENS))
            self.kernel.run(self.client(REQUESTS - LATE_REQUESTS + number, arrival))
            late = self.clients[-1]
            assert late.left or late.error is None, f"all is well, and yet: {late.error}"
        self.kernel.run_until(self.kernel.now() + 15.0)
        self._check_ended()

    def arrivals(self) -> Iterator[Arrival]:
        times = sorted(self.chance.uniform(0.0, ARRIVED_S) for _ in range(REQUESTS - LATE_REQUESTS))
        return iter([Arrival(at_s, self._prompt_tokens(), self.chance.choice(OUTPUT_TOKENS)) for at_s in times])

    async def client(self, number: int, arrival: Arrival) -> None:
        """It may lose patience at any time."""
        chance = random.Random(f"{self.scenario.seed}/client {number}")
        request = Request(
            id=RequestId(f"{self.scenario.seed}-{number}"),
            model=MODEL,
            prompt=chance.randbytes(TOKEN_BYTES * arrival.prompt_tokens),
            sampling=Sampling(
                max_tokens=arrival.output_tokens, temperature=chance.choice([0.0, 0.8]), seed=chance.getrandbits(64)
            ),
        )
        router, client = number % len(self.routers), Client(request)
        self.clients.append(client)
        self.in_system += 1
        reading = self.kernel.spawn(
            client.read(self.serve_params[router], self.ports[router], chance), f"client {number} reads"
        )
        if chance.random() < 0.1:
            self.kernel.call_later(chance.uniform(0.001, 3.0), reading.cancel)
        if chance.random() < 0.1:
            reading.cancel_at_wait = chance.randint(1, 20)
        try:
            await reading
        except Cancelled:
            client.left = client.ended = True
        finally:
            self.in_system -= 1

    def _prompt_tokens(self) -> int:
        return self.chance.choice(PROMPT_TOKENS)

    async def _plan(self, number: int) -> None:
        """While a router believes that it leads, it wants nodes to be something else now and then. Not so near the end
        of the faults that a plan would always follow one that was lost: the slow loop has to see to that."""
        chance = random.Random(f"{self.scenario.seed}/plans of {number}")
        while True:
            await self.kernel.sleep(chance.uniform(0.5, 3.0))
            if self.kernel.now() > LAST_PLAN_S:
                return
            if number in self.leaders:
                await self._publish(number, chance)

    async def _publish(self, number: int, chance: random.Random) -> None:
        view = self.routers[number].fold.view(self.kernel.now())
        pd = sorted(name for name, node in view.nodes.items() if node.kind is NodeKind.PD)
        shares = {name: chance.choice([0.0, 0.0, 0.5, 1.0]) for name in pd} | {NodeId("pd-0"): 0.0}
        await self.control[number].publish(Plan(view.highest_epoch + 1, 300, shares, "drawn"))

    def _converge(self) -> None:
        """Everybody comes to see the same, and it is so."""
        limit_s, wrong = self.kernel.now() + CONVERGED_S, self._not_converged()
        while wrong is not None and self.kernel.now() < limit_s:
            self.kernel.run_until(self.kernel.now() + 1.0)
            self.safety.check()
            wrong = self._not_converged()
        assert wrong is None, wrong

    def _not_converged(self) -> str | None:
        plan = self.board.plan
        for router in self.routers:
            view = router.view()
            for name, worker in self.cluster.workers.items():
                node = view.nodes.get(name)
                if node is None or node.incarnation != worker.node.incarnation or node.share != worker.node.share:
                    return f"{router.name} does not know {name} as it is"
                if node.load.draining or node.busy[0] or node.busy[1]:
                    return f"{router.name} sees work on {name}, which has none"
            if view.plan != plan or router.fold.direction.plan_lost:
                return f"{router.name} follows another plan"
        for name, reporter in self.reporters.items():
            record = reporter.record
            if not record.accepting or record.phase != Phase.SERVING.value:
                return f"{name} is still {record.phase}"
            if plan is not None and self.cluster.workers[name].node.kind is NodeKind.PD and record.epoch != plan.epoch:
                return f"{name} does not follow the plan"
        return None

    def _check_ended(self) -> None:
        self.safety.check()
        self.cluster.check_idle()
        assert len(self.clients) == REQUESTS
        for number, client in enumerate(self.clients):
            client.check(self.serve_params[number % len(self.routers)])
        for router in self.routers:
            if router.breakers is not None:
                assert not any(taken for _, taken, _ in router.breakers.in_flight()), "breakers count what has ended"
            assert router.view() is router.fold.view(self.kernel.now()), "own work counts that has ended"


def scenario(seed: int, chance: random.Random) -> Scenario:
    far_nodes, pd_nodes, routers = chance.randint(1, 3), chance.randint(2, 4), chance.randint(1, 3)
    room_gib = chance.choice([0.4, 0.8, 4.0]) * 1e6 / GIB
    far = FleetSpec(
        name="far", region=FAR, kind=NodeKind.PREFILL_WORKER, hardware="small", nodes=far_nodes, kv_room_gib=room_gib
    )
    shares = (0.0, *chance.choices([0.0, 0.5, 1.0], k=pd_nodes - 1))
    near = FleetSpec(
        name="pd", region=NEAR, kind=NodeKind.PD, hardware="small", nodes=pd_nodes, shares=shares, kv_room_gib=room_gib
    )
    small = HardwareTable(
        tokens=(1, 2000),
        prefill_s=(0.0005, 1.0),
        kv_bytes=(20_100, 220_000),
        decode=DecodeTable(base_s=0.02, per_sequence_s=0.0, max_batch=chance.randint(1, 4)),
    )
    names = [f"far-{number}" for number in range(far_nodes)] + [f"pd-{number}" for number in range(pd_nodes)]
    return Scenario(
        name=f"seed {seed}",
        seed=seed,
        fleets=(far, near),
        links=(LinkSpec(source=FAR, target=NEAR, gbps=LINE_GBPS, rtt_s=0.04),),
        workload=Workload(arrivals=Arrivals(rate_per_s=REQUESTS / ARRIVED_S), outputs=Fixed(tokens=max(OUTPUT_TOKENS))),
        policy=Policy(threshold_tokens=300, ttft_slo_s=chance.choice([None, 2.0])),
        hardware={"small": small},
        control=ControlSpec(
            fast=chance.random() < 0.5,
            slow=True,
            slow_period_s=30.0,
            drain_timeout_s=2.0,
            on_drain_timeout=chance.choice(list(OnDrainTimeout)),
            conversion_s=0.2,
        ),
        serve=ServeSpec(
            reserve_timeout_s=0.5,
            prefill_timeout_s=3.0,
            prefill_timeout_s_per_token=0.005,
            first_token_timeout_s=2.0,
            token_gap_timeout_s=1.0,
            migration_timeout_s=5.0,
            breakers=chance.random() < 0.5,
            hedge=chance.random() < 0.5,
            within_objective=chance.random() < 0.5,
        ),
        faults=tuple(_faults(seed, names, routers, chance)),
        duration_s=ARRIVED_S + 1.0,
        warm_up_s=0.0,
        drain_s=ENDED_S,
        routers=routers,
        step_limit_s=None,
        token_batch=chance.randint(1, 3),
        max_context_tokens=4096,
    )


def faults_of(seed: int) -> int:
    return 1 + seed % 4


def _faults(seed: int, names: list[str], routers: int, chance: random.Random) -> Iterator[Fault]:
    """They often overlap. Then comes what ends them."""
    ordinary = faults_of(seed)
    if ordinary > 3 and routers > 1 and chance.random() < 0.5:
        yield from _deposed(routers, chance)
        ordinary -= 3
    for _ in range(ordinary):
        yield _fault(chance.uniform(BEGINS_S, HEALED_S - 1.0), names, routers, chance)
    yield Chances(at_s=HEALED_S)
    yield LinkStep(at_s=HEALED_S, source=FAR, target=NEAR, gbps=LINE_GBPS)
    for name in names:
        yield SlowPrefill(at_s=HEALED_S, node=name, factor=1.0)


def _deposed(routers: int, chance: random.Random) -> Iterator[Fault]:
    """A leader that hears nothing and believes that it leads, while another one does; then the store forgets what that
    one has said."""
    leader, at_s = chance.randrange(1, routers), chance.uniform(BEGINS_S + 1.0, 4.0)
    yield BrokenWatch(at_s=at_s, router=0, for_s=HEALED_S - at_s)
    yield LeaderChange(at_s=at_s, router=leader, stale_s=HEALED_S - at_s)
    yield StoreOutage(at_s=at_s + chance.uniform(2.0, 5.0), for_s=0.1, empty=True)


def _fault(at_s: float, names: list[str], routers: int, chance: random.Random) -> Fault:
    lasts_s = min(chance.choice([0.05, 0.5, 2.0, 5.0]) * chance.uniform(0.5, 1.5), HEALED_S - at_s)
    node, router, some = chance.choice(names), chance.randrange(routers), (0.0, 0.02, 0.2)
    return chance.choice(
        (
            NodeDeath(at_s=at_s, node=node, down_s=lasts_s),
            Freeze(at_s=at_s, node=node, for_s=lasts_s),
            SlowPrefill(at_s=at_s, node=node, factor=chance.choice([3.0, 30.0, 1e6])),
            LinkStep(at_s=at_s, source=FAR, target=NEAR, gbps=LINE_GBPS * chance.choice([0.0, 0.0, 0.03])),
            Replacement(at_s=at_s, node=node, drain_s=lasts_s, down_s=chance.uniform(0.05, 1.0)),
            LeaderChange(at_s=at_s, router=router, stale_s=lasts_s),
            BrokenWatch(at_s=at_s, router=router, for_s=lasts_s),
            Repetition(at_s=at_s, router=router, changes=chance.randint(1, 60)),
            StoreOutage(at_s=at_s, for_s=lasts_s, empty=chance.random() < 0.5),
            Chances(
                at_s=at_s,
                refuse=chance.choice(some),
                lose=chance.choice(some) / 4,
                transfer=chance.choice(some),
                engine=chance.choice(some),
            ),
        )
    )
