"""One attempt on one worker, as the router sees it: commands out, events in, in order, whatever carries them.

A leg has one reader. Its queue is bounded by what the attempt can produce, so that only a worker that talks nonsense
overflows it; tokens that wait behind many others, because the reader's own client does not read, are kept together and
take little more than their four bytes each. Once a leg has failed every use of it raises that failure; what had arrived
before is still handed out, but not after it was closed. Plain tokens may be diverted: then they are taken in the call
that brings them, and nobody is woken.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn, Protocol

from prfaas.cluster import NodeId
from prfaas.errors import PeerUnavailable, PrfaasError
from prfaas.request import TOKEN_BYTES, AttemptId
from prfaas.rpc.commands import Cancel, Command, Done, Event, Failed, PrefillDone, Reserved, Tokens

Answer = Reserved | PrefillDone | Tokens | Done
#: Takes packed tokens on the spot, with the time; False when it cannot now.
Take = Callable[[bytes, float], bool]
#: Events that wait as they came, and how many tokens go into each of those behind them.
APART, TOGETHER = 64, 256


class Wire(Protocol):
    """What carries a leg."""

    def send(self, attempt: AttemptId, command: Command) -> None:
        """Raises PeerUnavailable when the wire is broken or congested. A Cancel never raises."""
        ...

    def forget(self, attempt: AttemptId) -> None:
        """The leg takes no more events."""
        ...


class Leg:
    """`network`, `handover`: of the engines' own, where the attempt's KV comes to this worker over it."""

    def __init__(self, wire: Wire, node: NodeId, attempt: AttemptId, max_events: int) -> None:
        self.node, self.attempt = node, attempt
        self.network, self.handover = "", b""
        self._wire, self._max_events = wire, max_events
        self._events: deque[Answer] = deque()
        #: Of the reader, and of whoever depends on the leg.
        self._waiting: list[asyncio.Future[None]] = []
        self._failure: PrfaasError | None = None
        self._joined_tokens = 0
        self._asked = self._ended = self._closed = False
        self._take: Take | None = None
        self._every_s = self._due_s = 0.0

    def send(self, command: Command) -> None:
        if self._failure is not None:
            raise self._failure
        self._wire.send(self.attempt, command)
        self._asked = True

    async def next(self, needed: "Leg | None" = None) -> Answer:
        """The next event of the attempt, or its failure raised. While it is `needed`, another leg's failure is one of
        this call, too."""
        while not self._events:
            for leg in (self, needed):
                if leg is not None and leg._failure is not None:
                    raise leg._failure
            await self._wait(needed)
        if self._take is not None:
            self._due_s = time.monotonic() + self._every_s
        return self._events.popleft()

    def divert(self, take: Take, every_s: float) -> None:
        """Offer plain tokens to `take` first, while nothing waits for the reader. The reader gets some
        every `every_s` all the same: whoever limits its waits sees that the stream is alive."""
        self._take, self._every_s = take, every_s
        self._due_s = time.monotonic() + every_s

    async def _wait(self, needed: "Leg | None") -> None:
        arrival = asyncio.get_running_loop().create_future()
        legs = (self,) if needed is None else (self, needed)
        for leg in legs:
            leg._waiting.append(arrival)
        try:
            await arrival
        finally:
            for leg in legs:
                leg._waiting.remove(arrival)

    async def lost(self) -> NoReturn:
        """Waits for the leg to fail, and raises that. For whoever depends on the leg without reading it."""
        while self._failure is None:
            await self._wait(None)
        raise self._failure

    def deliver(self, event: Event) -> None:
        if self._failure is not None:
            return
        match event:
            case Failed(error):
                self.end(error)
            case _:
                self._queue(event)

    def deliver_plain(self, tokens: bytes, now_s: float) -> None:
        """As `deliver` of tokens that come with nothing else. Only these may be diverted. What `take` raises is for the
        reader to find: it meets the same tokens."""
        take = self._take
        if take is not None and not self._events and now_s < self._due_s and self._failure is None:
            try:
                if take(tokens, now_s):
                    return
            except Exception:
                self._take = None
        self.deliver(Tokens(tokens=tokens))

    def _queue(self, event: Answer) -> None:
        waiting = len(self._events)
        if waiting >= self._max_events:
            self._overflowed()
        elif waiting < APART or not isinstance(event, Tokens) or not self._joined(event):
            self._ended |= isinstance(event, Done)
            self._events.append(event)
            self._wake()

    def _joined(self, new: Tokens) -> bool:
        """Whether the tokens were put to the ones that wait last."""
        last = self._events[-1]
        if not isinstance(last, Tokens) or len(last.tokens) + len(new.tokens) > TOGETHER * TOKEN_BYTES:
            return False
        self._events[-1] = replace(
            last,
            tokens=last.tokens + new.tokens,
            top_logits=last.top_logits + new.top_logits,
            scores=last.scores + new.scores,
        )
        self._joined_tokens += len(new.tokens) // TOKEN_BYTES
        if self._joined_tokens > self._max_events:
            self._overflowed()
        return True

    def _overflowed(self) -> None:
        self._fail(PeerUnavailable(self.node, f"more than {self._max_events} events of one attempt"))

    def end(self, error: PrfaasError) -> None:
        """The worker holds nothing of the attempt any more, because it said so or because the wire is gone."""
        self._ended = True
        self._fail(error)

    def close(self) -> None:
        """Lets go of the attempt, and tells the worker unless it has ended. Idempotent, never waits, never fails."""
        if self._closed:
            return
        self._closed = True
        self._events.clear()
        self._wire.forget(self.attempt)
        if self._asked and not self._ended:
            self._wire.send(self.attempt, Cancel())
        self._fail(PeerUnavailable(self.node, "the attempt was released"))

    def _fail(self, error: PrfaasError) -> None:
        if self._failure is None:
            self._failure = error
            self._wake()

    def _wake(self) -> None:
        for arrival in self._waiting:
            if not arrival.done():
                arrival.set_result(None)
