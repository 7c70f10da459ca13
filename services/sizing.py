"""How large a fleet has to be: the smallest one that carries a demand, or what one that is there carries.

The numbers are those of the throughput model that steers a live cluster. A demand is sized to `busy` of what the fleet
sustains, because a queue needs room: at all of it the wait for the first token has no bound.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from prfaas.errors import ConfigError
from prfaas.profile import GBPS
from prfaas.scheduling.evidence import InsufficientData
from prfaas.scheduling.lengths import Lengths
from prfaas.scheduling.planner import RolePlan, Roles, plan
from prfaas.scheduling.throughput import Approximation, CostModel, Fleet, StageCosts

#: Thresholds tried, evenly spaced in the logarithm of the length.
THRESHOLDS = 400
MAX_NODES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """`fleet` says what nodes and link are; its counts matter only where no demand is given. Costs compare one PrfaaS
    instance with one PD node."""

    fleet: Fleet
    lengths: Lengths
    demand_per_s: float | None
    busy: float
    roles: Roles
    approximation: Approximation
    prfaas_cost: float = 1.0
    pd_cost: float = 1.0


@dataclass(frozen=True, slots=True)
class Sized:
    fleet: Fleet
    plan: RolePlan
    wanted: Wanted

    @property
    def needed_gbps(self) -> float:
        """What crosses at the demand, or at full load where none is given."""
        rates = self.plan.throughput
        at = rates.lambda_max if self.wanted.demand_per_s is None else self.wanted.demand_per_s
        return at * rates.costs.offloaded_share * rates.costs.remote_bytes / GBPS

    @property
    def peak_gbps(self) -> float:
        """Equation 2: all PrfaaS instances busy with the requests that go to them."""
        costs = self.plan.throughput.costs
        if not costs.offloaded_share or not self.fleet.n_prfaas:
            return 0.0
        return self.fleet.n_prfaas * costs.remote_bytes / costs.remote_s / GBPS

    @property
    def line_gbps(self) -> float:
        """A line that is never more than `busy` full."""
        return self.peak_gbps / self.wanted.busy

    @property
    def carries(self) -> bool | None:
        """None without a demand."""
        if self.wanted.demand_per_s is None:
            return None
        return self.wanted.demand_per_s <= self.plan.throughput.lambda_max * self.wanted.busy * (1 + 1e-9)

    def described(self) -> dict[str, Any]:
        found, rates, costs = self.plan, self.plan.throughput, self.plan.throughput.costs
        mixed = found.mixed
        demand = self.wanted.demand_per_s
        return {
            "threshold_tokens": found.threshold_tokens,
            "prfaas_nodes": self.fleet.n_prfaas,
            "pd_nodes": self.fleet.n_pd,
            "pd_prefill_nodes": found.n_p,
            "pd_decode_nodes": found.n_d,
            "pd_mixed_nodes": 0 if mixed is None else 1,
            "mixed_prefill_share": None if mixed is None else mixed.prefill_share,
            "mixed_decode_batch": None if mixed is None else mixed.decode_batch,
            "decode_batch": self.fleet.decode_batch,
            "throughput_per_s": rates.lambda_max,
            "limited_by": rates.binding.value,
            "theta_prfaas_per_s": rates.theta_prfaas,
            "theta_pdp_per_s": rates.theta_pdp,
            "theta_pdd_per_s": rates.theta_pdd,
            "offloaded_share": costs.offloaded_share,
            "mean_tokens": self.wanted.lengths.mean(),
            "remote_tokens": costs.remote_tokens if costs.offloaded_share > 0 else None,
            "local_tokens": costs.local_tokens if costs.offloaded_share < 1 else None,
            "output_tokens": self.fleet.output_tokens,
            "demand_per_s": demand,
            "carries_demand": self.carries,
            "busy_ratio": None if demand is None else demand / rates.lambda_max if rates.lambda_max else None,
            "link_gbps": None if self.fleet.link_bytes_per_s is None else self.fleet.link_bytes_per_s / GBPS,
            "egress_gbps": self.needed_gbps,
            "egress_full_load_gbps": rates.egress_bytes_per_s / GBPS,
            "egress_peak_gbps": self.peak_gbps,
            "recommended_line_gbps": self.line_gbps,
            "cost": self.fleet.n_prfaas * self.wanted.prfaas_cost + self.fleet.n_pd * self.wanted.pd_cost,
        }


def of_fleet(wanted: Wanted) -> Sized:
    """The best threshold and roles of a fleet that is given."""
    found = plan(wanted.fleet, wanted.lengths, wanted.roles, wanted.approximation)
    if isinstance(found, InsufficientData):
        raise ConfigError("plan", f"not enough {found.what}: {found.have:g} of {found.needed:g}")
    return Sized(wanted.fleet, found, wanted)


def for_demand(wanted: Wanted) -> Sized:
    """The cheapest fleet that carries the demand; of equally cheap ones that with the most room."""
    assert wanted.demand_per_s is not None
    rate = wanted.demand_per_s / wanted.busy
    model = CostModel.of(wanted.fleet, wanted.lengths, wanted.approximation)
    candidates = {
        (n_prfaas, n_pd)
        for t in _thresholds(wanted.lengths)
        for n_prfaas, n_pd in _counts(wanted.fleet, model.at(t), rate)
    }
    if not candidates:
        raise ConfigError("plan", "no number of nodes carries this demand over this link")

    def cost(counts: tuple[int, int]) -> float:
        return counts[0] * wanted.prfaas_cost + counts[1] * wanted.pd_cost

    # A node that shares its time may spare one of those that whole roles need.
    if wanted.roles is not Roles.WHOLE:
        candidates |= {(n_prfaas, n_pd - 1) for n_prfaas, n_pd in candidates if n_pd > 1}
    best: Sized | None = None
    for n_prfaas, n_pd in sorted(candidates, key=lambda counts: (cost(counts), counts)):
        if best is not None and cost((n_prfaas, n_pd)) > cost((best.fleet.n_prfaas, best.fleet.n_pd)) + 1e-9:
            break
        sized = of_fleet(replace(wanted, fleet=replace(wanted.fleet, n_prfaas=n_prfaas, n_pd=n_pd)))
        better = best is None or sized.plan.throughput.lambda_max > best.plan.throughput.lambda_max
        if sized.carries and better:
            best = sized
    if best is None:
        raise ConfigError("plan", "no number of nodes carries this demand over this link")
    return best


def _counts(fleet: Fleet, costs: StageCosts, rate: float) -> Iterator[tuple[int, int]]:
    """The nodes that this threshold needs, with whole roles; none where the link does not carry it."""
    p = costs.offloaded_share
    if fleet.link_bytes_per_s is not None and rate * p * costs.remote_bytes > fleet.link_bytes_per_s * (1 + 1e-9):
        return
    n_prfaas = _whole(rate * p * costs.remote_s) if p > 0 else 0
    n_p = _whole(rate * (1 - p) * costs.local_s) if p < 1 else 0
    yield n_prfaas, n_p + max(1, _whole(rate / fleet.decode_requests_per_s))


def _whole(nodes: float) -> int:
    if not nodes < MAX_NODES:
        raise ConfigError("plan", f"this demand needs {nodes:.3g} nodes for one stage alone")
    return math.ceil(nodes - 1e-9)


def _thresholds(lengths: Lengths) -> list[int]:
    low, high = max(1.0, lengths.shortest_tokens), max(1.0, lengths.longest_tokens)
    steps = (round(low * (high / low) ** (step / THRESHOLDS)) for step in range(THRESHOLDS))
    return sorted({0, *steps, math.ceil(lengths.longest_tokens)})
