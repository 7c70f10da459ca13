"""The paper's throughput model: what a fleet sustains at a threshold and a split of its PD nodes (equations 1 to 8).

Requests longer than t (uncached tokens) are prefilled by PrfaaS instances and cross the link; the others are prefilled
by PD nodes; all are decoded by PD nodes. Each stage gets a share of the arrivals, and the stage that is full first is
the limit. N_p and N_d may be fractions: a mixed node counts for the part of a whole node that it does.

    Phi_kv(l)  = S_kv(l) / T_prefill(l)                                     (1)  Profile.phi_bytes_per_s
    B_out     ~= N_prfaas * Phi_kv(L_avg)                                   (2)  egress_needed_bytes_per_s
    Th_prfaas  = min( N_prfaas / T_prefill(long),  B_out / S_kv(long) )     (3)
    Th_pdp     = N_p / T_prefill_pd(short)                                  (4)
    Th_pdd     = N_d * BS_max / (T_decode * L_out)                          (5)
    Lambda_max = min( Th_prfaas / p,  Th_pdp / (1 - p),  Th_pdd )           (6)
    optimum:   Th_prfaas / p = Th_pdp / (1 - p)   (7)    Th_prfaas + Th_pdp = Th_pdd   (8)   planner.plan
"""

import math
from dataclasses import dataclass
from enum import Enum

from prfaas.profile import DecodeProfile, Profile
from prfaas.scheduling.lengths import Integral, Lengths


class Approximation(Enum):
    """MEAN puts the mean length into the curves, as the paper does. INTEGRAL averages the curves over the requests,
    which a queue feels: with a convex T the mean length makes a stage look faster than it is."""

    MEAN = "mean"
    INTEGRAL = "integral"


class Binding(Enum):
    """What is full first."""

    PRFAAS = "prfaas"
    LINK = "link"
    PD_PREFILL = "pd_prefill"
    PD_DECODE = "pd_decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What does not change while roles do. `prfaas` is not used where there are no PrfaaS instances.

    `link_bytes_per_s` None means a link that was built for the fleet, by equation 2. `step_limit_s` is the longest
    decode step that the SLO allows: 25 ms for 40 tokens/s.
    """

    n_prfaas: int
    n_pd: int
    prfaas: Profile
    pd: Profile
    link_bytes_per_s: float | None
    output_tokens: float
    step_limit_s: float

    def __post_init__(self) -> None:
        if self.n_prfaas < 0 or self.n_pd < 0:
            raise ValueError("a fleet has no fewer than 0 nodes")
        if not (0 < self.output_tokens < math.inf and 0 < self.step_limit_s < math.inf):
            raise ValueError("output tokens and step limit are above 0")
        if self.pd.decode is None:
            raise ValueError(f"{self.pd.model} on {self.pd.hardware} has no decode profile")

    @property
    def decode(self) -> DecodeProfile:
        assert self.pd.decode is not None
        return self.pd.decode

    @property
    def decode_batch(self) -> int:
        """BS_max within the SLO. A limit that not even one sequence meets is missed rather than nothing served."""
        return max(1, self.decode.batch_within(self.step_limit_s))

    @property
    def decode_requests_per_s(self) -> float:
        """What one PD node decodes that does nothing else."""
        return self.decode_batch / (self.decode.step_s(self.decode_batch) * self.output_tokens)


@dataclass(frozen=True, slots=True)
class StageCosts:
    """At one threshold: the share p that is sent away, and what a request of either kind costs on average."""

    threshold_tokens: float
    offloaded_share: float
    remote_tokens: float
    remote_s: float
    remote_bytes: float
    local_tokens: float
    local_s: float


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rates in requests/s. A stage that no request goes through has throughput 0 here and does not bind.

    `egress_bytes_per_s` is what the link carries at `lambda_max`.
    """

    theta_prfaas: float
    theta_pdp: float
    theta_pdd: float
    lambda_max: float
    binding: Binding
    egress_bytes_per_s: float
    costs: StageCosts


