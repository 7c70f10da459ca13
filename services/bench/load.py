"""What is sent and when, decided before anything is measured: open loop, so a slow server changes nothing here.

Arrivals and lengths are the simulator's, so that a simulated and a measured run can have the same load. Equal seeds
give equal prompts; no two prompts of a run begin alike, except where a trace says that they share a prefix.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import msgspec

from prfaas.sim.trace_files import BLOCK_TOKENS, Traced, TraceFormat, read
from prfaas.sim.workload import Arrivals, Fixed, LogNormal, Workload, drawn

#: Of one run, all of which are in memory.
MAX_REQUESTS = 1_000_000
#: Each about one token in most vocabularies.
WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school"),
    *("state", "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week"),
)


class Api(Enum):
    """How prompts are asked. TOKENS are as long as they are meant to be; text is so only about."""

    TOKENS = "tokens"
    TEXT = "text"
    CHAT = "chat"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is Api.CHAT else "/v1/completions"


@dataclass(frozen=True, slots=True)
class Planned:
    """One request. `blocks` of `block_tokens` tokens each are its prefix, where a trace knows of it."""

    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    model: str
    api: Api
    seed: int
    #: Token ids are drawn from these, both included.
    low_token: int
    high_token: int
    ignore_eos: bool

    def body(self, one: Planned) -> bytes:
        told: dict[str, Any] = {
            "model": self.model,
            "max_tokens": one.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            told["ignore_eos"] = True
        match self.api:
            case Api.TOKENS:
                told["prompt"] = self._prompt(one, range(self.low_token, self.high_token + 1))
            case Api.TEXT:
                told["prompt"] = " ".join(self._prompt(one, WORDS))
            case Api.CHAT:
                told["messages"] = [{"role": "user", "content": " ".join(self._prompt(one, WORDS))}]
        return msgspec.json.encode(told)

    def _prompt(self, one: Planned, units: Any) -> list[Any]:
        prompt: list[Any] = []
        for block in one.blocks:
            prompt += random.Random(f"{self.seed}/block/{block}").choices(units, k=one.block_tokens)
        rest = one.prompt_tokens - len(prompt)
        if rest > 0:
            prompt += random.Random(f"{self.seed}/{one.number}").choices(units, k=rest)
        return prompt[: one.prompt_tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """`warm_up_s` comes before `duration_s` and is not measured. `requests` counts both."""

    warm_up_s: float
    duration_s: float
    requests: int | None
    max_context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    prompts: LogNormal | Fixed
    outputs: LogNormal | Fixed
    cv: float


@dataclass(frozen=True, slots=True)
class Replayed:
    """A trace with its own gaps between requests, stretched to the rate asked for."""

    requests: tuple[Traced, ...]
    block_tokens: int

    @classmethod
    def of(cls, path: Path, trace_format: TraceFormat, seed: int) -> "Replayed":
        return cls(tuple(read(path, trace_format, seed)), BLOCK_TOKENS.get(trace_format, 0))

    @property
    def rate_per_s(self) -> float:
        """1 where the trace says nothing of its rate."""
        span_s = self.requests[-1].at_s
        return (len(self.requests) - 1) / span_s if span_s > 0 else 1.0

    def last_number(self, bounds: "Bounds") -> int:
        """Of those that fit."""
        fitting = (number for number, each in enumerate(self.requests) if _fits(each, bounds))
        return max(fitting, default=-1)


def planned(source: Drawn | Replayed, rate_per_s: float, bounds: Bounds, seed: int) -> list[Planned]:
    """All requests of one run, in order of time; one more than `MAX_REQUESTS` where there are too many."""
    end_s = bounds.warm_up_s + bounds.duration_s
    whole = takewhile(lambda one: one.at_s < end_s, _all(source, rate_per_s, bounds, seed))
    most = MAX_REQUESTS + 1
    return list(islice(whole, most if bounds.requests is None else min(bounds.requests, most)))


def window_s(requests: Sequence[Planned], source: Drawn | Replayed, bounds: Bounds) -> float:
    """The measured time in which requests are sent: shorter than `duration_s` where their number is the bound, or the
    trace is at its end."""
    counted = bounds.requests is not None and len(requests) == bounds.requests
    if not counted and (isinstance(source, Drawn) or requests[-1].number < source.last_number(bounds)):
        return bounds.duration_s
    after = [one for one in requests if one.at_s >= bounds.warm_up_s]
    if not after:
        return bounds.duration_s
    # Of n requests the first comes at once or after a gap; the last one has a gap after it.
    span_s = after[-1].at_s - bounds.warm_up_s
    return min(bounds.duration_s, max(span_s * (len(after) + 1) / len(after), 1e-3))


def _all(source: Drawn | Replayed, rate_per_s: float, bounds: Bounds, seed: int) -> Iterable[Planned]:
    match source:
        case Drawn():
            workload = Workload(
                arrivals=Arrivals(rate_per_s=rate_per_s, cv=source.cv), prompts=source.prompts, outputs=source.outputs
            )
            for number, each in enumerate(drawn(workload, seed, bounds.max_context_tokens)):
                yield Planned(number, each.at_s, each.prompt_tokens, each.output_tokens)
        case Replayed():
            yield from _replayed(source, rate_per_s, bounds)


def _replayed(source: Replayed, rate_per_s: float, bounds: Bounds) -> Iterator[Planned]:
    """What does not fit the context is left out."""
    factor = source.rate_per_s / rate_per_s
    for number, each in enumerate(source.requests):
        if _fits(each, bounds):
            whole = Planned(number, each.at_s * factor, each.prompt_tokens, each.output_tokens)
            yield replace(whole, blocks=each.blocks, block_tokens=source.block_tokens) if source.block_tokens else whole


def _fits(each: Traced, bounds: Bounds) -> bool:
    return each.prompt_tokens + each.output_tokens <= bounds.max_context_tokens
