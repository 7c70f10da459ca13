"""One of the processes of `prfaas router --workers N`: `python -m services.router.replica --fd N`.

It gets its configuration from its parent, which has read it for all, says whether it serves, and is stopped by it.
"""

import argparse
import socket
import sys

import msgspec
import structlog
import uvloop

from prfaas.config import Config
from prfaas.errors import ConfigError, PrfaasError, first_of
from prfaas.ipc import Channel
from prfaas.observe.logs import configure
from services.running import end_with_launcher

log = structlog.get_logger()


class Errand(msgspec.Struct, frozen=True):
    """From the parent: what to serve."""

    number: int
    config: Config


class Serving(msgspec.Struct, frozen=True, tag=True):
    """To the parent: from now on the port is served."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """To the parent: it cannot be served. `setting` is the one that is wrong, if one is."""

    setting: str | None
    message: str


Report = Serving | Refused


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    end_with_launcher()
    channel: Channel[Errand] = Channel(socket.socket(fileno=parser.parse_args().fd), Errand)
    if errands := channel.receive():
        sys.exit(_serve(errands[0], channel))


def _serve(errand: Errand, channel: Channel[Errand]) -> int:
    """The exit code."""
    from services.router.app import run

    configure(errand.config.log.format, errand.config.log.level)
    structlog.contextvars.bind_contextvars(worker=errand.number)
    serving, failures = False, list[PrfaasError]()

    def ready() -> None:
        nonlocal serving
        serving = True
        channel.send(Serving())
        channel.close()

    try:
        uvloop.run(run(errand.config, ready))
    except* PrfaasError as group:
        failures.append(first_of(group))
    for error in failures:
        if serving:
            log.error("router failed", error=str(error))
        elif isinstance(error, ConfigError):
            channel.send(Refused(error.path, error.message))
        else:
            channel.send(Refused(None, str(error)))
    return 1 if failures else 0


if __name__ == "__main__":
    main()
