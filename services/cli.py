"""The `prfaas` command.

Exit codes: 0 done; 1 it failed while running; 2 the command line or the configuration is wrong.
"""

import json
import secrets
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from prfaas import config as configuration
from prfaas.cluster import Role
from prfaas.engine.tiny import FAMILIES, build_tiny
from prfaas.errors import ConfigError
from prfaas.live.wan_relay import RelayRoute, run_relay
from prfaas.observe.logs import configure
from prfaas.request import Mode
from prfaas.version import VERSION
from services import vllm_engine
from services.admin_cli import ADMIN_COMMANDS
from services.bench_cli import bench
from services.cache_pool.__main__ import cache_pool
from services.certs_cli import certs
from services.decode_worker.__main__ import decode_worker
from services.drill_cli import drill
from services.http_client import AnswerFailed
from services.keys_cli import keys
from services.local_cluster import Plan, Wan, check_settings
from services.option_types import Finite, http_url
from services.plan_cli import plan
from services.prefill_worker.__main__ import prefill_worker
from services.router.__main__ import router
from services.running import end_with_launcher, run_to_end
from services.settings import settings
from services.sim_cli import sim
from services.status_cli import status
from services.up import run as up_until_signal

SECTIONS = tuple(dict.fromkeys(section for section, _ in configuration.fields()))
HOME = Path(".prfaas")
FAMILY = "kimi_linear"
#: Of `up --engine vllm`, where they are not given. Canaries know answers to the token, which a server may not repeat.
VLLM_DEFAULTS: dict[str, Any] = {"pools": 0, "canary_period_s": None, "ready_timeout_s": 1800.0}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(VERSION, prog_name="prfaas")
def main() -> None:
    """Prefill-as-a-Service: long prompts are prefilled in another region and decoded here."""


main.add_command(router)
main.add_command(prefill_worker)
main.add_command(decode_worker)
main.add_command(cache_pool)
main.add_command(sim)
main.add_command(certs)
main.add_command(keys)
main.add_command(drill)
main.add_command(plan)
main.add_command(status)
main.add_command(bench)
for admin_command in ADMIN_COMMANDS:
    main.add_command(admin_command)


def local_cluster_options(command: Any) -> Any:
    """What `up` and `demo` share."""
    model = click.option("--model", "model_dir", type=click.Path(path_type=Path, exists=True), help="Model folder.")
    family = click.option(
        "--family",
        type=click.Choice(FAMILIES),
        help=f"Tiny model to build when --model is absent. [default: {FAMILY}]",
    )
    return model(family(command))


