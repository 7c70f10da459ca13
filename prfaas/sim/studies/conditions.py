"""Conditions that change while a cluster runs, and the plan that is best in each phase of them.

The load is LOAD of what the cluster sustains in its tightest phase.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from prfaas.profile import GBPS
from prfaas.scheduling.evidence import InsufficientData
from prfaas.scheduling.lengths import Lengths
from prfaas.scheduling.planner import RolePlan, Roles, plan
from prfaas.scheduling.throughput import Approximation
from prfaas.sim.case_study import LENGTHS, LINK_GBPS, PRFAAS_PD
from prfaas.sim.case_study_runs import FAR, NEAR, planned
from prfaas.sim.fault_plan import LinkStep
from prfaas.sim.scenario import ControlSpec, Scenario
from prfaas.sim.workload import Arrivals, Change, Diurnal

LOAD = 0.8
NARROW_GBPS = 3.0
#: How much longer prompts become, and the lengths that come of it.
LONGER = 2.0
LONGER_LENGTHS = Lengths.log_normal(mu=9.90 + 0.6931471805599453, sigma=1.0, low_tokens=256, high_tokens=261_120)
#: The rate swings by this share of its mean.
SWING = 0.6
BURST, BURST_S = 5.0, 60.0
#: Slow periods in a phase; figures are compared after the first SETTLING of them.
PERIODS, SETTLING = 20, 3


@dataclass(frozen=True, slots=True)
class Phase:
    """From `at_s` on this plan is best."""

    at_s: float
    plan: RolePlan


@dataclass(frozen=True, slots=True)
class Condition:
    """`windows` are the times that are compared, after the cluster had time to follow."""

    scenario: Scenario
    phases: tuple[Phase, ...]
    windows: tuple[tuple[float, float], ...]


def conditions(phase_s: float) -> Mapping[str, Condition]:
    return {
        "link_step": link_step(phase_s),
        "length_doubling": length_doubling(phase_s),
        "diurnal": diurnal(phase_s),
        "burst": burst(phase_s),
    }


def link_step(phase_s: float) -> Condition:
    """The line falls to a few Gbps for a phase, and comes back."""
    wide, narrow = best(LINK_GBPS, LENGTHS), best(NARROW_GBPS, LENGTHS)
    steps = ((1, NARROW_GBPS), (2, LINK_GBPS))
    faults = tuple(LinkStep(at_s=phase * phase_s, source=FAR, target=NEAR, gbps=gbps) for phase, gbps in steps)
    base = _base(wide, LOAD * min(wide.throughput.lambda_max, narrow.throughput.lambda_max), phase_s)
    phases = (Phase(0.0, wide), Phase(phase_s, narrow), Phase(2 * phase_s, wide))
    return _condition(base.but(name="link step", faults=faults), phases, phase_s)


def length_doubling(phase_s: float) -> Condition:
    """Prompts become twice as long, and stay so."""
    before, after = best(LINK_GBPS, LENGTHS), best(LINK_GBPS, LONGER_LENGTHS)
    base = _base(before, LOAD * min(before.throughput.lambda_max, after.throughput.lambda_max), phase_s)
    longer = (Change(at_s=phase_s, factor=LONGER),)
    scenario = base.but(name="length doubling", workload=_but(base.workload, length_changes=longer))
    return _condition(scenario, (Phase(0.0, before), Phase(phase_s, after)), phase_s)


def diurnal(phase_s: float) -> Condition:
    """A day in three phases. The best plan is the same all day: it does not depend on the rate."""
    steady = best(LINK_GBPS, LENGTHS)
    rate_per_s = LOAD * steady.throughput.lambda_max / (1 + SWING)
    base = _base(steady, rate_per_s, phase_s)
    arrivals = Arrivals(rate_per_s=rate_per_s, diurnal=Diurnal(amplitude=SWING, period_s=3 * phase_s))
    scenario = base.but(name="diurnal", workload=_but(base.workload, arrivals=arrivals))
    return _condition(scenario, (Phase(0.0, steady),), 3 * phase_s, settling_s=SETTLING * phase_s / PERIODS)


def burst(phase_s: float) -> Condition:
    """One minute of many times the rate, in the middle of a phase. The minute itself is part of what is compared."""
    steady = best(LINK_GBPS, LENGTHS)
    rate_per_s = LOAD * steady.throughput.lambda_max / BURST
    base = _base(steady, rate_per_s, phase_s)
    arrivals = Arrivals(rate_per_s=rate_per_s, changes=(Change(at_s=phase_s / 2, factor=BURST, for_s=BURST_S),))
    scenario = base.but(name="burst", workload=_but(base.workload, arrivals=arrivals))
    return _condition(scenario, (Phase(0.0, steady),), phase_s)


def best(link_gbps: float, lengths: Lengths) -> RolePlan:
    fleet = replace(PRFAAS_PD, link_bytes_per_s=link_gbps * GBPS)
    found = plan(fleet, lengths, Roles.WHOLE, Approximation.INTEGRAL)
    assert not isinstance(found, InsufficientData)
    return found


def _base(start: RolePlan, rate_per_s: float, phase_s: float) -> Scenario:
    """Begins with the plan that is best in the first phase; both loops run."""
    period_s = phase_s / PERIODS
    control = ControlSpec(fast=True, slow=True, slow_period_s=period_s, dwell_s=period_s)
    return planned(PRFAAS_PD, start, rate_per_s).but(control=control, warm_up_s=period_s)


def _condition(
    scenario: Scenario, phases: tuple[Phase, ...], phase_s: float, settling_s: float | None = None
) -> Condition:
    settling_s = SETTLING * phase_s / PERIODS if settling_s is None else settling_s
    windows = tuple((phase.at_s + settling_s, phase.at_s + phase_s) for phase in phases)
    return Condition(scenario.but(duration_s=phase_s * len(phases)), phases, windows)


def _but(workload: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(workload, **changes)
