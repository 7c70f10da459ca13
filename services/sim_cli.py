"""`prfaas sim`: clusters in virtual time, steered by the product's own decisions, machines and flows.

Exit codes as everywhere: 0 done, 1 it failed (for `reproduce` also: a figure is not within its bounds), 2 the command
line or the scenario is wrong. The simulator is imported by the commands, as it would slow the start of every other
command down.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from prfaas.errors import ConfigError, PrfaasError

#: Of `--trace-format`. Those of the simulator, which is not imported for them.
TRACE_FORMATS = ("request_log", "mooncake", "azure", "servegen", "burstgpt", "bailian")
SCENARIO = click.Path(path_type=Path, exists=True, dir_okay=False)
WIDE = 200
#: Of a summary, what a sweep shows on a terminal.
SHOWN = ("offered_per_s", "throughput_per_s", "ttft mean", "ttft p90", "egress_gbps", "remote_share", "flips", "failed")


@click.group()
def sim() -> None:
    """Simulate a cluster that runs the product's own decisions and flows."""


@sim.command("run")
@click.argument("file", type=SCENARIO)
@click.option("--seed", type=int, help="Of arrivals and chance, instead of the scenario's.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path, exists=True),
    help="Replay these requests, all of them, instead of the scenario's.",
)
@click.option(
    "--trace-format",
    type=click.Choice(TRACE_FORMATS),
    default="request_log",
    help="What that file is: a router's own request log, or a published trace.",
)
@click.option("--report", "page", type=click.Path(path_type=Path, dir_okay=False), help="Write an HTML report here.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def sim_run(
    file: Path, seed: int | None, trace: Path | None, trace_format: str, page: Path | None, as_json: bool
) -> None:
    """Simulate one scenario, or requests that came to a real cluster on the scenario's machines."""
    from prfaas.sim import report
    from prfaas.sim.replay import replaying
    from prfaas.sim.run import run
    from prfaas.sim.scenario import load
    from prfaas.sim.trace_files import TraceFormat
    from prfaas.sim.world import PARTS

    with failing():
        if page is not None and not os.access(page.parent, os.W_OK | os.X_OK):
            raise ConfigError("--report", f"{page.parent} is no folder that can be written to")
        scenario = load(file)
        if seed is not None:
            scenario = scenario.but(seed=seed)
        if trace is not None:
            scenario = replaying(scenario, trace.absolute(), TraceFormat(trace_format))
        with progress(PARTS, scenario.name) as advance:
            result = run(scenario, lambda part: advance(""))
    if page is not None:
        page.write_text(report.page(result), encoding="utf-8")
    if as_json:
        click.echo(encoded({"scenario": result.scenario, **result.summary}))
    else:
        show(f"Simulation: {result.scenario}", ["figure", "value"], report.rows(result))


@sim.command("sweep")
@click.argument("file", type=SCENARIO)
@click.option(
    "--set",
    "changed",
    multiple=True,
    required=True,
    metavar="NAME=VALUE,VALUE",
    help="A field by its path, as control.slow or links.*.gbps. Repeat it for every combination.",
)
@click.option("--processes", default=2, type=click.IntRange(1), help="How many runs at a time.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per run.")
def sim_sweep(file: Path, changed: tuple[str, ...], processes: int, as_json: bool) -> None:
    """Simulate a scenario at every combination of some settings.

    Short names of fields: link_gbps, rate_per_s, threshold_tokens, mode, rule.
    """
    from prfaas.sim import report, sweep
    from prfaas.sim.jobs import Job, run_jobs

    try:
        settings = [sweep.values_of(text) for text in changed]
    except ValueError as error:
        raise click.UsageError(f"--set: {error}") from None
    with failing():
        variants = sweep.variants(file, settings)
        jobs = [Job(json.dumps(dict(chosen)), sweep.summary, (scenario,)) for chosen, scenario in variants]
        with progress(len(jobs), "sweep") as advance:
            summaries = list(run_jobs(jobs, processes, advance).values())
    if as_json:
        for (chosen, _), summary in zip(variants, summaries, strict=True):
            click.echo(encoded({"set": chosen, **summary}))
        return
    rows = []
    for (chosen, _), summary in zip(variants, summaries, strict=True):
        figures = dict(report.flat(summary))
        rows.append([*map(str, chosen.values()), *(report.shown(figures[name]) for name in SHOWN)])
    show(f"Sweep of {file.name}", [*(name for name, _ in settings), *SHOWN], rows)


@sim.command("reproduce")
@click.option("--quick", is_flag=True, help="Little and fast, to see that it runs; figures out of bounds do not fail.")
@click.option("--processes", default=2, type=click.IntRange(1), help="How many runs at a time.")
@click.option(
    "--report",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write reproduction.md and its charts in this folder, and a self-contained HTML page.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def sim_reproduce(quick: bool, processes: int, folder: Path | None, as_json: bool) -> None:
    """Reproduce the paper's case study, and check the figures against their bounds."""
    from prfaas.sim import reproduce
    from prfaas.sim.jobs import run_jobs

    with failing():
        jobs = reproduce.jobs(quick)
        with progress(len(jobs), "reproduce") as advance:
            found = reproduce.reproduced(run_jobs(jobs, processes, advance), quick)
    if folder is not None:
        reproduce.write(found, folder)
    if as_json:
        click.echo(encoded(found.figures))
    else:
        show("Reproduction", reproduce.HEAD, found.rows())
    if found.missed and not quick:
        raise click.ClickException(f"not within bounds: {'; '.join(found.missed)}")


@contextmanager
def failing() -> Iterator[None]:
    """Our errors as one line and an exit code."""
    try:
        yield
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    except PrfaasError as error:
        raise click.ClickException(str(error)) from None


@contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal, plain lines otherwise, both on stderr. Call it at each of so many steps, with its name."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda name: bar.update(task, advance=1, description=name or what)
        return
    done = 0

    def plain(name: str) -> None:
        nonlocal done
        done += 1
        # Ten lines for steps without names.
        if name or done * 10 % total < 10:
            click.echo(f"{what}: {done}/{total} {name}".rstrip(), err=True)

    yield plain


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    table = Table(title=title)
    for place, column in enumerate(head):
        table.add_column(column, justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console()
    # What is not a terminal has no width of its own.
    (console if console.is_terminal else Console(width=WIDE)).print(table)


def encoded(figures: object) -> str:
    """As JSON, which knows no NaN: what is not known is null."""
    return json.dumps(_known(figures), allow_nan=False)


def _known(figures: Any) -> Any:
    match figures:
        case float():
            return figures if math.isfinite(figures) else None
        case dict():
            return {name: _known(each) for name, each in figures.items()}
        case list() | tuple():
            return [_known(each) for each in figures]
        case _:
            return figures
