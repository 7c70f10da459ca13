"""An answer that waits for its turn, and that its caller's deadline for the first token ends until there is one."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from prfaas.errors import DeadlineExceeded
from prfaas.request import Request
from services.router.admission_port import AdmissionPort, Caller
from services.router.openai.record import RequestLog

T = TypeVar("T")


async def in_turn(
    admission: AdmissionPort,
    caller: Caller,
    requests: Sequence[Request],
    received_s: float,
    record: RequestLog,
    answer: AsyncGenerator[T, None],
    now: Callable[[], float],
) -> AsyncGenerator[T, None]:
    """What `answer` yields, which is begun when it is its turn. `requests` are all the sequences it is made of; the
    wait goes into the record, and its end into their stories. What was produced is what the record has at the end."""
    async with admission.admitted(caller, requests, received_s) as grant, aclosing(answer):
        record.waited(now())
        for story in record.stories:
            story.arrived_s = record.lap_s
        try:
            yield await _first(answer, caller.ttft_deadline_s, received_s)
            async for piece in answer:
                yield piece
        finally:
            grant.produced(record.output_tokens)


async def _first(answer: AsyncGenerator[T, None], deadline_s: float | None, received_s: float) -> T:
    if deadline_s is None:
        return await anext(answer)
    limit = asyncio.timeout_at(received_s + deadline_s)
    try:
        async with limit:
            return await anext(answer)
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded("time to first token", deadline_s) from None
