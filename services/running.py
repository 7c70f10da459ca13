"""How every command runs its service: event loop, logs, and our errors as one line and an exit code."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import click
import uvloop

from prfaas.config import LogConfig
from prfaas.errors import ConfigError, PrfaasError, first_of
from prfaas.observe.logs import configure
from prfaas.process import die_with_parent

T = TypeVar("T")

#: Set by a launcher to its process id for the services it starts: they end with it, however it ends.
LAUNCHED = "PRFAAS_LAUNCHED"


def run_service(story: Coroutine[Any, Any, None], log: LogConfig) -> None:
    """Run a long-lived service to its end."""
    end_with_launcher()
    configure(log.format, log.level)
    run_to_end(story, uvloop.run)


def end_with_launcher() -> None:
    """Stop in order when the launcher dies, if there is one."""
    if launcher := os.environ.get(LAUNCHED):
        die_with_parent(signal.SIGTERM, int(launcher))


def run_to_end(story: Coroutine[Any, Any, T], run: Callable[[Coroutine[Any, Any, T]], T] = asyncio.run) -> T:
    """The story's result. Errors of ours end the command: exit code 2 for the configuration, 1 for the rest."""
    ending: click.ClickException
    # What is raised inside of `except*` may come out in a group, which click would not know: so it is raised after it.
    try:
        return run(story)
    except* ConfigError as group:
        ending = click.UsageError(str(first_of(group)))
    except* PrfaasError as group:
        ending = click.ClickException(str(first_of(group)))
    raise ending
