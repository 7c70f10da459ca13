"""What every loopback candidate is measured by."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    """GB/s of payload, and the CPU time, user and system, that all processes of both ends took for a GB."""

    gbytes_per_s: float
    cpu_s_per_gb: float


def median(rates: Sequence[Rate]) -> Rate:
    return Rate(
        statistics.median(rate.gbytes_per_s for rate in rates), statistics.median(rate.cpu_s_per_gb for rate in rates)
    )
