"""`prfaas workers`, `flip`, `drain`, `threshold` and `explain`: the admin API of a router, from a terminal."""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import click
from rich.console import Console
from rich.table import Table

from prfaas.cluster import Role
from prfaas.request import Mode
from services.http_client import ask, error_message
from services.option_types import bearer_key, http_url

TABLE_WIDTH = 160


class Admin:
    """One router's admin API. Failures end the command with what the router says."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = url.rstrip("/") + "/admin/v1/", key

    def call(self, method: str, *path: str, body: Mapping[str, Any] | None = None) -> Any:
        target = self._url + "/".join(quote(part, safe="") for part in path)
        try:
            status, answer = ask(method, target, key=self._key, body=body)
        except OSError as error:
            raise click.ClickException(f"no answer from {self._url}: {error}") from error
        try:
            told = json.loads(answer)
        except ValueError:
            raise click.ClickException(f"{self._url} answers {status}, and not as an admin API does") from None
        if status != HTTPStatus.OK:
            raise click.ClickException(error_message(told, status))
        return told


def admin_options(command: Any) -> Any:
    """Where the admin API is, and how to print what it says."""
    url = click.option(
        "--admin",
        required=True,
        type=http_url,
        envvar="PRFAAS_ADMIN",
        metavar="URL",
        help="The admin API. [PRFAAS_ADMIN]",
    )
    key = click.option(
        "--key",
        required=True,
        type=bearer_key,
        metavar="TEXT",
        envvar="PRFAAS_ADMIN_KEY",
        help="Its key. [PRFAAS_ADMIN_KEY]",
    )
    as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON only.")
    return url(key(as_json(command)))


@click.command()
@admin_options
def workers(admin: str, key: str, as_json: bool) -> None:
    """Show all workers: role, phase, load."""
    told = Admin(admin, key).call("GET", "workers")
    if as_json:
        _print(told)
        return
    table = Table(
        "worker", "region", "role", "share", "planned", "phase", "epoch", "prefill queue", "decoding", "busy p/d"
    )
    for each in told["workers"]:
        state = "draining" if each["draining"] and each["phase"] == "serving" else each["phase"]
        state = "shunned" if each.get("shunned") else state
        decoding = f"{each['decoding']}/{each['max_batch']}" if each["max_batch"] else str(each["decoding"])
        busy = f"{_ratio(each['prefill_busy_ratio'])} {_ratio(each['decode_busy_ratio'])}"
        queue, epoch = str(each["queued_prefill_tokens"]), str(each["epoch"])
        planned = "" if each["planned_share"] is None else f"{each['planned_share']:g}"
        share = f"{each['prefill_share']:g}"
        table.add_row(each["id"], each["region"], each["role"], share, planned, state, epoch, queue, decoding, busy)
    Console(width=TABLE_WIDTH).print(table)


@click.command()
@click.argument("node")
@click.argument("role", type=click.Choice([role.value for role in Role]))
@click.option(
    "--prefill-share",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="Share of its time that a mixed node gives to prefill. [default: 0.5]",
)
@admin_options
def flip(node: str, role: str, prefill_share: float | None, admin: str, key: str, as_json: bool) -> None:
    """Give a PD node another role. It finishes what it has first."""
    body = {"role": role, "prefill_share": prefill_share}
    told = Admin(admin, key).call("POST", "workers", node, "flip", body=body)
    _say(told, f"plan {told['epoch']}: {node} becomes {role}", as_json)


@click.command()
@click.argument("node")
@click.option("--undo", is_flag=True, help="Let it take work again.")
@click.option("--force", is_flag=True, help="Even if it is the last node that decodes.")
@admin_options
def drain(node: str, undo: bool, force: bool, admin: str, key: str, as_json: bool) -> None:
    """Let a worker take nothing new and finish what it has."""
    if undo and force:
        raise click.UsageError("--force does not go with --undo")
    method, body = ("DELETE", None) if undo else ("POST", {"force": force})
    told = Admin(admin, key).call(method, "workers", node, "drain", body=body)
    _say(told, f"{node} {'takes work again' if undo else 'is draining'}", as_json)


@click.command()
@click.option("--pin", "tokens", type=click.IntRange(0), metavar="TOKENS", help="Use this t whatever the loops find.")
@click.option("--mode", type=click.Choice([mode.value for mode in Mode]), help="Pin the mode.")
@click.option("--unpin", is_flag=True, help="Leave t and mode to the loops again.")
@admin_options
def threshold(tokens: int | None, mode: str | None, unpin: bool, admin: str, key: str, as_json: bool) -> None:
    """Show, pin or unpin the threshold t."""
    api = Admin(admin, key)
    if unpin and (tokens is not None or mode is not None):
        raise click.UsageError("--unpin goes with neither --pin nor --mode")
    if unpin:
        _say(api.call("DELETE", "threshold"), "unpinned", as_json)
    elif tokens is not None or mode is not None:
        told = api.call("PUT", "threshold", body={"threshold_tokens": tokens, "mode": mode})
        _say(told, f"pinned: {_pinned(told['pinned'])}", as_json)
    else:
        told = api.call("GET", "threshold")
        reason = told["decision"]["reason"] if told["decision"] else "start"
        pinned = f", pinned: {_pinned(told['pinned'])}" if told["pinned"] else ""
        _say(told, f"t = {told['threshold_tokens']} tokens, mode {told['mode']} ({reason}){pinned}", as_json)


@click.command()
@click.argument("request_id")
@admin_options
def explain(request_id: str, admin: str, key: str, as_json: bool) -> None:
    """Say why a recent request went where it went."""
    told = Admin(admin, key).call("GET", "explain", request_id)
    if as_json:
        _print(told)
        return
    console = Console(width=TABLE_WIDTH, highlight=False)
    console.print(f"request {told['request_id']}: {told['prompt_tokens']} prompt tokens")
    for number, attempt in enumerate(told["attempts"], start=1):
        route = attempt["route"]
        console.print(
            f"attempt {number}: {route['path']} because {route['reason']}: {route['uncached_tokens']} uncached tokens,"
            f" t = {route['threshold_tokens']}; {attempt['ending']} {attempt['detail']}".rstrip()
        )
        console.print(_ways(route))
        if pull := route["pull"]:
            console.print(_pulled(pull))
    if under := told["decided_under"]:
        for link in under["links"]:
            use = "unknown" if link["utilization"] is None else f"{link['utilization']:.0%}"
            rtt = "unknown" if link["rtt_s"] is None else f"{link['rtt_s'] * 1e3:.1f} ms"
            queue = f"{link['queued_bytes']} bytes queued"
            console.print(f"link {link['source']} to {link['target']}: {use} used, {queue}, round trip {rtt}")


ADMIN_COMMANDS = (workers, flip, drain, threshold, explain)


def _ways(route: Mapping[str, Any]) -> Table:
    """The way taken and those that were not. Of the first token's time the terms that are not 0."""
    table = Table("way", "prefill", "decode", "to compute", "to move", "predicted TTFT (s)", "made up of (s)")
    for way in ({**route, "path": f"{route['path']} (chosen)"}, *route["alternatives"]):
        expected, nbytes = way["predicted_ttft_seconds"], way["transfer_bytes"]
        moved = f"{way['transfer_tokens']}" + ("" if not nbytes else f" ({nbytes / (1 << 20):.1f} MiB)")
        terms = ", ".join(f"{term} {seconds:.3f}" for term, seconds in (way["predicted"] or {}).items() if seconds)
        row = (way["path"], way["prefill"], way["decode"], str(way["uncached_tokens"]), moved)
        table.add_row(*row, "" if expected is None else f"{expected:.3f}", terms)
    return table


def _pulled(pull: Mapping[str, Any]) -> str:
    fetched = "fetched" if pull["chosen"] else "not fetched"
    costs = "costs unknown"
    if pull["transfer_seconds"] is not None:
        costs = f"{pull['transfer_seconds']:.3f} s to fetch, {pull['recompute_seconds']:.3f} s to compute"
    return f"cached prefix of {pull['tokens']} tokens on {pull['source']}: {fetched} ({costs})"


def _pinned(pin: Mapping[str, Any]) -> str:
    parts = [f"t = {pin['threshold_tokens']}"] if pin["threshold_tokens"] is not None else []
    return ", ".join([*parts, f"mode {pin['mode']}"] if pin["mode"] else parts)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _say(told: Any, line: str, as_json: bool) -> None:
    if as_json:
        _print(told)
    else:
        click.echo(line)


def _print(told: Any) -> None:
    click.echo(json.dumps(told))
