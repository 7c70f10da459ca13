"""How much is simulated: everything that the figures rest on, or little and quick, to see that it runs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Seeds of the workload, the same for all that is compared. Durations are simulated time."""

    seeds: tuple[int, ...]
    #: In pairs: every second one mirrors the lengths of the one before it.
    sustained_seeds: tuple[int, ...]
    ttft_s: float
    sustained_s: float
    #: Of one phase of changing conditions.
    phase_s: float
    #: Of a real trace.
    trace_s: float


FULL = Effort(
    seeds=(1, 2, 3), sustained_seeds=(1, 2, 3, 4), ttft_s=1800.0, sustained_s=7200.0, phase_s=2400.0, trace_s=3600.0
)
QUICK = Effort(seeds=(1,), sustained_seeds=(1,), ttft_s=120.0, sustained_s=720.0, phase_s=120.0, trace_s=120.0)
