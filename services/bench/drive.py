"""Sends the requests of one run at their times and notes what comes back.

Nothing waits for answers: a request is due when its time has come. Latencies count from that time, not from when the
generator got round to sending, so that a server (or generator) that falls behind cannot hide it. How far the generator
itself was behind is measured beside: the delay of each send, the lag of its event loop, and its CPU time.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.bench.client import BadAnswer, Connections
from services.bench.load import Asking, Planned

#: How often the event loop's lag is looked at.
LOOK_S = 0.02


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: "_Delta | None" = None
    finish_reason: str | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class Outcome:
    """Times are seconds since the run began. `gaps_s` are between pieces of output. `failed` is a short name."""

    planned: Planned
    sent_s: float = 0.0
    first_s: float | None = None
    last_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int = 0
    failed: str | None = None
    detail: str = ""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.planned.at_s

    @property
    def e2e_s(self) -> float:
        return self.last_s - self.planned.at_s

    @property
    def late_s(self) -> float:
        return self.sent_s - self.planned.at_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None where there is one only."""
        if self.first_s is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)


@dataclass(slots=True)
class Driven:
    """A run: outcomes in order of intended time, and how its generator did."""

    outcomes: list[Outcome]
    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    most_in_flight: int = 0
    lags_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """`timeout_s` is for a whole answer, from the intended time on. More than `max_in_flight` are not sent at a time:
    what is due meanwhile is late, and counts as such."""

    connections: Connections
    asking: Asking
    timeout_s: float
    max_in_flight: int

    async def drive(self, requests: Sequence[Planned], advance: Callable[[], None]) -> Driven:
        run = Driven([Outcome(each) for each in requests])
        places = asyncio.Semaphore(self.max_in_flight)
        cpu_s, begun_s = time.process_time(), time.monotonic()
        watching = asyncio.create_task(_watch(run.lags_s), name="bench lag")
        in_flight = 0

        async def one(outcome: Outcome, body: bytes) -> None:
            nonlocal in_flight
            in_flight += 1
            run.most_in_flight = max(run.most_in_flight, in_flight)
            try:
                await self._ask(outcome, body, begun_s)
            finally:
                in_flight -= 1
                places.release()
                advance()

        try:
            async with asyncio.TaskGroup() as group:
                for outcome in run.outcomes:
                    # Made before its time, so that making it delays nothing.
                    body = self.asking.body(outcome.planned)
                    await _until(begun_s + outcome.planned.at_s)
                    await places.acquire()
                    group.create_task(one(outcome, body), name=f"bench request {outcome.planned.number}")
        finally:
            watching.cancel()
        run.elapsed_s, run.cpu_s = time.monotonic() - begun_s, time.process_time() - cpu_s
        return run

    async def _ask(self, outcome: Outcome, body: bytes, begun_s: float) -> None:
        outcome.sent_s = time.monotonic() - begun_s
        pieces = 0
        broken: BadAnswer | None = None

        def event(data: bytes) -> None:
            nonlocal pieces, broken
            now_s = time.monotonic() - begun_s
            if data == b"[DONE]" or broken is not None:
                return
            try:
                told = _decode(data)
            except (msgspec.MsgspecError, RecursionError) as error:
                broken = BadAnswer("protocol", str(error))
                return
            if told.error is not None:
                broken = BadAnswer("in_band", msgspec.json.encode(told.error).decode())
                return
            if told.usage is not None:
                outcome.prompt_tokens, outcome.output_tokens = told.usage.prompt_tokens, told.usage.completion_tokens
            if any(map(_carries, told.choices)):
                if outcome.first_s is None:
                    outcome.first_s = now_s
                else:
                    outcome.gaps_s.append(now_s - outcome.last_s)
                outcome.last_s, pieces = now_s, pieces + 1

        try:
            left_s = self.timeout_s - outcome.late_s
            async with asyncio.timeout(left_s):
                await self.connections.post(self.asking.api.path, body, event)
            if broken is not None:
                raise broken
            if outcome.first_s is None:
                raise BadAnswer("empty", "an answer without output")
            # An endpoint that tells no usage: a piece is taken for a token.
            outcome.output_tokens = outcome.output_tokens or pieces
        except TimeoutError:
            outcome.failed, outcome.detail = "timeout", f"not whole within {self.timeout_s:g} s"
        except BadAnswer as error:
            outcome.failed, outcome.detail = error.kind, error.detail
        except OSError as error:
            outcome.failed, outcome.detail = "connection", str(error) or type(error).__name__


def _carries(choice: _Choice) -> bool:
    """Output. A token may be part of a character and so have no text; the last piece may have none either."""
    if choice.delta is not None:
        return bool(choice.delta.content or choice.delta.reasoning_content)
    return bool(choice.text)


async def _until(when_s: float) -> None:
    """Not before: a timer counts in milliseconds, and may end early."""
    await asyncio.sleep(max(0.0, when_s - time.monotonic()))
    if time.monotonic() < when_s:
        await _until(when_s)


async def _watch(lags_s: list[float]) -> None:
    while True:
        before_s = time.monotonic()
        await asyncio.sleep(LOOK_S)
        lags_s.append(max(0.0, time.monotonic() - before_s - LOOK_S))
