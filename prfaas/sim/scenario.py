"""A simulation as data: regions and fleets, links, what arrives, who decides, and what goes wrong. Read from TOML; a
key that nobody knows is an error that names its path.
"""

import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from prfaas.cluster import NodeKind
from prfaas.errors import ConfigError
from prfaas.flows.convert_role import OnDrainTimeout
from prfaas.profile import CASE_STUDY
from prfaas.scheduling.planner import Roles
from prfaas.scheduling.rebalance import RebalanceParams
from prfaas.sim.fault_plan import Fault
from prfaas.sim.hardware import HardwareTable
from prfaas.sim.instance import GIB, TimeSharing
from prfaas.sim.policies import Policy
from prfaas.sim.structs import LONGEST_S, MOST_TOKENS, Lapse, Seconds, Section, Share, Tokens, not_finite
from prfaas.sim.workload import Arrivals, Workload

#: Requests and samples are kept in memory, reports are only sent: a run with more would not reach its end.
MOST_KEPT, MOST_REPORTS = 10_000_000, 100_000_000

Gbps = Annotated[float, Meta(gt=0, le=1e6)]
#: One way or there and back.
Delay = Annotated[float, Meta(ge=0, le=60)]
Gib = Annotated[float, Meta(ge=0, le=1e9)]


class FleetSpec(Section, frozen=True):
    """Equal nodes. `shares`: of each PD node's time for prefill (1 prefills, 0 decodes, between does both); nodes
    beyond the list decode. `cache_gib` 0 keeps no prefixes."""

    name: str
    region: str
    kind: NodeKind
    hardware: str
    nodes: Annotated[int, Meta(ge=1, le=10_000)]
    shares: tuple[Share, ...] = ()
    kv_room_gib: Annotated[float, Meta(gt=0, le=1e9)] = 1000.0
    cache_gib: Gib = 0.0
    #: Tokens that may wait for prefill on a node; more are refused.
    max_prefill_tokens: Annotated[int, Meta(ge=1)] = 1 << 24
    chunk_tokens: Tokens = 2048
    sharing: TimeSharing = TimeSharing.SLICES

    def __post_init__(self) -> None:
        if self.shares and self.kind is NodeKind.PREFILL_WORKER:
            raise ValueError("shares: a prefill worker has none, as all of its time is for prefill")
        if len(self.shares) > self.nodes:
            raise ValueError(f"shares: {len(self.shares)} of {self.nodes} nodes")

    def share(self, node: int) -> float:
        """Of the node with this number."""
        if self.kind is NodeKind.PREFILL_WORKER:
            return 1.0
        return self.shares[node] if node < len(self.shares) else 0.0

    @property
    def kv_room_bytes(self) -> int:
        return int(self.kv_room_gib * GIB)

    @property
    def cache_bytes(self) -> int:
        return int(self.cache_gib * GIB)


class LinkSpec(Section, frozen=True):
    """From one region to another. Control messages take half of `rtt_s` each way."""

    source: str
    target: str
    gbps: Gbps
    rtt_s: Delay = 0.02

    def __post_init__(self) -> None:
        if self.source == self.target:
            raise ValueError(f"target: a link from {self.source} to itself")


class ControlSpec(Section, frozen=True):
    """Which loops run. Without the fast one the policy's threshold and mode hold throughout, without the slow one the
    roles that nodes start with."""

    fast: bool = False
    slow: bool = False
    slow_period_s: Annotated[float, Meta(ge=0.1, le=LONGEST_S)] = 120.0
    roles: Roles = Roles.WHOLE
    converting_share: Annotated[float, Meta(ge=0, le=1)] = 0.25
    dwell_s: Lapse = 120.0
    drain_timeout_s: Seconds = 120.0
    on_drain_timeout: OnDrainTimeout = OnDrainTimeout.ABORT
    #: How long a node takes to change, once it is drained.
    conversion_s: Lapse = 5.0

    def rebalance(self, step_limit_s: float | None) -> RebalanceParams:
        """The slow loop's settings; what is not set here is the product's default."""
        default = RebalanceParams()
        return RebalanceParams(
            roles=self.roles,
            step_limit_s=default.step_limit_s if step_limit_s is None else step_limit_s,
            dwell_s=self.dwell_s,
            converting_share=self.converting_share,
        )


class ServeSpec(Section, frozen=True):
    """Limits of one request. Long by default: an overloaded cluster should show as a queue, not as retries."""

    reserve_timeout_s: Seconds = 30.0
    prefill_timeout_s: Seconds = 3600.0
    prefill_timeout_s_per_token: Lapse = 0.0
    first_token_timeout_s: Seconds = 3600.0
    token_gap_timeout_s: Seconds = 600.0
    max_attempts: Annotated[int, Meta(ge=1, le=1000)] = 3
    max_migrations: Annotated[int, Meta(ge=0, le=1000)] = 3
    migration_timeout_s: Seconds = 600.0
    #: Each router keeps breakers around prefills elsewhere, hedges those that take too long, and gives them up where
    #: that is the last moment to keep the policy's objective without them.
    breakers: bool = False
    hedge: bool = False
    within_objective: bool = False


