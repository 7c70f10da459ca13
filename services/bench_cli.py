"""`prfaas bench`: load an OpenAI endpoint with the simulator's workloads, and measure what its users would see.

Exit codes as everywhere: 0 measured, whatever was found; 1 the endpoint cannot be used, or no request came through; 2
the command line or a file is wrong.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import click
import uvloop

from prfaas.errors import ConfigError
from services.bench.options import bench_options
from services.http_client import ask
from services.sim_cli import encoded, failing, progress, show

DISCOVERY_TIMEOUT_S = 20.0
#: Runs of a search, at most.
MAX_RUNS = 16


@click.command(context_settings={"auto_envvar_prefix": "PRFAAS_BENCH"})
@bench_options
def bench(
    endpoint: str,
    key: str,
    model: str | None,
    rates: tuple[float, ...],
    find_max: bool,
    precision: float,
    page: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Load an endpoint at given rates and report TTFT, ITL and goodput.

    Requests are sent when they are due, whatever has come back (open loop), and latencies count from then on.
    """
    if find_max and len(rates) > 1:
        raise click.UsageError("--find-max starts from one --rate")
    with failing():
        if page is not None and not os.access(page.absolute().parent, os.W_OK | os.X_OK):
            raise ConfigError("--report", f"{page.parent} is no folder that can be written to")
        chosen = _chosen_model(endpoint, key, model)
        plan = _plan(endpoint, key, chosen, options)
        starts = rates or (plan.own_rate_per_s,)
        for rate in starts:
            _due(plan, rate)
        runs: list[Any] = []
        stopped = False
        try:
            uvloop.run(_measure(plan, starts, precision if find_max else None, runs))
        except KeyboardInterrupt:
            stopped = True
    if runs:
        _tell(plan, runs, find_max=find_max, page=page, as_json=as_json)
    if stopped:
        raise click.ClickException(f"stopped: {len(runs)} runs were whole, what was under way is left out")
    if not any(run.figures["completed"] for run in runs):
        failures = next((run.figures["failures"] for run in runs if run.figures["failures"]), ["none was sent"])
        raise click.ClickException(f"no request came through: {failures[0]}")


