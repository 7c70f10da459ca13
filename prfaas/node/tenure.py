"""Where a worker is, who its routers are, and what each of their attempts holds on it."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from prfaas.cluster import Incarnation, NodeId, RegionId
from prfaas.request import TOKEN_BYTES, AttemptId, Sampling
from prfaas.rpc.commands import Command, Event
from prfaas.transfer.pump import messages as pump_messages


class SessionOwner(Protocol):
    """The worker as a session sees it."""

    def handle(self, session: "WorkerSession", attempt: AttemptId, command: Command) -> None: ...

    def session_closed(self, session: "WorkerSession") -> None: ...


class WorkerSession:
    """One router process's token link. After `close` nothing is emitted any more."""

    def __init__(self, worker: SessionOwner, emit: Callable[[AttemptId, Event], None]) -> None:
        self._worker, self._emit = worker, emit
        self._open = True

    def handle(self, attempt: AttemptId, command: Command) -> None:
        self._worker.handle(self, attempt, command)

    def emit(self, attempt: AttemptId, event: Event) -> None:
        if self._open:
            self._emit(attempt, event)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._worker.session_closed(self)


@dataclass(slots=True, eq=False)
class Tenure:
    """What one attempt holds on this worker. `prefilling`: from the command to the end of its prefill here."""

    attempt: AttemptId
    session: WorkerSession
    prompt: bytes
    sampling: Sampling | None = None
    span: pump_messages.Reserved | None = None
    in_engine: bool = False
    in_pump: bool = False
    prefilling: bool = False
    task: asyncio.Task[None] | None = None
    deadline: asyncio.TimerHandle | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Place:
    """Where and who this worker is."""

    node: NodeId
    region: RegionId
    incarnation: Incarnation
    kv_addresses: Mapping[str, str]
