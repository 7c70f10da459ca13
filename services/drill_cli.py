"""`prfaas drill`: break something on a live cluster on purpose, under a light load, and say whether what was promised
held."""

import json
import math
import secrets
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from prfaas.errors import ConfigError, PrfaasError
from services.drill import cluster_file as files
from services.drill.alone import alone_on
from services.drill.bounds import Drill
from services.drill.faults import ELSEWHERE, Commands, Fault, fault_on
from services.drill.load import Ask, Load
from services.drill.run import Times, run


class Seconds(click.FloatRange):
    """Of a part of a drill, an hour at the most."""

    def __init__(self) -> None:
        super().__init__(0, 3600, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail("not a number of seconds", param, ctx)
        return seconds


SECONDS = Seconds()


@click.command()
@click.argument("name", type=click.Choice([drill.value for drill in Drill]))
@click.option(
    "--cluster-file",
    type=click.Path(path_type=Path),
    help="What `prfaas up` has written. [default: of the last one that was started in this folder and still runs]",
)
@click.option("--exec", "command", help="On any other cluster: the command that breaks it.")
@click.option("--undo", default="", help="The command that undoes that, where it does not undo itself.")
@click.option("--endpoint", help="Of a router of that cluster, as http://host:port.")
@click.option("--model", help="The model to ask for.")
@click.option("--metrics", "pages", multiple=True, metavar="URL", help="A /metrics of it; all that should be at rest.")
@click.option(
    "--api-key", default="", envvar="OPENAI_API_KEY", help="Where the endpoint asks for one. [OPENAI_API_KEY]"
)
@click.option("--clients", default=3, type=click.IntRange(1, 64), help="How many ask at once.")
@click.option(
    "--prompt-words",
    default=1500,
    type=click.IntRange(1),
    help="Length of the prompts: long enough that they are prefilled remotely.",
)
@click.option("--before-s", default=Times().before_s, type=SECONDS, help="Load before the fault.")
@click.option("--fault-s", default=Times().fault_s, type=SECONDS, help="How long the fault lasts.")
@click.option("--after-s", default=Times().after_s, type=SECONDS, help="Load after it.")
@click.option("--yes", is_flag=True, help="Do not ask before breaking anything.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON only.")
def drill(
    name: str,
    cluster_file: Path | None,
    command: str | None,
    undo: str,
    endpoint: str | None,
    model: str | None,
    pages: tuple[str, ...],
    api_key: str,
    clients: int,
    prompt_words: int,
    before_s: float,
    fault_s: float,
    after_s: float,
    yes: bool,
    as_json: bool,
) -> None:
    """Break one thing on a live cluster and report whether the bound held: exit code 0 or 1."""
    kind = Drill(name)
    try:
        fault, ask, metrics = _target(kind, cluster_file, command, undo, endpoint, model, pages)
        if not yes:
            _agreed(fault, ask.endpoint)
        load = Load(replace(ask, key=api_key, words=prompt_words), clients, secrets.randbits(24))
        times = Times(before_s=before_s, fault_s=fault_s, after_s=after_s)
        with alone_on(ask.endpoint):
            told = run(kind, fault, load, times, metrics, lambda line: click.echo(line, err=True))
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    except PrfaasError as error:
        raise click.ClickException(str(error)) from error
    click.echo(json.dumps(told) if as_json else _lines(told))
    if not told["held"]:
        sys.exit(1)


def _target(
    kind: Drill,
    path: Path | None,
    command: str | None,
    undo: str,
    endpoint: str | None,
    model: str | None,
    pages: tuple[str, ...],
) -> tuple[Fault, Ask, dict[str, str]]:
    if command is not None:
        if endpoint is None or model is None:
            raise click.UsageError("--exec needs --endpoint and --model: which cluster is watched?")
        return Commands(command, undo), Ask(endpoint=endpoint.rstrip("/"), model=model), {page: page for page in pages}
    if undo or endpoint or model or pages:
        raise click.UsageError("--undo, --endpoint, --model and --metrics go with --exec")
    file = files.read(path) if path is not None else files.find()
    if file is None:
        breaks, undoes = ELSEWHERE[kind]
        also = f' --undo "{undoes}"' if undoes else ""
        raise click.UsageError(
            "no cluster of `prfaas up` runs in this folder. For another one say how to break it, for example:\n"
            f'  prfaas drill {kind.value} --endpoint http://ROUTER:8000 --model MODEL --exec "{breaks}"{also}'
        )
    return fault_on(file, kind), Ask(endpoint=file.endpoint, model=file.model), dict(file.metrics)


def _agreed(fault: Fault, endpoint: str) -> None:
    if not sys.stdin.isatty():
        raise click.UsageError("nobody can be asked here: give --yes to break something on purpose")
    click.confirm(
        f"This is going to {fault.describe()}, on the live cluster at {endpoint}. Go on?", abort=True, err=True
    )


def _lines(told: dict[str, Any]) -> str:
    held = "held" if told["held"] else "DID NOT HOLD"
    errors = "".join(f"\n  {count} x {error}" for error, count in told["errors"].items())
    given = {None: "not looked at", True: "yes", False: "no"}[told["given_back"]]
    broken = "".join(f"\n- {what}" for what in told["broken"])
    return (
        f"{told['drill']} of {told['target']}: the bound {held} ({told['bound']}){broken}\n"
        f"requests: {told['requests_before']} before ({told['remote_before']} remote), {told['requests_since']} since"
        f" ({told['remote_since']} remote); {told['failed']} failed, {told['hung']} hung, {told['wrong']} wrong of"
        f" {told['answers_checked']} answers{errors}\n"
        f"right again after {told['right_again_seconds']:g} s (bound {told['right_again_bound_seconds']:g} s); slowest"
        f" {told['slowest_before_seconds']:g} s before, {told['slowest_since_seconds']:g} s since; all given back:"
        f" {given}"
    )
