"""The search for the highest rate with a bounded backlog finds the capacity of a cluster whose capacity is known."""

import pytest

from prfaas.cluster import NodeKind
from prfaas.profile import CASE_STUDY, shipped
from prfaas.request import Mode
from prfaas.sim.policies import Policy
from prfaas.sim.scenario import FleetSpec, LinkSpec, Scenario
from prfaas.sim.sustained import sustained
from prfaas.sim.workload import Arrivals, Fixed, Workload

TOKENS = 10_000
#: One prefill worker is all there is to wait for.
CAPACITY_PER_S = 1 / shipped(CASE_STUDY, "h200").prefill_s(TOKENS - 1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("guess", [1.0, 1.1])
def test_one_instance_sustains_one_over_its_service_time(guess):
    """The tolerance for growth makes the answer a little high, never low by much."""
    scenario = Scenario(
        name="one",
        fleets=(
            FleetSpec(name="far", region="a", kind=NodeKind.PREFILL_WORKER, hardware="h200", nodes=1),
            FleetSpec(name="pd", region="b", kind=NodeKind.PD, hardware="h20", nodes=2),
        ),
        links=(LinkSpec(source="a", target="b", gbps=100.0),),
        workload=Workload(arrivals=Arrivals(rate_per_s=1.0), prompts=Fixed(tokens=TOKENS), outputs=Fixed(tokens=64)),
        policy=Policy(mode=Mode.ALWAYS),
        report_s=5.0,
    )
    found = sustained(scenario, guess * CAPACITY_PER_S, seeds=(1, 2), hours=0.5, processes=1)
    assert found.rate_per_s == pytest.approx(CAPACITY_PER_S, rel=0.04)
    assert any(probe.bounded for probe in found.probes) and not all(probe.bounded for probe in found.probes)
