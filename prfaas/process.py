"""What every process of ours does first: die with its parent, so that a killed supervisor leaves nothing behind."""

import asyncio
import ctypes
import os
import resource
import signal
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def die_with_parent(sig: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """Ask the kernel for `sig` when the parent dies. Linux only; a parent that is gone already counts as dead, which
    only shows to who knows its process id."""
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, sig, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), sig)


def leave_signals_to_the_node() -> None:
    """For a child that only its node may stop. Ctrl-C reaches the whole terminal, and a supervisor's SIGTERM the whole
    group or cgroup: what runs must be able to finish while the node drains."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)


async def end(process: asyncio.subprocess.Process, grace_s: float, sig: signal.Signals = signal.SIGTERM) -> int:
    """Stop a child: `sig`, then SIGKILL after `grace_s`. Its exit code."""
    if process.returncode is None:
        process.send_signal(sig)
    return await ended(process, grace_s)


async def ended(process: asyncio.subprocess.Process, grace_s: float) -> int:
    """The exit code of a child that has been told to end; SIGKILL when it has not after `grace_s`."""
    try:
        async with asyncio.timeout(grace_s):
            return await process.wait()
    except TimeoutError:
        if process.returncode is None:
            process.kill()
    return await process.wait()


async def end_all(
    processes: Sequence[asyncio.subprocess.Process], grace_s: float, sig: signal.Signals = signal.SIGTERM
) -> None:
    """Stop several children at once."""
    await asyncio.gather(*(end(process, grace_s, sig) for process in processes))


def raise_open_files() -> int:
    """Allow this process as many open files, and with them sockets, as the system lets it have. How many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


#: What a supervisor sends to a child that is not to drain any longer.
STOP_NOW = signal.SIGUSR1


class StopSignals:
    """SIGTERM and SIGINT for a service. The first asks to drain, once there is something to drain; before `ready()`, or
    when it is the second, it cancels the task that made this object.

    Of a supervised service a second one changes nothing, for it may have been sent to the whole group or cgroup, and
    then by the supervisor as well: STOP_NOW cancels."""

    def __init__(self, *, supervised: bool = False) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._ready, self._asked = task, False, asyncio.Event()
        self._supervised, self.cancelled = supervised, False
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal)
        if supervised:
            loop.add_signal_handler(STOP_NOW, self._cancel)

    def ready(self) -> None:
        self._ready = True

    async def wait(self) -> None:
        """Until it is time to drain."""
        await self._asked.wait()

    def _on_signal(self) -> None:
        if self._ready and not self._asked.is_set():
            self._asked.set()
        elif not (self._ready and self._supervised):
            self._cancel()

    def _cancel(self) -> None:
        self.cancelled = True
        self._task.cancel()
