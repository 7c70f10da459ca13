"""Where a worker is, who its routers are, and what each of their attempts holds on it."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from prfaas.cluster import Incarnation, NodeId, RegionId
from prfaas.kvcache.layout import Window
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


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose prefixes a prompt may share. The salt keys them apart from all others' (R11)."""

    name: str
    salt: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A cached prefix of `tokens` on its way into spans of ours, where it will be read from these windows."""

    tokens: int
    windows: tuple[Window, ...]
    spans: tuple[AttemptId, ...]
    arrival: asyncio.Task[bool]
    #: That come from another region.
    pulled_bytes: int = 0

    async def arrived(self) -> bool:
        """Whether all of it has come, and was still pinned then (R17). Who stops waiting does not end it."""
        return await asyncio.shield(self.arrival)


@dataclass(slots=True, eq=False)
class Tenure:
    """What one attempt holds on this worker. `prefilling`: from the command to the end of its prefill here. `in_pump`:
    what the pump has under whatever name for it. `aside`: what goes on for it beside `task`."""

    attempt: AttemptId
    session: WorkerSession
    prompt: bytes
    #: W3C trace context; empty: none.
    traceparent: str = ""
    #: When its latest command came, on the machine's monotonic clock.
    heard_s: float = 0.0
    sampling: Sampling | None = None
    #: None: without the cache.
    tenant: Tenant | None = None
    #: For a cache of the engine's own; empty: without it.
    salt: bytes = field(default=b"", repr=False)
    span: pump_messages.Reserved | None = None
    borrowed: Borrowed | None = None
    in_engine: bool = False
    output_tokens: int = 0
    in_pump: set[AttemptId] = field(default_factory=set)
    prefilling: bool = False
    task: asyncio.Task[None] | None = None
    aside: set[asyncio.Task[Any]] = field(default_factory=set)
    deadline: asyncio.TimerHandle | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES

    @property
    def handoff_tokens(self) -> int:
        """All but the last, which decode computes itself."""
        return self.prompt_tokens - 1

    def so_far_s(self) -> float:
        """Since its latest command came."""
        return time.monotonic() - self.heard_s

    def remaining_s(self) -> float:
        """Until its deadline."""
        assert self.deadline is not None
        return self.deadline.when() - asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True)
class Place:
    """Where and who this worker is."""

    node: NodeId
    region: RegionId
    incarnation: Incarnation
    kv_addresses: Mapping[str, str]
