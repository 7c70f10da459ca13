"""One living connection to a worker, whatever carries it: commands out, each event to the leg of its attempt.

When the connection ends, for whatever reason, every open leg fails at once.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from prfaas.cluster import Incarnation, NodeId
from prfaas.errors import PeerUnavailable, PrfaasError, Stopping
from prfaas.live.leg import Leg
from prfaas.request import AttemptId
from prfaas.rpc.commands import Cancel, Command
from prfaas.rpc.plain_tokens import events
from prfaas.rpc.translate import MAX_COMMAND_BYTES, encode_command, pack_attempt, unpack_event

#: Commands that wait because the worker does not read. Beyond this it is treated as unreachable.
MAX_WAITING_BYTES = 128 << 20


@dataclass(slots=True)
class LinkCounters:
    """Totals over all links that share it. `late_events` belong to attempts that were released or never known here."""

    connections: int = 0
    failed_connections: int = 0
    commands: int = 0
    messages_sent: int = 0
    events: int = 0
    messages_received: int = 0
    late_events: int = 0


class LinkStream(Protocol):
    """From the moment it is connected until it breaks."""

    @property
    def board(self) -> "Switchboard": ...

    async def run(self) -> None:
        """Until the stream ends; then the connection is closed. Cancelling it closes the connection, too."""
        ...


class Switchboard:
    """The open legs of one stream, and their commands that wait to be sent, oldest first. `wake` is called when there
    is something to `take` again; it must not take it in the call, so that what comes in one turn leaves together."""

    def __init__(self, node: NodeId, counters: LinkCounters, wake: Callable[[], None]) -> None:
        self._node, self._counters, self._wake = node, counters, wake
        self._legs: dict[bytes, Leg] = {}
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._broken: str | Stopping | None = None

    @property
    def alive(self) -> bool:
        return self._broken is None

    @property
    def open_legs(self) -> int:
        return len(self._legs)

    def open(self, attempt: AttemptId, max_events: int) -> Leg:
        if self._broken is not None:
            raise broken_by(self._node, self._broken)
        packed = pack_attempt(attempt)
        assert packed not in self._legs, attempt
        leg = self._legs[packed] = Leg(self, self._node, attempt, max_events)
        return leg

    def send(self, attempt: AttemptId, command: Command) -> None:
        is_cancel = isinstance(command, Cancel)
        if self._broken is not None:
            if is_cancel:
                return
            raise broken_by(self._node, self._broken)
        encoded = encode_command(attempt, command)
        if not is_cancel and self._waiting_bytes + len(encoded) > MAX_WAITING_BYTES:
            raise PeerUnavailable(self._node, f"{self._waiting_bytes} bytes of commands are waiting to be read")
        if not self._waiting:
            self._wake()
        self._waiting.append(encoded)
        self._waiting_bytes += len(encoded)

    def forget(self, attempt: AttemptId) -> None:
        self._legs.pop(pack_attempt(attempt), None)

    def take(self) -> list[bytes]:
        """As many waiting commands as go into one message; at least one, when there are any."""
        batch, size = [], 0
        while self._waiting and size < MAX_COMMAND_BYTES:
            command = self._waiting.popleft()
            batch.append(command)
            size += len(command)
        if batch:
            self._waiting_bytes -= size
            self._counters.messages_sent += 1
            self._counters.commands += len(batch)
        return batch

    def deliver(self, message: bytes) -> None:
        """Raises protobuf's DecodeError for what is no serialized pb.FromWorker; the events before it are delivered."""
        legs, count, late, now_s = self._legs, 0, 0, time.monotonic()
        for attempt, said in events(message):
            count += 1
            if (leg := legs.get(attempt)) is None:
                late += 1
            elif isinstance(said, bytes):
                leg.deliver_plain(said, now_s)
            elif (event := unpack_event(said, leg.attempt, self._node)) is not None:
                leg.deliver(event)
        self._counters.messages_received += 1
        self._counters.events += count
        self._counters.late_events += late

    def end(self, reason: str | Stopping) -> None:
        """Fails every open leg. Idempotent: the first reason is the reason."""
        if self._broken is None:
            self._broken = reason
            self._waiting.clear()
        legs, self._legs = self._legs, {}
        for leg in legs.values():
            leg.end(broken_by(self._node, self._broken))


def broken_by(node: NodeId, reason: str | Stopping) -> PrfaasError:
    """What it means to whoever uses the link: the node is lost, unless it was this side that ended it."""
    return PeerUnavailable(node, reason) if isinstance(reason, str) else Stopping(reason.what)


def another_life(node: NodeId, address: str, found: NodeId, wanted: Incarnation, life: Incarnation) -> None:
    """Raises PeerUnavailable when what was found at the address is not what was meant."""
    if (found, life) != (node, wanted):
        raise PeerUnavailable(node, f"{address} is now another life, or another node: {found}")