@dataclass(frozen=True, slots=True)
class CostModel:
    """The costs of a fleet's two ways of prefill at any threshold, prepared once for one distribution."""

    lengths: Lengths
    tokens: Integral
    remote_s: Integral
    remote_bytes: Integral
    local_s: Integral
    approximation: Approximation

    @classmethod
    def of(cls, fleet: Fleet, lengths: Lengths, approximation: Approximation) -> "CostModel":
        return cls(
            lengths=lengths,
            tokens=lengths.integrated(lambda tokens: tokens),
            remote_s=lengths.integrated(fleet.prfaas.prefill),
            remote_bytes=lengths.integrated(fleet.prfaas.kv),
            local_s=lengths.integrated(fleet.pd.prefill),
            approximation=approximation,
        )

    def at(self, threshold_tokens: float) -> StageCosts:
        t, share = threshold_tokens, self.lengths.tail(threshold_tokens)
        rest = 1 - share
        # Where no request goes, any length will do: it is multiplied by a share of 0.
        long = self.tokens.above(t) / share if share > 0 else t
        short = self.tokens.below(t) / rest if rest > 0 else t

        def remote(cost: Integral) -> float:
            exact = self.approximation is Approximation.INTEGRAL and share > 0
            return cost.above(t) / share if exact else cost.function(long)

        def local(cost: Integral) -> float:
            exact = self.approximation is Approximation.INTEGRAL and rest > 0
            return cost.below(t) / rest if exact else cost.function(short)

        return StageCosts(
            threshold_tokens=t,
            offloaded_share=share,
            remote_tokens=long,
            remote_s=remote(self.remote_s),
            remote_bytes=remote(self.remote_bytes),
            local_tokens=short,
            local_s=local(self.local_s),
        )


def egress_needed_bytes_per_s(profile: Profile, instances: int, average_tokens: float) -> float:
    """Equation 2: what so many busy instances put on the link."""
    return instances * profile.phi_bytes_per_s(average_tokens)


def evaluate(
    fleet: Fleet,
    lengths: Lengths,
    threshold_tokens: float,
    n_p: float,
    n_d: float,
    approximation: Approximation,
) -> Throughput:
    """Equations 3 to 6 for one threshold and one split."""
    return throughput(fleet, CostModel.of(fleet, lengths, approximation).at(threshold_tokens), n_p, n_d)


def throughput(fleet: Fleet, costs: StageCosts, n_p: float, n_d: float) -> Throughput:
    p = costs.offloaded_share
    compute, link = prefill_rates(fleet, costs)
    theta_prfaas = min(compute, link) if p > 0 else 0.0
    theta_pdp = per_s(n_p, costs.local_s) if p < 1 else 0.0
    theta_pdd = n_d * fleet.decode_requests_per_s
    limits = [(theta_pdd, Binding.PD_DECODE)]
    if p > 0:
        limits += [(compute / p, Binding.PRFAAS), (link / p, Binding.LINK)]
    if p < 1:
        limits.append((theta_pdp / (1 - p), Binding.PD_PREFILL))
    lambda_max, binding = min(limits, key=lambda limit: limit[0])
    egress = lambda_max * p * costs.remote_bytes
    return Throughput(theta_prfaas, theta_pdp, theta_pdd, lambda_max, binding, egress, costs)


def prefill_rates(fleet: Fleet, costs: StageCosts) -> tuple[float, float]:
    """Equation 3, both terms: what the PrfaaS instances compute, and what the link carries. Long requests/s."""
    compute = per_s(fleet.n_prfaas, costs.remote_s)
    if fleet.link_bytes_per_s is None:
        return compute, compute
    return compute, per_s(fleet.link_bytes_per_s, costs.remote_bytes)


def per_s(amount: float, cost: float) -> float:
    """How many requests/s so much of a thing serves; without limit when they cost nothing of it."""
    return amount / cost if cost > 0 else math.inf