@main.command()
@local_cluster_options
@click.option(
    "--engine",
    type=click.Choice(["embedded", "vllm"]),
    default="embedded",
    help="embedded: our own, on the CPU. vllm: each worker starts a vLLM server on --model; then there are one PD node,"
    " no canaries and no prefix cache of ours, and starting may take half an hour, unless said otherwise.",
)
@click.option(
    "--vllm-python",
    envvar="PRFAAS_WORKER_VLLM_PYTHON",
    help="With --engine vllm: the Python that has it. [PRFAAS_WORKER_VLLM_PYTHON; default: that of `make vllm-venv`"
    " where it is, else python3]",
)
@click.option(
    "--vllm-arguments",
    multiple=True,
    help="With --engine vllm: arguments of its servers, as in --vllm-arguments='--dtype bfloat16'. May be given again.",
)
@click.option("--port", default=8000, help="Port of the OpenAI endpoint; 0 takes a free one.")
@click.option(
    "--threshold-tokens",
    default=2048,
    help="t to start with: more uncached tokens than this go to region a. A plan in the store wins; `prfaas threshold"
    " --pin` holds t.",
)
@click.option(
    "--mode",
    type=click.Choice([mode.value for mode in Mode]),
    default="auto",
    help="auto: t adapts to link and load; always, never: prefill in region a whatever can be, or nothing.",
)
@click.option("--rebalance/--no-rebalance", default=True, help="Plan t and the PD nodes' roles from demand.")
@click.option("--slow-period-s", type=Finite(min=0, min_open=True), help="How often to plan. [default: 120]")
@click.option("--routers", default=1, type=click.IntRange(1), help="Routers; each has a port of its own.")
@click.option(
    "--canary-period-s",
    type=Finite(min=0, min_open=True),
    default=60.0,
    help="How often routers try each prefill worker with a prompt whose answer they know.",
)
@click.option("--admin-key", help="Serve the admin API, with this key. [PRFAAS_ADMIN_KEY]", envvar="PRFAAS_ADMIN_KEY")
@click.option(
    "--keys-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Ask for an API key of this file, made by `prfaas keys`. [default: open to everybody on this machine]",
)
@click.option("--prefill-workers", default=1, type=click.IntRange(0), help="Prefill workers in region a.")
@click.option(
    "--pd-roles",
    multiple=True,
    help="A role for each PD node of region b: prefill, decode or mixed. [default: mixed,mixed]",
)
@click.option("--cluster", help="Prefix of its keys in the store. [default: local, or one of its own with --etcd]")
@click.option("--etcd", multiple=True, metavar="HOST:PORT", help="Use this etcd instead of the embedded store.")
@click.option("--wan-mbit", type=Finite(min=0, min_open=True), help="Put a line of this rate between the regions.")
@click.option("--wan-rtt-ms", type=Finite(min=0), default=0.0, help="Round trip time of that line.")
@click.option("--mtls", is_flag=True, help="Make certificates for the run: all services ask each other for theirs.")
@click.option("--kv-pool-bytes", default=256 << 20, help="Shared memory of each worker's KV pool.")
@click.option("--pools", default=1, type=click.IntRange(1), help="Shards of the prefix cache in each region.")
@click.option("--no-pool", is_flag=True, help="No prefix cache: every prompt is computed whole.")
@click.option("--pool-bytes", default=256 << 20, help="Memory of each shard of the prefix cache.")
@click.option(
    "--pool-dir", type=click.Path(path_type=Path), help="Keep here what that memory has no room for, over restarts."
)
@click.option(
    "--ready-timeout-s",
    default=90.0,
    type=Finite(min=0, min_open=True),
    help="Give up when the cluster is not ready by then.",
)
@click.option("--log-format", type=click.Choice(["json", "text"]), default="text")
@click.option("--log-dir", type=click.Path(path_type=Path), help="A log file per process instead of the terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line with endpoint and processes when ready.")
def up(
    model_dir: Path | None,
    family: str | None,
    engine: str,
    vllm_python: str | None,
    vllm_arguments: tuple[str, ...],
    pd_roles: tuple[str, ...],
    slow_period_s: float | None,
    no_pool: bool,
    admin_key: str | None,
    wan_mbit: float | None,
    wan_rtt_ms: float,
    as_json: bool,
    cluster: str | None,
    etcd: tuple[str, ...],
    **options: Any,
) -> None:
    """Run a cluster of two regions on this machine until Ctrl-C."""
    if len(pd_roles) > 1:
        raise click.UsageError("--pd-roles is given more than once: name all roles in one, as mixed,decode")
    on_vllm = engine == "vllm"
    _check_engine_options(on_vllm, model_dir)
    words = _words(vllm_arguments)
    options |= {name: value for name, value in VLLM_DEFAULTS.items() if on_vllm and not _given(name)}
    listed = pd_roles[0] if pd_roles else ("mixed" if on_vllm else "mixed,mixed")
    roles = tuple(role.strip() for role in listed.split(","))
    if unknown := [role for role in roles if role not in {known.value for known in Role}]:
        raise click.UsageError(f"--pd-roles: {unknown[0]!r} is not one of prefill, decode, mixed")
    if all(role == Role.PREFILL.value for role in roles):
        raise click.UsageError("--pd-roles: no node decodes")
    if wan_mbit is None and wan_rtt_ms:
        raise click.UsageError("--wan-rtt-ms needs --wan-mbit")
    if slow_period_s is not None and not options["rebalance"]:
        raise click.UsageError("--slow-period-s does not go with --no-rebalance: nothing is planned then")
    if admin_key is not None and not admin_key.strip():
        raise click.UsageError("--admin-key is empty; leave it out for no admin API")
    options |= {"pools": 0} if no_pool else {}
    options |= {"slow_period_s": slow_period_s} if slow_period_s is not None else {}
    wan = Wan(mbit=wan_mbit, rtt_ms=wan_rtt_ms) if wan_mbit else None
    name = cluster or (f"local-{secrets.token_hex(4)}" if etcd else "local")
    configure(options["log_format"])
    folder = _model(model_dir, family)
    plan = Plan(
        model_dir=folder, pd_roles=roles, wan=wan, etcd=etcd, cluster=name, admin_key=admin_key or "", **options
    )
    try:
        check_settings(plan)
        plan = vllm_engine.prepared(plan, vllm_python, words) if on_vllm else plan
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    run_to_end(up_until_signal(plan, as_json))


@main.command()
@local_cluster_options
@click.option(
    "--endpoint",
    type=http_url,
    metavar="URL",
    help="Of a cluster that is up, to be asked instead of one that is started.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON only.")
