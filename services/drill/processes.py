"""Processes on this machine, named so that no other can be meant: by id and by when they began.

An id is given to another process once its owner is gone. A signal therefore goes to a descriptor of the process, and
only after its beginning was found to be the one that was written down.
"""

import os
import signal
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec


class Process(msgspec.Struct, frozen=True):
    """`began` is in the kernel's ticks since the machine's start."""

    pid: int
    began: int


class AnotherProcess(Exception):
    """It is gone; whoever has its id now is somebody else."""


@dataclass(frozen=True, slots=True)
class _Descriptor:
    fd: int

    def close(self) -> None:
        os.close(self.fd)


def identify(pid: int) -> Process | None:
    """None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The name, in brackets, may hold anything; after it come fields 3, 4, ... of which the 22nd is the beginning.
    return Process(pid, int(stat.rpartition(")")[2].split()[19]))


def alive(process: Process) -> bool:
    return identify(process.pid) == process


def send(process: Process, signum: signal.Signals) -> None:
    """Raises AnotherProcess."""
    try:
        descriptor = _Descriptor(os.pidfd_open(process.pid))
    except ProcessLookupError:
        raise AnotherProcess(process.pid) from None
    with closing(descriptor):
        # While the descriptor is open the id cannot become another's.
        if not alive(process):
            raise AnotherProcess(process.pid)
        try:
            signal.pidfd_send_signal(descriptor.fd, signum)
        except ProcessLookupError:
            raise AnotherProcess(process.pid) from None
