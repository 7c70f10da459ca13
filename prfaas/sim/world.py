"""A scenario brought to life: nodes, lines, store and routers in virtual time, and clients that come and read.

Everything that decides is the product's own code. What is simulated is time, machines and lines.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import takewhile
from math import isnan
from pathlib import Path

from prfaas.cluster import NodeId, NodeKind
from prfaas.errors import PrfaasError
from prfaas.flows.control import ControlParams, fast_loop, slow_loop
from prfaas.flows.convert_role import Assignment, ConvertParams, Phase, Standing, follow_plans
from prfaas.flows.serve import serve
from prfaas.flows.story import Story
from prfaas.request import TOKEN_BYTES, Request, RequestId, Sampling
from prfaas.scheduling.breaker import BreakerParams
from prfaas.scheduling.breakers import Breakers
from prfaas.scheduling.congestion import LinkEstimator, LinkParams
from prfaas.scheduling.demand import DemandSnapshot
from prfaas.scheduling.hedging import HedgeParams, Hedging
from prfaas.scheduling.rebalance import Rebalancer
from prfaas.scheduling.threshold import ThresholdController, ThresholdParams
from prfaas.sim.blueprint import MODEL, Blueprint
from prfaas.sim.content import BLANK, Content
from prfaas.sim.control_ports import SimControlPorts
from prfaas.sim.kernel import Kernel
from prfaas.sim.mishaps import schedule
from prfaas.sim.records import Observed, Records
from prfaas.sim.replay import replayed
from prfaas.sim.reporter import Reporter
from prfaas.sim.role_ports import PlanBoard, SimRolePorts
from prfaas.sim.router import RouterPorts, SimRouter
from prfaas.sim.scenario import Scenario
from prfaas.sim.series import Series
from prfaas.sim.store import SimStore
from prfaas.sim.workload import Arrival, drawn

STORE_NAME = "sim"
#: Of a run, for those who wait for it.
PARTS = 100


class World:
    def __init__(self, scenario: Scenario, content: Content = BLANK) -> None:
        self.scenario, self.store_name = scenario, STORE_NAME
        self.kernel = Kernel(f"{scenario.seed}/world")
        self.records = Records()
        self.in_system = 0
        #: Numbers of the routers that believe that they lead.
        self.leaders, self._leader = {0}, 0
        self.blueprint = Blueprint(scenario, content)
        self.cluster = self.blueprint.cluster(self.kernel)
        self.store = SimStore(self.kernel, scenario.hop_s)
        self.reporters = {name: self._report(name, place) for place, name in enumerate(self.blueprint.names)}
        self.routers = [self._router(number) for number in range(scenario.routers)]
        self.board = PlanBoard(STORE_NAME)
        for watcher in (*(router.told for router in self.routers), self.board.told):
            self.store.watch(watcher)
        self.control = [self._steer(number) for number in range(scenario.routers)]
        self.roles = list(filter(None, map(self._follow_plans, self.blueprint.names)))
        self.ports = [RouterPorts(router) for router in self.routers]
        self.serve_params = [self.blueprint.serve_params() for _ in self.routers]
        self.series = Series(self)
        self.kernel.call_later(scenario.warm_up_s, self.cluster.step_times.clear)
        schedule(self)

    def play(self, told: Callable[[int], None] = lambda part: None) -> None:
        """All of it: arrivals, and then what is still there. `told` hears of each of PARTS parts of the arrivals."""
        scenario = self.scenario
        # The store's first word reaches the routers before anybody comes.
        self.kernel.run_until(2 * scenario.hop_s)
        self._come(iter(enumerate(self.arrivals())))
        for part in range(1, PARTS + 1):
            self.kernel.run_until(scenario.duration_s * part / PARTS)
            told(part)
        limit_s = scenario.duration_s + scenario.drain_s
        while self.in_system and self.kernel.now() < limit_s:
            self.kernel.run_until(min(limit_s, self.kernel.now() + 1.0))

    @property
    def flips(self) -> int:
        """Roles that nodes have changed."""
        return sum(ports.changes for ports in self.roles)

    def restart(self, name: NodeId) -> None:
        """A new life of a dead node, with the role that it started with."""
        self.cluster.restart(name, self.blueprint.node(name))
        self.reporters[name] = self._report(name, 0)
        if (roles := self._follow_plans(name)) is not None:
            self.roles.append(roles)

    def lead(self, number: int, stale_s: float) -> None:
        """This router leads now; others that did believe so for a while longer."""
        for other in self.leaders - {number}:
            self.kernel.call_later(stale_s, partial(self._step_down, other))
        self.leaders.add(number)
        self._leader = number

    def _step_down(self, number: int) -> None:
        if number != self._leader:
            self.leaders.discard(number)

    def check(self) -> None:
        self.cluster.check()
        for router in self.routers:
            router.fold.check()
            router.overlay.check()
            if router.breakers is not None:
                router.breakers.check()
            if router.hedging is not None:
                router.hedging.check()

    def arrivals(self) -> Iterator[Arrival]:
        scenario = self.scenario
        if (trace := scenario.workload.trace) is not None:
            found = iter(replayed(trace, Path(scenario.folder), scenario.seed, scenario.max_context_tokens))
        else:
            found = drawn(scenario.workload, scenario.seed, scenario.max_context_tokens)
        return takewhile(lambda arrival: arrival.at_s < scenario.duration_s, found)

    def _come(self, arrivals: Iterator[tuple[int, Arrival]]) -> None:
        """Wait for the next client, and let it in."""
        following = next(arrivals, None)
        if following is None:
            return
        number, arrival = following

        def arrive() -> None:
            self.kernel.spawn(self.client(number, arrival), f"client {number}")
            self._come(arrivals)

        self.kernel.call_later(arrival.at_s - self.kernel.now(), arrive)

    async def client(self, number: int, arrival: Arrival) -> None:
        """One request from its arrival to its end."""
        request = Request(
            id=RequestId(f"{self.scenario.seed}-{number}"),
            model=MODEL,
            prompt=bytes(TOKEN_BYTES * arrival.prompt_tokens),
            sampling=Sampling(max_tokens=arrival.output_tokens),
        )
        router = number % len(self.routers)
        seen = Observed(arrival, Story())
        self.records.requests.append(seen)
        self.in_system += 1
        caches = self.cluster.caches
        caches.arrive(request.id, arrival.keys)
        stream = serve(request, caches.matches(request), self.serve_params[router], self.ports[router], seen.story)
        try:
            async for _ in stream:
                if isnan(seen.first_s):
                    seen.first_s = self.kernel.now()
            seen.finished_s = self.kernel.now()
            self.routers[router].demand.finished(seen.story.output_tokens, self.kernel.now())
        except PrfaasError as error:
            seen.error = error
        finally:
            self.in_system -= 1
            caches.leave(request.id)

    def _report(self, name: NodeId, place: int) -> Reporter:
        """Nodes report one after the other, spread over the period."""
        offset_s = self.scenario.report_s * (1 + place / len(self.blueprint.names))
        worker = self.cluster.workers[name]
        return Reporter(self.cluster, self.store, STORE_NAME, worker, self.scenario.report_s, offset_s)

    def _router(self, number: int) -> SimRouter:
        blueprint = self.blueprint
        serve = self.scenario.serve
        return SimRouter(
            f"router-{number}",
            STORE_NAME,
            self.cluster,
            blueprint.pd_region,
            blueprint.routing(),
            breakers=Breakers(BreakerParams()) if serve.breakers else None,
            hedging=Hedging(HedgeParams()) if serve.hedge else None,
        )

    def _steer(self, number: int) -> SimControlPorts:
        """Start the loops of a router. Whoever leads does so while there is a store to lead by."""
        control, router = self.scenario.control, self.routers[number]
        ports = SimControlPorts(
            self.kernel,
            router,
            self.store,
            STORE_NAME,
            demand=lambda: DemandSnapshot.merged(each.demand.snapshot(self.kernel.now()) for each in self.routers),
            leads=lambda: number in self.leaders and self.store.up,
        )
        links = LinkEstimator(LinkParams(line_bytes_per_s=self.blueprint.lines))
        params = ControlParams(
            model=MODEL,
            pd_region=self.blueprint.pd_region,
            threshold_tokens=self.scenario.policy.threshold_tokens,
            report_s=self.scenario.report_s,
            slow_period_s=control.slow_period_s,
        )
        if control.fast:
            policy = self.scenario.policy
            limits = ThresholdParams(mode=policy.mode, t_min=policy.t_min, t_force=policy.t_force)
            fast = fast_loop(ports, links, ThresholdController(limits), params)
            self.kernel.spawn(fast, f"fast loop of {router.name}")
        if control.slow:
            slow = slow_loop(ports, links, Rebalancer(control.rebalance(self.scenario.step_limit_s)), params)
            self.kernel.spawn(slow, f"slow loop of {router.name}")
        return ports

    def _follow_plans(self, name: NodeId) -> SimRolePorts | None:
        """Let this life of a PD node take the roles that plans give it."""
        worker, control = self.cluster.workers[name], self.scenario.control
        if not control.slow or worker.node.kind is not NodeKind.PD:
            return None
        ports = SimRolePorts(self.kernel, worker, self.reporters[name], self.board, control.conversion_s)
        start = Assignment(worker.node.share)
        params = ConvertParams(drain_timeout_s=control.drain_timeout_s, on_drain_timeout=control.on_drain_timeout)
        ports.stand(Standing(start, Phase.SERVING, start.role))
        following = self.kernel.spawn(follow_plans(ports, start, params), f"role of {name}")
        worker.when_dead(following.cancel)
        return ports
