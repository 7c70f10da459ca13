"""What arrives: when, how long, and how much output it wants. Equal seeds give equal requests to every policy.

Each stream has a seed of its own, and the k-th request has the same lengths at any rate: rates only stretch time. So
two policies, or two rates, are compared on common random numbers.
"""

import math
import random
from collections.abc import Iterator
from functools import cache
from statistics import NormalDist
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from prfaas.sim.structs import Lapse, Seconds, Section, Tokens
from prfaas.sim.trace_files import TraceFormat

#: Lengths and rates of a diurnal day change in so many steps.
DIURNAL_STEPS = 96

#: What rates and lengths may be multiplied by.
Factor = Annotated[float, Meta(ge=1e-4, le=1e4)]


class Arrival(NamedTuple):
    """`keys` are those of the prompt's hash units; empty where nothing is known of its contents."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    keys: bytes = b""


class Change(Section, frozen=True):
    """From `at_s` on, for `for_s` seconds (None: for good), multiply by `factor`."""

    at_s: Lapse
    factor: Factor
    for_s: Seconds | None = None

    def at(self, when_s: float) -> float:
        over = self.for_s is not None and when_s >= self.at_s + self.for_s
        return self.factor if when_s >= self.at_s and not over else 1.0

    @property
    def edges(self) -> tuple[float, ...]:
        return (self.at_s,) if self.for_s is None else (self.at_s, self.at_s + self.for_s)


class Diurnal(Section, frozen=True):
    """The rate swings around its mean by `amplitude` of it, over `period_s`; it begins at the mean and rises."""

    amplitude: Annotated[float, Meta(ge=0, lt=1)]
    period_s: Annotated[float, Meta(ge=1, le=1e9)] = 86400.0


class Arrivals(Section, frozen=True):
    """`cv`: coefficient of variation of the times between arrivals. 1 is a Poisson process, more is burstier."""

    rate_per_s: Annotated[float, Meta(gt=0, le=1e5)]
    cv: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    diurnal: Diurnal | None = None
    changes: tuple[Change, ...] = ()

    @property
    def most_per_s(self) -> float:
        """The rate at its highest."""
        edges = {0.0, *(edge for change in self.changes for edge in change.edges)}
        factor = max(math.prod(change.at(edge) for change in self.changes) for edge in edges)
        return self.rate_per_s * factor * (1.0 if self.diurnal is None else 1.0 + self.diurnal.amplitude)


class LogNormal(Section, frozen=True, tag="log_normal", tag_field="kind"):
    """ln L is normal with `mu` and `sigma`, given that L is within the bounds."""

    mu: Annotated[float, Meta(ge=-100, le=100)] = 9.90
    sigma: Annotated[float, Meta(ge=0, le=100)] = 1.00
    low_tokens: Tokens = 128
    high_tokens: Tokens = 131072

    def __post_init__(self) -> None:
        if self.low_tokens > self.high_tokens:
            raise ValueError(f"low_tokens: {self.low_tokens} is above high_tokens, {self.high_tokens}")
        if not _mass(self)[1] > 1e-9:
            raise ValueError(f"mu: no length from {self.low_tokens} to {self.high_tokens} tokens ever comes up")

    @property
    def longest_tokens(self) -> int:
        return self.high_tokens

    def draw(self, chance: random.Random, mirrored: bool = False) -> int:
        """By one uniform number u: the u-quantile, or mirrored the one of 1 - u."""
        u = chance.random()
        below, within = _mass(self)
        normal = below + within * (1.0 - u if mirrored else u)
        length = math.exp(self.mu + self.sigma * _NORMAL.inv_cdf(min(max(normal, 1e-300), 1.0 - 1e-16)))
        return min(max(round(length), self.low_tokens), self.high_tokens)


_NORMAL = NormalDist()


@cache
def _mass(lengths: LogNormal) -> tuple[float, float]:
    """Probability below the bounds, and within them."""
    if lengths.sigma == 0:
        return 0.0, 1.0
    below, above = (
        _NORMAL.cdf((math.log(bound) - lengths.mu) / lengths.sigma)
        for bound in (lengths.low_tokens, lengths.high_tokens)
    )
    return below, above - below


class Fixed(Section, frozen=True, tag="fixed", tag_field="kind"):
    tokens: Tokens

    @property
    def longest_tokens(self) -> int:
        return self.tokens

    def draw(self, chance: random.Random, mirrored: bool = False) -> int:
        return self.tokens


class Trace(Section, frozen=True):
    """A file of requests. `rate_scale` 2 replays it twice as fast; `jitter_s` moves each arrival by up to so much,
    later. `max_tokens` leaves longer prompts out. Relative paths start at the scenario's folder."""

    path: str
    format: TraceFormat
    rate_scale: Factor = 1.0
    jitter_s: Lapse = 0.0
    max_tokens: Tokens | None = None


