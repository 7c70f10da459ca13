"""The highest rate that each fleet sustains, with queueing and transfer, beside what its planner promised."""

from collections.abc import Iterator, Mapping
from typing import Any

from prfaas.sim.case_study import planner_figures
from prfaas.sim.case_study_runs import FLEETS, scenario
from prfaas.sim.document import Block, Chart, Heading, Table, Text
from prfaas.sim.jobs import Job
from prfaas.sim.plots import bar_chart
from prfaas.sim.studies.effort import Effort
from prfaas.sim.sustained import GROWTH, PRECISION, Sustained, sustained

#: Beside what was measured: the paper has the throughput model's Lambda_max.
PAPER = {"prfaas_pd": 3.24, "homogeneous": 2.11, "naive": 2.45}


def jobs(effort: Effort) -> list[Job]:
    return [Job(_name(fleet), measure, (fleet, effort.sustained_seeds, effort.sustained_s / 3600)) for fleet in FLEETS]


def measure(fleet: str, seeds: tuple[int, ...], hours: float) -> Sustained:
    promised = planner_figures()["planner"][fleet]["lambda_max"]
    assert isinstance(promised, float)
    # Where growth would become too much if the promise were kept in full.
    guess = promised * (1 + GROWTH)
    return sustained(scenario(fleet, promised), guess, seeds=seeds, hours=hours, processes=1)


def figures(results: Mapping[str, Any]) -> dict[str, float]:
    return {fleet: results[_name(fleet)].rate_per_s for fleet in FLEETS}


def blocks(planner: Mapping[str, Any], found: Mapping[str, float], results: Mapping[str, Any]) -> Iterator[Block]:
    yield Heading("Sustained throughput")
    yield Text(
        "Simulated with queueing and transfer under Poisson arrivals: the highest rate whose backlog has no trend, "
        f"which is to say grows by no more than {GROWTH:.0%} of what arrives, read off between two rates that are at "
        f"most {PRECISION:.1%} apart; +- is the standard error by pairs of seeds, the same for all fleets. Roles are "
        "the planner's; where there is a threshold the fast loop steers it."
    )
    yield Table(
        ["fleet", "sustained, req/s", "planner's Lambda_max", "paper's Lambda_max", "over homogeneous", "rates tried"],
        [
            [
                fleet,
                f"{rate:.3f} +- {results[_name(fleet)].error_per_s:.3f}",
                f"{planner[fleet]['lambda_max']:.3f}",
                f"{PAPER[fleet]:.2f}" if fleet in PAPER else "-",
                f"{rate / found['homogeneous']:.3f}x",
                ", ".join(_tried(results[_name(fleet)])),
            ]
            for fleet, rate in found.items()
        ],
    )
    bars = {
        fleet: {"simulated": rate, "planner": planner[fleet]["lambda_max"], "paper's model": PAPER.get(fleet)}
        for fleet, rate in found.items()
    }
    chart = bar_chart("Sustained throughput", "requests/s", bars)
    yield Chart("sustained", "What each fleet sustains, and what was expected.", chart)


def _tried(found: Sustained) -> Iterator[str]:
    for probe in sorted(found.probes, key=lambda probe: probe.rate_per_s):
        yield f"{probe.rate_per_s:.3f} {'bounded' if probe.bounded else 'grows'}"


def _name(fleet: str) -> str:
    return f"sustained rate of {fleet}"
