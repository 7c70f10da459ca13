"""`prfaas plan`: how many nodes, which t, how much bandwidth, before anything is bought.

Exit codes as everywhere: 0 done; 1 the fleet that was given does not carry the demand; 2 the command line or a file is
wrong.
"""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import click

from prfaas.errors import ConfigError
from prfaas.profile import GBPS
from prfaas.profiles import load_profile
from prfaas.scheduling.lengths import Lengths
from prfaas.scheduling.planner import Roles
from prfaas.scheduling.throughput import Approximation, Fleet
from services import sizing
from services.option_types import Finite
from services.plan_report import notes, rows
from services.sim_cli import TRACE_FORMATS, encoded, failing, show

ABOVE_0 = Finite(min=0, min_open=True)


@click.command(context_settings={"auto_envvar_prefix": "PRFAAS_PLAN"})
@click.option(
    "--prfaas-profile",
    required=True,
    metavar="SOURCE",
    help="What a PrfaaS instance (remote prefill) costs: MODEL/HARDWARE of a profile that ships, as"
    " case-study-1t/h200, or a JSON file with a measured table.",
)
@click.option("--pd-profile", required=True, metavar="SOURCE", help="The same of a PD node; it needs a decode step.")
@click.option("--log-normal", metavar="MU,SIGMA", help="Uncached prompt lengths: ln L is normal, cut to the bounds.")
@click.option("--low-tokens", default=128, type=click.IntRange(1), show_default=True, help="Bound of --log-normal.")
@click.option("--high-tokens", default=131072, type=click.IntRange(1), show_default=True, help="The upper one.")
@click.option("--fixed-tokens", type=click.IntRange(1), help="All prompts are that long.")
@click.option("--trace", type=click.Path(path_type=Path, exists=True), help="Prompts as long as those of a trace.")
@click.option("--trace-format", type=click.Choice(TRACE_FORMATS), default="request_log", show_default=True)
@click.option(
    "--cached-share",
    default=0.0,
    show_default=True,
    type=Finite(0, 1, max_open=True),
    help="Of each prompt's tokens, what a prefix cache finds: lengths are shortened by it.",
)
@click.option("--output-tokens", type=ABOVE_0, help="Mean output. [default: the trace's, else it must be given]")
@click.option("--demand-per-s", type=ABOVE_0, help="Requests per second to be carried.")
@click.option("--prfaas-nodes", type=click.IntRange(0), help="With --pd-nodes: plan this fleet, not the smallest.")
@click.option("--pd-nodes", type=click.IntRange(1))
@click.option("--link-gbps", type=ABOVE_0, help="The line that is there. [default: as much as is needed]")
@click.option(
    "--step-limit-ms",
    type=ABOVE_0,
    default=25.0,
    show_default=True,
    help="Longest decode step, and so time between tokens: 25 is 40 tokens/s.",
)
@click.option(
    "--busy",
    type=Finite(0, 1, min_open=True),
    default=0.8,
    show_default=True,
    help="How full a demand may make the fleet and the line. A queue needs the rest.",
)
@click.option("--whole-roles", is_flag=True, help="No PD node shares its time between prefill and decode.")
@click.option("--prfaas-cost", type=ABOVE_0, default=1.0, show_default=True, help="Of one instance, to compare.")
@click.option("--pd-cost", type=ABOVE_0, default=1.0, show_default=True, help="Of one PD node.")
@click.option(
    "--approximation",
    type=click.Choice([each.value for each in Approximation]),
    default=Approximation.INTEGRAL.value,
    show_default=True,
    help="integral averages costs over all requests; mean takes them at the mean length, as the paper does.",
)
@click.option("--json", "as_json", envvar="PRFAAS_PLAN_JSON", is_flag=True, help="Print JSON only.")
def plan(
    prfaas_profile: str,
    pd_profile: str,
    demand_per_s: float | None,
    prfaas_nodes: int | None,
    pd_nodes: int | None,
    link_gbps: float | None,
    step_limit_ms: float,
    busy: float,
    whole_roles: bool,
    prfaas_cost: float,
    pd_cost: float,
    approximation: str,
    as_json: bool,
    **workload: Any,
) -> None:
    """Size a fleet: nodes of each role, the threshold t, and the bandwidth between the regions."""
    if (prfaas_nodes is None) != (pd_nodes is None):
        raise click.UsageError("--prfaas-nodes and --pd-nodes go together")
    if demand_per_s is None and pd_nodes is None:
        raise click.UsageError("say what to carry (--demand-per-s) or with what (--prfaas-nodes, --pd-nodes)")
    with failing():
        lengths, output_tokens = _workload(**workload)
        try:
            fleet = Fleet(
                n_prfaas=prfaas_nodes or 0,
                n_pd=pd_nodes or 0,
                prfaas=load_profile("prfaas", prfaas_profile, ""),
                pd=load_profile("pd", pd_profile, ""),
                link_bytes_per_s=None if link_gbps is None else link_gbps * GBPS,
                output_tokens=output_tokens,
                step_limit_s=step_limit_ms / 1e3,
            )
        except ValueError as error:
            raise ConfigError("--pd-profile", str(error)) from error
        wanted = sizing.Wanted(
            fleet=fleet,
            lengths=lengths,
            demand_per_s=demand_per_s,
            busy=busy,
            roles=Roles.WHOLE if whole_roles else Roles.MIXED,
            approximation=Approximation(approximation),
            prfaas_cost=prfaas_cost,
            pd_cost=pd_cost,
        )
        sized = sizing.for_demand(wanted) if pd_nodes is None else sizing.of_fleet(wanted)
    if as_json:
        click.echo(encoded(sized.described()))
    else:
        show("Plan", ["", "value"], rows(sized))
        for note in notes(sized):
            click.echo(note)
    if sized.carries is False:
        raise click.ClickException(f"this fleet does not carry {demand_per_s:g} requests/s at {busy:.0%} of its rate")


def _workload(
    log_normal: str | None,
    low_tokens: int,
    high_tokens: int,
    fixed_tokens: int | None,
    trace: Path | None,
    trace_format: str,
    cached_share: float,
    output_tokens: float | None,
) -> tuple[Lengths, float]:
    """Uncached lengths, and the mean output."""
    if sum(each is not None for each in (log_normal, fixed_tokens, trace)) != 1:
        raise click.UsageError("prompt lengths: one of --log-normal, --fixed-tokens and --trace")
    left = 1 - cached_share
    if trace is not None:
        from prfaas.sim.trace_files import TraceFormat, read

        requests = read(trace, TraceFormat(trace_format), seed=0)
        counts = Counter(request.prompt_tokens * left for request in requests)
        mean = math.fsum(request.output_tokens for request in requests) / len(requests)
        return Lengths.weighted((each, each, counts[each]) for each in sorted(counts)), output_tokens or mean
    if output_tokens is None:
        raise click.UsageError("--output-tokens: how much is decoded of a request, on average")
    if fixed_tokens is not None:
        return Lengths.weighted([(fixed_tokens * left, fixed_tokens * left, 1.0)]), output_tokens
    assert log_normal is not None
    try:
        mu, sigma = map(float, log_normal.split(","))
        # A share of a log-normal length is log-normal too.
        moved = mu + math.log(left)
        return Lengths.log_normal(moved, sigma, low_tokens * left, high_tokens * left), output_tokens
    except ValueError as error:
        raise click.UsageError(f"--log-normal {log_normal}: {error}") from None
