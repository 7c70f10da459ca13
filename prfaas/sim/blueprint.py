"""What a scenario describes, in the product's own terms: nodes, what they are made of, the network between them, and
the rule that routers begin with.
"""

from types import MappingProxyType

from prfaas.cluster import SEEDED_DRAWS, Incarnation, LinkState, Namespace, Node, NodeId, NodeKind, RegionId
from prfaas.errors import ConfigError
from prfaas.flows.convert_role import role_of
from prfaas.flows.serve import ServeParams
from prfaas.profile import GBPS
from prfaas.scheduling.rule import Pair, RoutingParams
from prfaas.sim.caches import Caches
from prfaas.sim.cluster import Network, SimCluster
from prfaas.sim.content import BLANK, Content
from prfaas.sim.hardware import profiles_of
from prfaas.sim.instance import Instance
from prfaas.sim.kernel import Kernel
from prfaas.sim.scenario import FleetSpec, Scenario

MODEL = "model"
NAMESPACE = Namespace("sim")


class Blueprint:
    """`names` are those of all nodes, fleet by fleet."""

    def __init__(self, scenario: Scenario, content: Content = BLANK) -> None:
        """Raises ConfigError for hardware that is not known, or does not decode where it has to."""
        self._scenario, self._content = scenario, content
        self._fleets = {
            NodeId(f"{fleet.name}-{number}"): (fleet, number)
            for fleet in scenario.fleets
            for number in range(fleet.nodes)
        }
        self.names = tuple(self._fleets)
        self.pd_region = RegionId(scenario.pd_region)
        hardware = sorted({fleet.hardware for fleet in scenario.fleets})
        self.profiles = profiles_of(hardware, scenario.model, scenario.hardware)
        self.lines: dict[Pair, float] = {
            (RegionId(link.source), RegionId(link.target)): link.gbps * GBPS for link in scenario.links
        }
        self.rtt_s: dict[Pair, float] = {
            (RegionId(link.source), RegionId(link.target)): link.rtt_s for link in scenario.links
        }
        for fleet in scenario.fleets:
            if self.profiles[fleet.hardware].decode is None and self._may_decode(fleet):
                raise ConfigError(f"fleets.{fleet.name}", f"{fleet.hardware} has no profile of decode steps")

    def cluster(self, kernel: Kernel) -> SimCluster:
        scenario = self._scenario
        network = Network(
            hop_s=scenario.hop_s,
            far_hops_s={pair: rtt_s / 2 for pair, rtt_s in self.rtt_s.items()},
            home=self.pd_region,
            fabric_bytes_per_s=scenario.fabric_gbps * GBPS,
            view_lag_s=0.0,
        )
        capacity = {name: fleet.cache_bytes for name, (fleet, _) in self._fleets.items() if fleet.cache_gib > 0}
        caches = Caches(next(iter(self.profiles.values())), capacity)
        cluster = SimCluster(kernel, map(self.node, self.names), self._instance, network, caches=caches)
        for pair, bytes_per_s in self.lines.items():
            cluster.step(*pair, bytes_per_s)
        return cluster

    def node(self, name: NodeId) -> Node:
        """As it is when it starts."""
        fleet, number = self._fleets[name]
        share = fleet.share(number)
        return Node(
            id=name,
            region=RegionId(fleet.region),
            kind=fleet.kind,
            role=role_of(share),
            incarnation=Incarnation(1),
            namespace=NAMESPACE,
            model=MODEL,
            rpc_address=name,
            kv_addresses=MappingProxyType({"": name}),
            max_context_tokens=self._scenario.max_context_tokens,
            hardware=fleet.hardware,
            prefill_share=share if 0 < share < 1 else None,
            capabilities=(SEEDED_DRAWS,),
        )

    def routing(self) -> RoutingParams:
        """Until a control loop says otherwise; the lines are believed to be what they were bought as."""
        policy = self._scenario.policy
        links = {pair: LinkState(*pair, capacity_bytes_per_s=line) for pair, line in self.lines.items()}
        return RoutingParams(
            threshold_tokens=policy.threshold_tokens,
            abundant=policy.abundant,
            mode=policy.mode,
            t_min=policy.t_min,
            t_force=policy.t_force,
            ttft_slo_s=policy.ttft_slo_s,
            profiles=self.profiles,
            links=MappingProxyType(links),
            rtt_s=self.rtt_s,
        )

    def serve_params(self) -> ServeParams:
        """Of one router: a policy that counts does so by itself."""
        spec = self._scenario.serve
        return ServeParams(
            reserve_timeout_s=spec.reserve_timeout_s,
            prefill_timeout_s=spec.prefill_timeout_s,
            prefill_timeout_s_per_token=spec.prefill_timeout_s_per_token,
            first_token_timeout_s=spec.first_token_timeout_s,
            token_gap_timeout_s=spec.token_gap_timeout_s,
            max_attempts=spec.max_attempts,
            max_migrations=spec.max_migrations,
            migration_timeout_s=spec.migration_timeout_s,
            within_objective=spec.within_objective,
            choose=self._scenario.policy.decide(),
        )

    def _may_decode(self, fleet: FleetSpec) -> bool:
        """The slow loop may make any PD node decode."""
        decodes = self._scenario.control.slow or any(fleet.share(number) < 1 for number in range(fleet.nodes))
        return fleet.kind is NodeKind.PD and decodes

    def _instance(self, node: Node) -> Instance:
        fleet, scenario = self._fleets[node.id][0], self._scenario
        return Instance(
            profile=self.profiles[fleet.hardware],
            kv_room_bytes=fleet.kv_room_bytes,
            max_prefill_tokens=fleet.max_prefill_tokens,
            chunk_tokens=fleet.chunk_tokens,
            token_batch=scenario.token_batch,
            step_limit_s=scenario.step_limit_s,
            sharing=fleet.sharing,
            content=self._content,
        )
