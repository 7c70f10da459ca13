"""Whether open requests get anywhere: the net below the deadlines of the flow.

Every wait has a deadline of its own; this finds the request that none of them ended. A request shows how far it is in
its story, which is looked at now and then, so that nothing has to be told per token. While its client has what came
last, it is the client's turn, and the time does not count.

What must hold: a request that is waited for and has reached nothing new for longer than its stage may take is stalled,
and is told of once, and again each time it has not ended for as long after that.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from prfaas.flows.serve import ServeParams
from prfaas.flows.story import Story
from prfaas.request import Request, RequestId


class Stage(Enum):
    """What a request waits for. LOOK_UP: its route, what is cached of it included. PREFILL: room on a decode node and
    its prompt there. FIRST_TOKEN and DECODE: tokens."""

    LOOK_UP = "look_up"
    PREFILL = "prefill"
    FIRST_TOKEN = "first_token"
    DECODE = "decode"


class Stalled(NamedTuple):
    """`times` counts from 1: beyond that it was told to end, and has not."""

    open: "Open"
    stage: Stage
    seconds: float
    times: int


class _Milestone(NamedTuple):
    """As long as it is the same, nothing has been reached."""

    attempts: int = 0
    prefilled: bool = False
    output_tokens: int = 0
    finished: bool = False


@dataclass(slots=True, eq=False)
class Open:
    """One open request. `attempt_s`: the longest that one attempt may take to its next token by the deadlines of its
    flow. `waiting`: somebody waits for it; else its client has what came last."""

    request: RequestId
    story: Story
    attempt_s: float
    since: float
    waiting: bool = True
    told: int = 0
    reached: _Milestone = field(default_factory=_Milestone)


class Progress:
    """All open requests of a router process. `no_progress_s` is granted on top of what a stage may take."""

    def __init__(self, no_progress_s: float) -> None:
        self._no_progress_s = no_progress_s
        self._open: dict[Open, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, request: RequestId, story: Story, attempt_s: float, now: float) -> Open:
        new = Open(request, story, attempt_s, now, reached=_reached(story))
        self._open[new] = None
        return new

    def closed(self, one: Open) -> None:
        """Idempotent."""
        self._open.pop(one, None)

    def look(self, now: float) -> list[Stalled]:
        """Those that are stalled now, in the order in which they were opened."""
        stalled = []
        for one in self._open:
            reached = _reached(one.story)
            if reached != one.reached or not one.waiting:
                one.reached, one.since, one.told = reached, now, 0
                continue
            stage, waited_s = stage_of(one.story), now - one.since
            if waited_s > self._bound_s(one, stage) * (one.told + 1):
                one.told += 1
                stalled.append(Stalled(one, stage, waited_s, one.told))
        return stalled

    def oldest_s(self, now: float) -> float:
        """The longest that any of them has reached nothing new for, as of the last look."""
        return max((now - one.since for one in self._open if one.waiting), default=0.0)

    def check(self) -> None:
        for one in self._open:
            assert one.told >= 0
            assert one.attempt_s >= 0

    def _bound_s(self, one: Open, stage: Stage) -> float:
        """From an attempt's beginning to its first token, and after a stream was lost to the next, the deadlines follow
        one another without a milestone that is sure to show."""
        return self._no_progress_s + (0.0 if stage is Stage.LOOK_UP else one.attempt_s)


def stage_of(story: Story) -> Stage:
    if not story.attempts:
        return Stage.LOOK_UP
    if story.output_tokens:
        return Stage.DECODE
    return Stage.FIRST_TOKEN if story.prefill is not None else Stage.PREFILL


def attempt_s(request: Request, params: ServeParams) -> float:
    """The deadlines of one attempt together, from its room to its next token, with all the tokens the request may
    have."""
    tokens = request.prompt_tokens + request.sampling.max_tokens
    prefill_s = params.prefill_timeout_s + params.prefill_timeout_s_per_token * tokens
    tokens_s = params.first_token_timeout_s + params.token_gap_timeout_s + params.migration_timeout_s
    return params.reserve_timeout_s + prefill_s + tokens_s


def _reached(story: Story) -> _Milestone:
    return _Milestone(len(story.attempts), story.prefill is not None, story.output_tokens, story.finish is not None)