class Workload(Section, frozen=True):
    """Drawn, or out of a trace. `length_changes` multiply prompt lengths, within the context of the model.

    `mirrors` draws the prompts of the run with that seed the other way round: long where it has short ones. The mean
    over such a pair scatters less than over two independent runs, each of which is a proper sample.
    """

    arrivals: Arrivals | None = None
    prompts: LogNormal | Fixed = LogNormal()
    outputs: LogNormal | Fixed = Fixed(tokens=1024)
    length_changes: tuple[Change, ...] = ()
    mirrors: int | None = None
    trace: Trace | None = None

    def __post_init__(self) -> None:
        if (self.arrivals is None) == (self.trace is None):
            raise ValueError("workload: exactly one of `arrivals` and `trace`")
        if self.trace is not None:
            plain = Workload(trace=None, arrivals=Arrivals(rate_per_s=1.0))
            for name in ("prompts", "outputs", "length_changes", "mirrors"):
                if getattr(self, name) != getattr(plain, name):
                    raise ValueError(f"workload: `{name}` is for requests that are drawn; the trace has its own")

    @property
    def longest_output_tokens(self) -> int | None:
        """None for a trace, of which is left out what does not fit."""
        return None if self.trace is not None else self.outputs.longest_tokens


Kind = Literal["gaps", "prompts", "outputs", "jitter", "windows"]


def stream(seed: int, kind: Kind) -> random.Random:
    """Seeding with text goes through sha512, so it is the same on every machine."""
    return random.Random(f"{seed}/{kind}")


def drawn(workload: Workload, seed: int, max_context_tokens: int) -> Iterator[Arrival]:
    """Without end."""
    assert workload.arrivals is not None
    mirrored = workload.mirrors is not None
    prompts = stream(seed if workload.mirrors is None else workload.mirrors, "prompts")
    outputs = stream(seed, "outputs")
    for at_s in arrival_times(workload.arrivals, stream(seed, "gaps")):
        factor = 1.0
        for change in workload.length_changes:
            factor *= change.at(at_s)
        output_tokens = workload.outputs.draw(outputs)
        limit = max_context_tokens - output_tokens
        prompt_tokens = max(2, min(limit, round(workload.prompts.draw(prompts, mirrored) * factor)))
        yield Arrival(at_s, prompt_tokens, output_tokens)


def arrival_times(arrivals: Arrivals, chance: random.Random) -> Iterator[float]:
    """A renewal process of unit rate, stretched so that it has the rate of each moment."""
    shape = 1.0 / arrivals.cv**2
    at_s, edges = 0.0, _edges(arrivals)
    edge_s = next(edges)
    while True:
        units = chance.expovariate(1.0) if shape == 1.0 else chance.gammavariate(shape, 1.0 / shape)
        while units > (left := (edge_s - at_s) * _rate(arrivals, at_s)):
            units, at_s = units - left, edge_s
            edge_s = next(edges)
        at_s += units / _rate(arrivals, at_s)
        yield at_s


def _edges(arrivals: Arrivals) -> Iterator[float]:
    """When the rate changes, in order and without end."""
    changes = sorted({edge for change in arrivals.changes for edge in change.edges if edge > 0})
    if arrivals.diurnal is None:
        yield from changes
        yield float("inf")
        return
    step_s, count, place = arrivals.diurnal.period_s / DIURNAL_STEPS, 1, 0
    while True:
        if place < len(changes) and changes[place] <= count * step_s:
            yield changes[place]
            count += changes[place] == count * step_s
            place += 1
        else:
            yield count * step_s
            count += 1


def _rate(arrivals: Arrivals, at_s: float) -> float:
    """Constant between two edges; a day's is that of the middle of its step."""
    rate = arrivals.rate_per_s
    for change in arrivals.changes:
        rate *= change.at(at_s)
    if (day := arrivals.diurnal) is not None:
        step = int(at_s / day.period_s * DIURNAL_STEPS + 1e-9) % DIURNAL_STEPS
        rate *= 1.0 + day.amplitude * _SINES[step]
    return rate


_SINES = tuple(math.sin(2 * math.pi * (step + 0.5) / DIURNAL_STEPS) for step in range(DIURNAL_STEPS))
