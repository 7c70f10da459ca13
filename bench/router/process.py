"""CPU time and memory of one process, threads included."""

import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """User and system time since it began."""
    fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def memory_mb(pid: int, kind: str = "Pss") -> float:
    """Proportional set size: pages that other processes map as well count in part. Or `Rss`, where they count whole."""
    for line in Path("/proc", str(pid), "smaps_rollup").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(pid)