class Scenario(Section, frozen=True):
    """`warm_up_s` at the start is left out of all figures. Arrivals stop at `duration_s`; then what is in the cluster
    may finish for up to `drain_s`."""

    name: str
    fleets: tuple[FleetSpec, ...]
    workload: Workload
    policy: Policy = Policy()
    links: tuple[LinkSpec, ...] = ()
    control: ControlSpec = ControlSpec()
    serve: ServeSpec = ServeSpec()
    faults: tuple[Fault, ...] = ()
    seed: int = 1
    duration_s: Annotated[float, Meta(gt=0, le=1e7)] = 3600.0
    warm_up_s: Lapse = 300.0
    drain_s: Annotated[float, Meta(ge=0, le=1e7)] = 600.0
    pd_region: str = "b"
    routers: Annotated[int, Meta(ge=1, le=1000)] = 1
    model: str = CASE_STUDY
    #: What the fleets' hardware costs, where no profile of the model ships for it.
    hardware: dict[str, HardwareTable] = {}
    max_context_tokens: Annotated[int, Meta(ge=2, le=MOST_TOKENS)] = 1 << 18
    report_s: Annotated[float, Meta(ge=0.001, le=LONGEST_S)] = 1.0
    sample_s: Annotated[float, Meta(ge=0.001, le=LONGEST_S)] = 10.0
    hop_s: Delay = 0.0005
    fabric_gbps: Gbps = 400.0
    #: The longest decode step that keeps the SLO, 25 ms for 40 tokens/s. A node that also prefills decodes smaller
    #: batches to keep it; None: it does not.
    step_limit_s: Seconds | None = 0.025
    token_batch: Tokens = 256
    #: Where relative paths of traces start: the folder of the scenario's file.
    folder: str = "."

    def __post_init__(self) -> None:
        if self.warm_up_s >= self.duration_s:
            raise ValueError("warm_up_s: not below duration_s")
        self._check_fleets()
        self._check_links()
        self._check_size()
        longest = self.workload.longest_output_tokens
        if longest is not None and longest + 2 > self.max_context_tokens:
            raise ValueError(f"workload.outputs: {longest} tokens do not fit a context of {self.max_context_tokens}")

    def _check_fleets(self) -> None:
        names = [fleet.name for fleet in self.fleets]
        if len(set(names)) != len(names):
            raise ValueError("fleets: two have the same name")
        pd = [fleet for fleet in self.fleets if fleet.kind is NodeKind.PD and fleet.region == self.pd_region]
        if not pd:
            raise ValueError(f"fleets: no PD nodes in {self.pd_region}")
        if not any(fleet.share(number) < 1 for fleet in pd for number in range(fleet.nodes)):
            raise ValueError(f"fleets: none of the PD nodes in {self.pd_region} decodes")

    def _check_links(self) -> None:
        regions = {self.pd_region, *(fleet.region for fleet in self.fleets)}
        seen = set()
        for place, link in enumerate(self.links):
            for end in (link.source, link.target):
                if end not in regions:
                    raise ValueError(f"links[{place}]: nothing is in region {end}")
            if (link.source, link.target) in seen:
                raise ValueError(f"links[{place}]: a second link from {link.source} to {link.target}")
            seen.add((link.source, link.target))
        for fleet in self.fleets:
            if fleet.region != self.pd_region and (fleet.region, self.pd_region) not in seen:
                raise ValueError(f"links: none from {fleet.region}, where {fleet.name} is, to {self.pd_region}")

    def _check_size(self) -> None:
        if self.workload.arrivals is not None:
            requests = self.workload.arrivals.most_per_s * self.duration_s
            if requests > MOST_KEPT:
                raise ValueError(f"workload.arrivals: up to {requests:.3g} requests, more than {MOST_KEPT:,}")
        if (samples := self.duration_s / self.sample_s) > MOST_KEPT:
            raise ValueError(f"sample_s: {samples:.3g} samples, more than {MOST_KEPT:,}")
        if (reports := sum(fleet.nodes for fleet in self.fleets) * self.duration_s / self.report_s) > MOST_REPORTS:
            raise ValueError(f"report_s: {reports:.3g} reports, more than {MOST_REPORTS:,}")

    def at_rate(self, rate_per_s: float) -> "Scenario":
        """The same, with requests drawn at this rate."""
        arrivals = self.workload.arrivals or Arrivals(rate_per_s=rate_per_s)
        arrivals = msgspec.structs.replace(arrivals, rate_per_s=rate_per_s)
        return self.but(workload=msgspec.structs.replace(self.workload, arrivals=arrivals))

    def but(self, **changes: Any) -> "Scenario":
        """The same but for these fields."""
        return msgspec.structs.replace(self, **changes)


def load(path: Path) -> Scenario:
    """Raises ConfigError."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), error.strerror or "unreadable") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"not TOML: {error}") from error
    tree.setdefault("folder", str(path.parent))
    return parse(tree)


def parse(tree: dict[str, Any]) -> Scenario:
    """Raises ConfigError."""
    if (path := not_finite(tree)) is not None:
        raise ConfigError(path, "not a finite number")
    try:
        return msgspec.convert(tree, Scenario)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        raise ConfigError(where.strip("`.") or "scenario", message) from error
