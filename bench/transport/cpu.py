"""CPU time of processes, user and system, ended threads included."""

import os
from collections.abc import Iterable
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
#: utime and stime in /proc/PID/stat, counted from what follows the command's name.
_UTIME, _STIME = 11, 12


def cpu_s(pids: Iterable[int]) -> float:
    """All that these processes have used since they began."""
    return sum(_of(pid) for pid in pids)


def _of(pid: int) -> float:
    fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    return (int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS_PER_S
