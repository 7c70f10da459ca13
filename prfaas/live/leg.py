"""One attempt on one worker, as the router sees it: commands out, events in, in order, whatever carries them.

A leg has one reader. Its queue is bounded by what the attempt can produce, so that only a worker that talks nonsense
overflows it. Once a leg has failed every use of it raises that failure; what had arrived before is still handed out,
but not after it was closed.
"""

import asyncio
from collections import deque
from typing import NoReturn, Protocol

from prfaas.cluster import NodeId
from prfaas.errors import PeerUnavailable, PrfaasError
from prfaas.request import AttemptId
from prfaas.rpc.commands import Cancel, Command, Done, Event, Failed, PrefillDone, Reserved, Tokens

Answer = Reserved | PrefillDone | Tokens | Done


class Wire(Protocol):
    """What carries a leg."""

    def send(self, attempt: AttemptId, command: Command) -> None:
        """Raises PeerUnavailable when the wire is broken or congested. A Cancel never raises."""
        ...

    def forget(self, attempt: AttemptId) -> None:
        """The leg takes no more events."""
        ...


class Leg:
    def __init__(self, wire: Wire, node: NodeId, attempt: AttemptId, max_events: int) -> None:
        self.node, self.attempt = node, attempt
        self._wire, self._max_events = wire, max_events
        self._events: deque[Answer] = deque()
        self._arrival = asyncio.Event()
        self._failed = asyncio.Event()
        self._failure: PrfaasError | None = None
        self._asked = self._ended = self._closed = False

    def send(self, command: Command) -> None:
        if self._failure is not None:
            raise self._failure
        self._wire.send(self.attempt, command)
        self._asked = True

    async def next(self) -> Answer:
        """The next event of the attempt, or its failure raised."""
        while not self._events:
            if self._failure is not None:
                raise self._failure
            self._arrival.clear()
            await self._arrival.wait()
        return self._events.popleft()

    async def lost(self) -> NoReturn:
        """Waits for the leg to fail, and raises that. For whoever depends on the leg without reading it."""
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    def deliver(self, event: Event) -> None:
        if self._failure is not None:
            return
        match event:
            case Failed(error):
                self.end(error)
            case _ if len(self._events) >= self._max_events:
                self._fail(PeerUnavailable(self.node, f"more than {self._max_events} events of one attempt"))
            case _:
                self._ended |= isinstance(event, Done)
                self._events.append(event)
                self._arrival.set()

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
            self._failed.set()
            self._arrival.set()