def _chosen_model(endpoint: str, key: str, model: str | None) -> str:
    """What is given, or the only one that the endpoint serves."""
    if model is not None:
        return model
    url = f"{endpoint.rstrip('/').removesuffix('/v1')}/v1/models"
    try:
        status, text = ask("GET", url, key=key, timeout_s=DISCOVERY_TIMEOUT_S)
        if status != HTTPStatus.OK:
            raise click.ClickException(f"{url} answers {status}: {text[:300]}")
        told = json.loads(text)
        names = [each["id"] for each in told["data"]]
        if not all(isinstance(name, str) and name.isprintable() for name in names):
            raise ValueError("names that are none")
    except OSError as error:
        raise click.ClickException(f"no answer from {url}: {error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise click.ClickException(f"{url} answers, and not with a list of models") from error
    if len(names) != 1:
        raise click.UsageError(f"--model: one of {', '.join(names) or 'none that is served'}")
    return str(names[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """All but the rate. What a run needs is imported late, as it would slow the start of every other command down."""

    endpoint: str
    key: str
    source: Any
    asking: Any
    bounds: Any
    slo: Any
    timeout_s: float
    max_in_flight: int
    seed: int
    own_rate_per_s: float
    about: dict[str, Any]


def _plan(endpoint: str, key: str, model: str, given: dict[str, Any]) -> _Bench:
    from prfaas.sim.trace_files import TraceFormat
    from services.bench.figures import Slo
    from services.bench.load import Api, Asking, Bounds, Drawn, Replayed

    if given["low_token"] > given["high_token"]:
        raise click.UsageError("--low-token is above --high-token")
    source: Drawn | Replayed
    if given["trace"] is not None:
        source = Replayed.of(given["trace"], TraceFormat(given["trace_format"]), given["seed"])
        load = f"{given['trace']} ({given['trace_format']})"
    else:
        source = Drawn(prompts=given["prompts"], outputs=given["outputs"], cv=given["cv"])
        load = f"prompts {given['prompts']}, outputs {given['outputs']}, cv {given['cv']:g}"
    bounds = Bounds(
        warm_up_s=given["warm_up_s"],
        duration_s=given["duration_s"],
        requests=given["requests"],
        max_context_tokens=given["max_context_tokens"],
    )
    slo = Slo(given["slo_ttft_ms"] / 1e3, given["slo_itl_ms"] / 1e3, given["slo_share"])
    return _Bench(
        endpoint=endpoint,
        key=key,
        source=source,
        asking=Asking(
            model=model,
            api=Api(given["api"]),
            seed=given["seed"],
            low_token=given["low_token"],
            high_token=given["high_token"],
            ignore_eos=given["ignore_eos"],
        ),
        bounds=bounds,
        slo=slo,
        timeout_s=given["timeout_s"],
        max_in_flight=given["max_in_flight"],
        seed=given["seed"],
        own_rate_per_s=source.rate_per_s if isinstance(source, Replayed) else 1.0,
        about={
            "endpoint": endpoint,
            "model": model,
            "api": given["api"],
            "load": load,
            "seconds": f"{bounds.warm_up_s:g} of warm-up, {bounds.duration_s:g} measured",
            "requests at most": bounds.requests or "no bound",
            "SLO": f"TTFT {given['slo_ttft_ms']:g} ms, ITL {given['slo_itl_ms']:g} ms, {given['slo_share']:.0%} good",
            "seed": given["seed"],
        },
    )


async def _measure(plan: _Bench, rates: tuple[float, ...], precision: float | None, runs: list[Any]) -> None:
    """One run after the other, into `runs`; with `precision` as many as it takes to find the highest rate within the
    SLO."""
    from services.bench.figures import next_rate

    if precision is None:
        for rate in rates:
            runs.append(await _run(plan, rate))
        return
    while len(runs) < MAX_RUNS:
        tried = [(run.figures["rate_per_s"], run.figures["meets_slo"]) for run in runs]
        rate_or_none = next_rate(tried, rates[0], precision)
        # Above what the generator can do nothing is learned of the server.
        if rate_or_none is None or (runs and runs[-1].figures["generator"]["was_bottleneck"]):
            break
        # Too low a rate for this duration: nothing would be sent.
        if runs and rate_or_none * plan.bounds.duration_s < 1:
            break
        runs.append(await _run(plan, rate_or_none))


def _due(plan: _Bench, rate_per_s: float) -> list[Any]:
    """The requests of one run. Raises ConfigError where there are none to measure, or too many."""
    from services.bench import load

    requests = load.planned(plan.source, rate_per_s, plan.bounds, plan.seed)
    if len(requests) > load.MAX_REQUESTS:
        raise ConfigError("--requests", f"at {rate_per_s:g} requests/s more than {load.MAX_REQUESTS:,} are due")
    if not any(each.at_s >= plan.bounds.warm_up_s for each in requests):
        if requests and len(requests) == plan.bounds.requests:
            raise ConfigError("--requests", "all of them are due in the warm-up")
        raise ConfigError("--duration-s", f"no request is due in this time at {rate_per_s:g} requests/s")
    return requests


async def _run(plan: _Bench, rate_per_s: float) -> Any:
    from services.bench import figures, load
    from services.bench.client import Connections
    from services.bench.drive import Driver
    from services.bench.report import Measured

    requests = _due(plan, rate_per_s)
    window_s = load.window_s(requests, plan.source, plan.bounds)
    try:
        connections = Connections(plan.endpoint, plan.key)
    except ValueError as error:
        raise ConfigError("--endpoint", str(error)) from error
    driver = Driver(
        connections=connections, asking=plan.asking, timeout_s=plan.timeout_s, max_in_flight=plan.max_in_flight
    )
    try:
        with progress(len(requests), f"{rate_per_s:.3g} requests/s") as advance:
            run = await driver.drive(requests, _unnamed(advance))
    finally:
        connections.close()
    told = figures.figures(run, rate_per_s, plan.bounds, plan.slo, window_s)
    return Measured(told, figures.measured(run, plan.bounds))


def _unnamed(advance: Callable[[str], None]) -> Callable[[], None]:
    return lambda: advance("")


def _tell(plan: _Bench, runs: list[Any], *, find_max: bool, page: Path | None, as_json: bool) -> None:
    from services.bench import report
    from services.bench.figures import highest

    many = len(runs) > 1 or find_max
    found = highest([(run.figures["rate_per_s"], run.figures["meets_slo"]) for run in runs])
    limited = any(run.figures["generator"]["was_bottleneck"] for run in runs)
    if as_json:
        told = {"about": plan.about, "runs": [run.figures for run in runs], "highest_rate_within_slo_per_s": found}
        click.echo(encoded({**told, "generator_limited": limited}))
    else:
        _show(plan, runs, found, find_max=find_max)
    # After the figures, which are not lost when there is no place for the page.
    if page is not None:
        try:
            page.write_text(report.page(plan.about, runs, found, many), encoding="utf-8")
        except OSError as error:
            raise click.ClickException(f"--report {page}: {error.strerror}") from error


def _show(plan: _Bench, runs: list[Any], found: float | None, *, find_max: bool) -> None:
    from services.bench import report

    show(f"Bench of {plan.endpoint}", report.HEAD, report.run_rows(runs))
    for run in runs[-1:] if find_max else runs:
        show(
            f"At {run.figures['rate_per_s']:.3g} requests/s", ["", *report.QUANTILES], report.latency_rows(run.figures)
        )
        click.echo(report.generator_line(run.figures))
        for failure in run.figures["failures"]:
            click.echo(f"failed: {failure}")
    if len(runs) > 1 or find_max:
        click.echo(
            "no rate that was tried meets the SLO" if found is None else f"highest rate within the SLO: {found:.3g}/s"
        )
    if find_max and any(run.figures["generator"]["was_bottleneck"] for run in runs):
        click.echo("the generator was the limit: the server may do more")
