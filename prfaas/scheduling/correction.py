"""What the model gets wrong, seen from how busy its stages really are.

At the present demand the model says how busy each stage should be. Where nodes that are warm report otherwise, a
request costs more or less there than its profile says, and the plan is made with costs in that ratio: bounded, because
a report may be wrong as well, and smoothed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from prfaas.profile import Profile
from prfaas.scheduling.readings import known

#: A stage is corrected by no more than this, either way.
LEAST, MOST = 0.5, 2.0
#: What should hardly be busy says nothing when it is busier than that: other work is in it.
TELLING = 0.2
#: Weight of the newest ratio.
WEIGHT = 0.5
#: A queue of up to so many seconds is ordinary. One that is `QUEUE_PER_RATIO` longer counts as another whole stage of
#: work, up to half of one.
ORDINARY_QUEUE_S, QUEUE_PER_RATIO_S, QUEUE_AT_MOST = 10.0, 60.0, 0.5


@dataclass(frozen=True, slots=True)
class StageReading:
    """How busy a stage should be by its profile and how busy its warm nodes say it is; None: not reported."""

    expected_ratio: float
    busy_ratio: float | None
    queue_s: float | None = None

    @property
    def observed_ratio(self) -> float | None:
        """A stage with a long queue is asked for more than it has, however busy it looks."""
        excess_s = (known(self.queue_s) or 0.0) - ORDINARY_QUEUE_S
        if excess_s > 0:
            return 1.0 + min(QUEUE_AT_MOST, excess_s / QUEUE_PER_RATIO_S)
        busy = known(self.busy_ratio)
        return None if busy is None else min(busy, 1.0)


@dataclass(frozen=True, slots=True)
class Correction:
    """Factors of the time that a request takes in each stage."""

    remote: float = 1.0
    prefill: float = 1.0
    decode: float = 1.0

    def towards(self, remote: StageReading, prefill: StageReading, decode: StageReading) -> "Correction":
        return Correction(_towards(self.remote, remote), _towards(self.prefill, prefill), _towards(self.decode, decode))

    def of_remote(self, profile: Profile) -> Profile:
        return slowed(profile, self.remote, self.decode)

    def of_local(self, profile: Profile) -> Profile:
        return slowed(profile, self.prefill, self.decode)


def slowed(profile: Profile, prefill: float, decode: float) -> Profile:
    """The profile of hardware that takes so many times as long."""
    curve, steps = profile.prefill, profile.decode
    return replace(
        profile,
        prefill=replace(curve, ys=tuple(y * prefill for y in curve.ys)),
        decode=steps and replace(steps, base_s=steps.base_s * decode, per_sequence_s=steps.per_sequence_s * decode),
    )


def mean(values: Iterable[float | None]) -> float | None:
    sound = [value for each in values if (value := known(each)) is not None]
    return sum(sound) / len(sound) if sound else None


def _towards(factor: float, reading: StageReading) -> float:
    """Without a reading the factor stays. What the model expects to be overfull cannot look busier than full."""
    observed, expected = reading.observed_ratio, known(reading.expected_ratio)
    if observed is None or expected is None or expected < TELLING:
        return factor
    if expected >= 1 and observed >= 1:
        return factor
    ratio = min(MOST, max(LEAST, observed / min(expected, 1.0)))
    return factor + WEIGHT * (ratio - factor)