def demo(model_dir: Path | None, family: str | None, endpoint: str | None, as_json: bool) -> None:
    """Start a cluster, send a short and a long prompt, show where they were prefilled."""
    from services import demo as demonstration

    console = Console(quiet=as_json)
    if endpoint is not None:
        if model_dir or family:
            raise click.UsageError("--endpoint: its cluster has a model; --model and --family do not go with it")
        try:
            shown = demonstration.ask(endpoint, demonstration.served_model(endpoint), console)
        except (OSError, AnswerFailed) as error:
            raise click.ClickException(f"{endpoint}: {error}") from error
    else:
        folder = _model(model_dir, family)
        shown = run_to_end(demonstration.run(folder, folder.name, console, HOME / "logs"))
    console.print(demonstration.receipts(shown))
    if as_json:
        print(json.dumps({name: one.summary() for name, one in shown.items()}))
    if problems := demonstration.problems(shown):
        raise click.ClickException("; ".join(problems))
    console.print("demo: ok")


@main.group()
def model() -> None:
    """Model folders."""


@model.command("build-tiny")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--family", type=click.Choice(FAMILIES), required=True)
def model_build_tiny(directory: Path, family: str) -> None:
    """Write a small seeded model with tokenizer and chat template."""
    if directory.exists() and any(directory.iterdir()):
        raise click.UsageError(f"{directory} is not empty: a model there would be overwritten")
    build_tiny(directory, family)
    click.echo(f"built {family} in {directory}")


@main.command("wan-relay")
@click.option("--route", "routes", multiple=True, required=True, metavar="LISTEN=TARGET", help="host:port=host:port")
@click.option("--mbit", required=True, type=Finite(min=0, min_open=True), help="Rate of the line, each way.")
@click.option("--rtt-ms", default=0.0, type=Finite(min=0), help="Round trip time of the line.")
@click.option("--metrics-port", default=0, type=click.IntRange(0, 65535), help="Port of /metrics; 0 takes a free one.")
def wan_relay(routes: tuple[str, ...], mbit: float, rtt_ms: float, metrics_port: int) -> None:
    """Carry the KV path over a line of this rate and round trip time."""
    end_with_launcher()
    configure("text")
    run_relay(
        [_relay_route(route) for route in routes],
        bits_per_s=mbit * 1e6,
        rtt_s=rtt_ms / 1e3,
        metrics_address=("127.0.0.1", metrics_port),
    )


def _relay_route(text: str) -> RelayRoute:
    try:
        (listen_host, listen_port), (target_host, target_port) = (side.rsplit(":", 1) for side in text.split("="))
        return RelayRoute(listen_host, int(listen_port), target_host, int(target_port))
    except ValueError:
        raise click.UsageError(f"--route {text}: must be host:port=host:port") from None


@main.group()
def config() -> None:
    """The configuration."""


@config.command("check")
@settings(*SECTIONS, own=())
def config_check(_config: configuration.Config) -> None:
    """Say whether file, environment and options make a valid configuration."""
    click.echo("configuration: ok")


@config.command("dump")
@settings(*SECTIONS, own=())
def config_dump(loaded: configuration.Config) -> None:
    """Print the configuration in force as JSON, secrets masked."""
    click.echo(json.dumps(configuration.dump(loaded), indent=2))


def _check_engine_options(on_vllm: bool, model_dir: Path | None) -> None:
    if not on_vllm and (_given("vllm_python") or _given("vllm_arguments")):
        raise click.UsageError("--vllm-python and --vllm-arguments go with --engine vllm only")
    if on_vllm and model_dir is None:
        raise click.UsageError("--engine vllm needs --model: it runs none of the models that are built here")
    if on_vllm and any(map(_given, ("pools", "pool_bytes", "pool_dir"))):
        raise click.UsageError("--engine vllm goes without --pools: a vLLM server gives our prefix cache nothing")


def _words(arguments: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple(word for text in arguments for word in shlex.split(text))
    except ValueError as error:
        raise click.UsageError(f"--vllm-arguments: {error}") from error


def _given(name: str) -> bool:
    """On the command line."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def _model(model_dir: Path | None, family: str | None) -> Path:
    """The folder given, or a tiny model of the family, built once."""
    if model_dir is not None:
        if family is not None:
            raise click.UsageError("--family is for a model that is built: it does not go with --model")
        return model_dir
    family = family or FAMILY
    folder = HOME / "models" / f"tiny-{family.replace('_', '-')}"
    if not (folder / "config.json").exists():
        click.echo(f"building {folder}", err=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Elsewhere first: what was begun and interrupted is no model.
        with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as begun:
            build_tiny(Path(begun) / "model", family)
            shutil.rmtree(folder, ignore_errors=True)
            (Path(begun) / "model").rename(folder)
    return folder


if __name__ == "__main__":
    main()
