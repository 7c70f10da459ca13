"""The paper's case study as scenarios: each fleet with the roles and the threshold that its planner chose."""

from prfaas.cluster import NodeKind
from prfaas.profile import GBPS
from prfaas.request import Mode
from prfaas.scheduling.planner import RolePlan, Roles
from prfaas.scheduling.throughput import Fleet
from prfaas.sim.case_study import HOMOGENEOUS, NAIVE, OUTPUT_TOKENS, PRFAAS_PD, case_study_plan
from prfaas.sim.policies import Policy
from prfaas.sim.scenario import ControlSpec, FleetSpec, LinkSpec, Scenario
from prfaas.sim.workload import Arrivals, Fixed, LogNormal, Workload

#: The other region, and the one that decodes.
FAR, NEAR = "a", "b"
#: Of a line between two regions.
RTT_S = 0.02
#: Hand out all tokens after the first at once. How finely they are handed out changes nothing here but the cost.
WHOLE_OUTPUTS = 1 << 20
FLEETS = ("prfaas_pd", "homogeneous", "naive", "mixed")


def scenario(fleet: str, rate_per_s: float) -> Scenario:
    """One of FLEETS. Roles stay as the planner set them, and the fast loop has the threshold where there is one."""
    match fleet:
        case "prfaas_pd":
            return planned(PRFAAS_PD, case_study_plan(PRFAAS_PD, Roles.WHOLE), rate_per_s).but(name=fleet)
        case "mixed":
            return planned(PRFAAS_PD, case_study_plan(PRFAAS_PD, Roles.MIXED), rate_per_s).but(name=fleet)
        case "homogeneous":
            plan = case_study_plan(HOMOGENEOUS, Roles.WHOLE)
            return planned(HOMOGENEOUS, plan, rate_per_s).but(
                name=fleet, policy=Policy(mode=Mode.NEVER), control=ControlSpec()
            )
        case "naive":
            found = built(NAIVE, (), rate_per_s, Policy(mode=Mode.ALWAYS))
            return found.but(name=fleet)
        case _:
            raise ValueError(f"{fleet}: not one of {', '.join(FLEETS)}")


def planned(fleet: Fleet, plan: RolePlan, rate_per_s: float) -> Scenario:
    found = built(fleet, shares(plan), rate_per_s, Policy(threshold_tokens=plan.threshold_tokens))
    return found.but(control=ControlSpec(fast=True))


def shares(plan: RolePlan) -> tuple[float, ...]:
    """Of the PD nodes that prefill; the others decode."""
    mixed = () if plan.mixed is None else (plan.mixed.prefill_share,)
    return (1.0,) * plan.n_p + mixed


def built(fleet: Fleet, pd_shares: tuple[float, ...], rate_per_s: float, policy: Policy) -> Scenario:
    fleets = [FleetSpec(name="pd", region=NEAR, kind=NodeKind.PD, hardware="h20", nodes=fleet.n_pd, shares=pd_shares)]
    links = []
    if fleet.n_prfaas:
        assert fleet.link_bytes_per_s is not None
        worker = NodeKind.PREFILL_WORKER
        fleets.append(FleetSpec(name="prfaas", region=FAR, kind=worker, hardware="h200", nodes=fleet.n_prfaas))
        links.append(LinkSpec(source=FAR, target=NEAR, gbps=fleet.link_bytes_per_s / GBPS, rtt_s=RTT_S))
    arrivals = Arrivals(rate_per_s=rate_per_s)
    return Scenario(
        name="case-study",
        fleets=tuple(fleets),
        links=tuple(links),
        workload=Workload(arrivals=arrivals, prompts=LogNormal(), outputs=Fixed(tokens=OUTPUT_TOKENS)),
        policy=policy,
        pd_region=NEAR,
    )
