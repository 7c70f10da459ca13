"""`prfaas status`: one screen of a live cluster.

Exit codes as everywhere: 0 shown (also when Ctrl-C ends the live screen), 1 no router answers, 2 the command line is
wrong.
"""

import json
import time

import click
from rich.console import Console
from rich.live import Live

from services.option_types import Finite, bearer_key, http_url
from services.status.reading import Reading, read
from services.status.screen import screen

#: What is not a terminal has no width of its own.
WIDE = 120
#: A router that takes longer counts as not answering.
TIMEOUT_S = 5.0
#: Without a terminal two readings so far apart tell the rates.
BETWEEN_S = 1.0


@click.command(context_settings={"auto_envvar_prefix": "PRFAAS_STATUS"})
@click.option(
    "--admin",
    "admins",
    required=True,
    multiple=True,
    type=http_url,
    envvar="PRFAAS_ADMIN",
    metavar="URL",
    help="The admin API of a router; repeat it for several. [PRFAAS_ADMIN, separated by spaces]",
)
@click.option(
    "--key",
    required=True,
    type=bearer_key,
    metavar="TEXT",
    envvar="PRFAAS_ADMIN_KEY",
    help="Its key. [PRFAAS_ADMIN_KEY]",
)
@click.option("--once", is_flag=True, help="Print one screen and end. What is not a terminal gets no other.")
@click.option("--json", "as_json", envvar="PRFAAS_STATUS_JSON", is_flag=True, help="Print one reading as JSON and end.")
@click.option(
    "--interval-s",
    type=Finite(0.2, 3600),
    default=2.0,
    show_default=True,
    help="How often the live screen is read anew.",
)
def status(admins: tuple[str, ...], key: str, once: bool, as_json: bool, interval_s: float) -> None:
    """Show routers, threshold, links, workers and what needs a look; live on a terminal."""
    console = Console()
    first = _read(admins, key)
    if first.main is None:
        raise click.ClickException("; ".join(f"{each.url}: {each.problem}" for each in first.told))
    if as_json or once or not console.is_terminal:
        time.sleep(BETWEEN_S)
        reading = _read(admins, key)
        if as_json:
            click.echo(json.dumps(reading.described(first)))
        else:
            width = console.width if console.is_terminal else WIDE
            Console(width=width, highlight=False).print(screen(reading, first, width, None))
        return
    try:
        _watch(console, first, admins, key, interval_s)
    except KeyboardInterrupt:
        return


def _watch(console: Console, first: Reading, admins: tuple[str, ...], key: str, interval_s: float) -> None:
    """On the terminal's other screen, drawn over in place. A router that is lost shows as such; what was there before
    comes back at the end."""
    before: Reading | None = None
    reading = first
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="ellipsis") as live:
        while True:
            live.update(screen(reading, before, console.width, console.height), refresh=True)
            time.sleep(interval_s)
            before, reading = reading, _read(admins, key)


def _read(admins: tuple[str, ...], key: str) -> Reading:
    return read(admins, key, time.monotonic(), TIMEOUT_S)
