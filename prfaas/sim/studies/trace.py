"""A real trace, replayed under our policy and under others: the case study's cluster with prefix caches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from prfaas.errors import ConfigError
from prfaas.request import Mode
from prfaas.sim.case_study import PRFAAS_PD
from prfaas.sim.case_study_runs import WHOLE_OUTPUTS, built
from prfaas.sim.document import Block, Chart, Heading, Table, Text
from prfaas.sim.jobs import Job
from prfaas.sim.plots import Line, bar_chart, distribution, line_chart
from prfaas.sim.policies import Policy, Rule
from prfaas.sim.run import run
from prfaas.sim.scenario import ControlSpec, Scenario
from prfaas.sim.studies.effort import Effort
from prfaas.sim.trace_files import TraceFormat
from prfaas.sim.workload import Trace, Workload

#: Part of the repository, not of the installed library.
TRACE = Path(__file__).resolve().parents[3] / "bench" / "traces" / "mooncake_conversation.jsonl"
#: Of each node.
CACHE_GIB = 1500.0
JITTER_S = 3.0
#: How many times faster than recorded: at twice the speed the cluster has about as much to do as it can.
SPEED, RECORDED = 2.0, 1.0
#: The paper's threshold.
FIXED_TOKENS = 19_400
#: No loops.
FIXED_ROLES = ControlSpec()


@dataclass(frozen=True, slots=True)
class Contender:
    """`prefill_nodes` of the eight PD nodes: for a policy that does not set roles, those that suit it best."""

    policy: Policy
    prefill_nodes: int
    control: ControlSpec = FIXED_ROLES


OURS = "prfaas"
CONTENDERS: Mapping[str, Contender] = {
    OURS: Contender(Policy(threshold_tokens=FIXED_TOKENS, abundant=True), 3, ControlSpec(fast=True, slow=True)),
    "round_robin": Contender(Policy(rule=Rule.ROUND_ROBIN), 5),
    "local_only": Contender(Policy(mode=Mode.NEVER), 6),
    "always_remote": Contender(Policy(mode=Mode.ALWAYS), 0),
    "fixed_t": Contender(Policy(threshold_tokens=FIXED_TOKENS), 5),
}
#: Who is also shown at the recorded speed, which leaves the other region's nodes room for every prompt.
AT_RECORDED_SPEED = (OURS, "always_remote")


def jobs(effort: Effort) -> list[Job]:
    """Raises ConfigError without the trace."""
    if not TRACE.exists():
        raise ConfigError("trace", f"{TRACE} is not there: this needs a checkout of the repository")
    runs = [*((name, SPEED) for name in CONTENDERS), *((name, RECORDED) for name in AT_RECORDED_SPEED)]
    return [Job(_name(name, speed), measure, (name, speed, effort.trace_s)) for name, speed in runs]


def scenario(name: str, speed: float, recorded_s: float) -> Scenario:
    """The first part of the trace, so long as recorded."""
    contender = CONTENDERS[name]
    base = built(PRFAAS_PD, (1.0,) * contender.prefill_nodes, 1.0, contender.policy)
    fleets = tuple(msgspec.structs.replace(fleet, cache_gib=CACHE_GIB) for fleet in base.fleets)
    trace = Trace(path=TRACE.name, format=TraceFormat.MOONCAKE, rate_scale=speed, jitter_s=JITTER_S)
    return base.but(
        name=f"trace-{name}",
        fleets=fleets,
        control=contender.control,
        workload=Workload(trace=trace),
        folder=str(TRACE.parent),
        token_batch=WHOLE_OUTPUTS,
        duration_s=recorded_s / speed,
        warm_up_s=recorded_s / speed / 12,
    )


def measure(name: str, speed: float, recorded_s: float) -> dict[str, Any]:
    played = scenario(name, speed, recorded_s)
    result = run(played)
    rows = result.requests
    ttft_s = rows["ttft_s"][(rows["arrived_s"] >= played.warm_up_s) & ~np.isnan(rows["ttft_s"])]
    return {
        "figures": {
            "mean": float(ttft_s.mean()),
            "p90": float(np.percentile(ttft_s, 90)),
            "egress_gb": result.summary["egress_bytes"] / 1e9,
            "skip_rate": result.summary["prefill_skip_rate"],
            "flips": result.summary["flips"],
            "unfinished": result.summary["offered"] - result.summary["completed"],
        },
        "ttft_s": ttft_s,
    }


def figures(results: Mapping[str, Any]) -> dict[str, Any]:
    """At SPEED."""
    return {name: results[_name(name, SPEED)]["figures"] for name in CONTENDERS}


def blocks(results: Mapping[str, Any]) -> Iterator[Block]:
    prefilling = ", ".join(f"{each.prefill_nodes} for {name}" for name, each in CONTENDERS.items() if name != OURS)
    yield Heading("A real trace")
    yield Text(
        f"One hour of the Mooncake conversation trace at {SPEED:g} times its speed, each arrival moved by up to "
        f"{JITTER_S:g} s, on the case study's cluster with {CACHE_GIB:g} GiB of prefix cache on every node. PrfaaS "
        "starts with the paper's roles and threshold and has both loops. The others keep their roles, those of whole "
        f"nodes that suit them best; of the eight PD nodes prefill {prefilling}. Egress is compared with those that "
        "leave no more requests unfinished; that local-only sends least is no question."
    )
    at_speed = {name: results[_name(name, SPEED)]["figures"] for name in CONTENDERS}
    yield _table(list(at_speed.items()))
    yield Text(_price(at_speed))
    bars = {
        name: {which: results[_name(name, SPEED)]["figures"][which] for which in ("mean", "p90")}
        for name in (OURS, "always_remote")
    }
    chart = bar_chart("TTFT on the Mooncake trace", "seconds", bars)
    yield Chart("trace", "TTFT of the policies that keep up.", chart)
    lines = [Line(name, distribution(results[_name(name, SPEED)]["ttft_s"].tolist())) for name in CONTENDERS]
    chart = line_chart("TTFT on the Mooncake trace", "seconds", "share", lines, log_x=True)
    yield Chart("trace_distribution", "Share of requests whose first token came within a time.", chart)
    yield Text(
        "At the recorded speed the other region has room for every prompt and the line for all their KV. To send "
        "everything there is then quickest, and takes the most of the line; PrfaaS keeps to the threshold that its "
        "plan needs at full load:"
    )
    yield _table([(name, results[_name(name, RECORDED)]["figures"]) for name in AT_RECORDED_SPEED])


def _price(at_speed: Mapping[str, Mapping[str, Any]]) -> str:
    """Who sends less than we do, and what their clients pay for it."""
    ours = at_speed[OURS]
    frugal = [
        f"{name} ({row['egress_gb']:,.0f} GB, mean TTFT {row['mean']:.2f} s, P90 {row['p90']:.2f} s)"
        for name, row in at_speed.items()
        if 0 < row["egress_gb"] < ours["egress_gb"] and row["unfinished"] <= ours["unfinished"]
    ]
    if not frugal:
        return "None of the others that serve as many requests sends less than PrfaaS."
    return (
        f"PrfaaS does not send least. It sends {ours['egress_gb']:,.0f} GB for a mean TTFT of {ours['mean']:.2f} s and "
        f"a P90 of {ours['p90']:.2f} s; less is sent by {' and '.join(frugal)}. Bytes are what it pays with for "
        "shorter waits: egress is a limit that it keeps, not a cost that it minimizes."
    )


def _table(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    return Table(
        ["policy", "mean TTFT, s", "P90 TTFT, s", "egress, GB", "prefill skipped", "flips", "unfinished"],
        [
            [
                name,
                f"{row['mean']:.2f}",
                f"{row['p90']:.2f}",
                f"{row['egress_gb']:,.0f}",
                f"{row['skip_rate']:.1%}",
                str(row["flips"]),
                str(row["unfinished"]),
            ]
            for name, row in rows
        ],
    )


def _name(contender: str, speed: float) -> str:
    return f"trace at {speed:g}x under {contender}"
