"""`prfaas router --workers N`: the parent of N whole routers on one port.

It reads the configuration for all of them, so that one that is started again has the same. The kernel spreads
connections over the processes that listen (SO_REUSEPORT); the parent holds the port without listening. A process that
ends takes its own connections with it and nothing else, and is started again after a pause.

What must hold: what is wrong with the configuration is said once; no process outlives the parent by more than a drain.
"""

import asyncio
import math
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import structlog

from prfaas.config import Config, RouterConfig
from prfaas.errors import ConfigError, PeerUnavailable, PrfaasError
from prfaas.ipc import AsyncChannel
from prfaas.process import STOP_NOW, StopSignals, end_all
from services.router.replica import Errand, Refused, Report, Serving
from services.running import LAUNCHED

#: A tokenizer of any size is loaded and tested in less, also on a machine that is busy.
START_TIMEOUT_S = 300.0
#: How long a process may take to end beyond what it waits for itself.
STOP_GRACE_S = 15.0
#: The pause before a process is started again doubles each time, until one has run for long enough.
PAUSE_S, MAX_PAUSE_S, STEADY_S = 0.2, 30.0, 60.0

log = structlog.get_logger()


async def supervise(config: Config) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends the drain."""
    stop = StopSignals()
    own = config.router
    with _held(own.host, own.port) as port:
        workers = _Workers(config, port)
        try:
            await workers.start()
            stop.ready()
            log.info("all workers are serving", host=own.host, port=port, workers=own.workers)
            await workers.keep_until(stop)
            await workers.drain()
        except asyncio.CancelledError:
            if not stop.cancelled:
                raise
        finally:
            await workers.stop()


class _Workers:
    """The processes, by number. `port` is theirs together."""

    def __init__(self, config: Config, port: int) -> None:
        self._config, self._port = config, port
        self._processes: dict[int, asyncio.subprocess.Process] = {}

    async def start(self) -> None:
        """The first alone: what it is refused for, the others would be as well."""
        await self._start(0)
        async with asyncio.TaskGroup() as group:
            for number in range(1, self._config.router.workers):
                group.create_task(self._start(number), name=f"start worker {number}")

    async def keep_until(self, stop: StopSignals) -> None:
        keepers = [asyncio.create_task(self._keep(number), name=f"keep worker {number}") for number in self._processes]
        try:
            await stop.wait()
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)

    async def drain(self) -> None:
        await end_all([*self._processes.values()], self._config.router.drain_timeout_s + STOP_GRACE_S)

    async def stop(self) -> None:
        """Whatever still runs."""
        await end_all([*self._processes.values()], STOP_GRACE_S, STOP_NOW)

    async def _keep(self, number: int) -> None:
        """Start the process again whenever it ends."""
        clock, ended = asyncio.get_running_loop().time, 0
        while True:
            begun_s = clock()
            try:
                if self._processes[number].returncode is not None:
                    await self._start(number)
                    log.info("a worker serves again", worker=number)
                reason = f"ended with {await self._processes[number].wait()}"
            except (PrfaasError, OSError) as error:
                reason = str(error)
            ended = 1 if clock() - begun_s > STEADY_S else ended + 1
            log.error("a worker ended", worker=number, reason=reason, again_in_s=pause_s(ended))
            await asyncio.sleep(pause_s(ended))

    async def _start(self, number: int) -> None:
        """Raises ConfigError or PeerUnavailable when it does not get to serving."""
        name = f"worker {number} of the router"
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.router.replica",
                "--fd",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, LAUNCHED: str(os.getpid())},
                start_new_session=True,  # Ctrl-C is for the parent alone
            )
        finally:
            theirs.close()
        self._processes[number] = process
        channel: AsyncChannel[Report] = await AsyncChannel.over(ours, Report)
        try:
            channel.send(Errand(number, of_worker(self._config, self._port, number)))
            async with asyncio.timeout(START_TIMEOUT_S):
                report = await channel.receive()
        except TimeoutError:
            process.kill()
            raise PeerUnavailable(name, f"it does not serve after {START_TIMEOUT_S:g} s") from None
        finally:
            channel.close()
        match report:
            case Serving():
                return
            case Refused(setting=None, message=message):
                raise PeerUnavailable(name, message)
            case Refused(setting=str(setting), message=message):
                raise ConfigError(setting, message)
            case None:
                raise PeerUnavailable(name, f"its process ended with {await process.wait()}")


def pause_s(times: int) -> float:
    """Before a process is started again that has ended so often in a row."""
    doublings = min(times - 1, 16)  # more would leave what a float can hold, in a crash loop of some hours
    return min(math.ldexp(PAUSE_S, doublings), MAX_PAUSE_S)


def of_worker(config: Config, port: int, number: int) -> Config:
    """The configuration of one process: the port is everybody's, the others are its own."""
    own = config.router
    mine: RouterConfig = msgspec.structs.replace(
        own,
        workers=1,
        port=port,
        admin_port=own.admin_port and own.admin_port + number,
        metrics_port=own.metrics_port and own.metrics_port + number,
    )
    return msgspec.structs.replace(config, router=mine)


@contextmanager
def _held(host: str, port: int) -> Iterator[int]:
    """Keep the port for our processes, without taking connections from them. Raises ConfigError when somebody else
    listens on it, which SO_REUSEPORT alone would hide."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
            trial.listen()
        held = socket.socket(family)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(address)
    except OSError as error:
        raise ConfigError("router.port", f"cannot listen on {host}:{port}: {error.strerror}") from error
    with held:
        yield held.getsockname()[1]
