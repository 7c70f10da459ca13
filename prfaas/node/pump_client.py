"""The node's end of its pump process: spans and transfers, by attempt."""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

from prfaas.errors import KV_ROOM, ConfigError, InvalidRequest, Overloaded, PeerUnavailable, TransferFailed
from prfaas.ipc import AsyncChannel
from prfaas.kvcache.layout import Extent, Window
from prfaas.node.answers import Pulse, answered
from prfaas.request import AttemptId
from prfaas.transfer.frames import Cause
from prfaas.transfer.pump import messages

T = TypeVar("T")

_EMPTY = messages.Load(
    free_bytes=0,
    total_bytes=0,
    spans=0,
    connections=0,
    sent_bytes_total=0,
    received_bytes_total=0,
    refused_frames_total=0,
    failed_transfers_total=0,
)

#: The pump answers reservations at once and releases within its no-progress time.
ANSWER_DEADLINE_S = 30.0
#: It reports its load about four times a second, whatever its lanes do.
SILENCE_S = 10.0


class PumpClient:
    """Futures by attempt: at most one reservation and one transfer each.

    `load` is what the pump last reported, `allowed` what may leave for a region where the leader says so. Beside that
    the client counts what only shows at the end of a transfer: bytes `received`, by the region they came from; bytes of
    those delivered that were `resent`; transfers `failed`, by cause.
    """

    def __init__(self, node: str, channel: AsyncChannel[messages.Event]) -> None:
        self._node, self._channel = node, channel
        self._reserved: dict[str, asyncio.Future[messages.Reserved]] = {}
        self._moved: dict[str, asyncio.Future[messages.Sent | messages.Received]] = {}
        self._released: dict[str, asyncio.Future[None]] = {}
        self._probed: dict[str, asyncio.Future[int | None]] = {}
        self._port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._sources: dict[str, str] = {}
        self._tokens: dict[str, int] = {}
        self.load = _EMPTY
        self.allowed: dict[str, float] = {}
        self.received: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.resent_bytes = 0
        self.pulse = Pulse(f"pump of {node}")

    async def start(self, command: messages.Start) -> int:
        """Start the pump; the port that it listens on. Raises ConfigError when it cannot."""
        self._channel.send(command)
        return await self._answered(asyncio.shield(self._port))

    async def run(self) -> None:
        """Deliver events until the pump is gone; then raise PeerUnavailable."""
        while (event := await self._channel.receive()) is not None:
            self.pulse.beat()
            self._deliver(event)
        raise PeerUnavailable(f"pump of {self._node}", "its process ended")

    def _deliver(self, event: messages.Event) -> None:
        match event:
            case messages.Listening():
                self._port.set_result(event.port)
            case messages.CannotListen(detail=detail):
                self._port.set_exception(ConfigError("kv.port", detail))
            case messages.Load():
                self.load = event
            case messages.Reserved():
                _resolve(self._reserved.pop(event.attempt, None), event)
            case messages.Refused(wrong=wrong):
                refusal = InvalidRequest(wrong, param="windows") if wrong else Overloaded(KV_ROOM)
                _reject(self._reserved.pop(event.attempt, None), refusal)
            case messages.Sent():
                self.resent_bytes += event.resent_bytes
                _resolve(self._moved.get(event.attempt), event)
            case messages.Received():
                self.received[self._sources.pop(event.attempt, "")] += event.payload_bytes
                _resolve(self._moved.get(event.attempt), event)
            case messages.TransferLost():
                self.failed[event.cause] += event.cause != Cause.ABORTED.value
                lost = TransferFailed(event.attempt, event.cause, event.detail, event.boundary_tokens)
                _reject(self._moved.get(event.attempt), lost)
            case messages.Released():
                _resolve(self._released.pop(event.attempt, None), None)
            case messages.Probed():
                _resolve(self._probed.pop(event.address, None), event.incarnation)

    async def reserve(
        self,
        attempt: AttemptId,
        extent: Extent,
        ttl_s: float,
        *,
        receive: bool,
        source: str = "",
        source_region: str = "",
    ) -> messages.Reserved:
        """A span for the extent, of the pump's choice; with `receive`, `moved` awaits the transfer into it, which only
        the node `source` may begin. Raises Overloaded."""
        command = messages.Reserve(attempt=attempt, extent=extent, ttl_s=ttl_s, receive=receive, source=source)
        return await self._held(command, source_region)

    async def bring(
        self,
        attempt: AttemptId,
        extent: Extent,
        windows: tuple[Window, ...],
        ttl_s: float,
        *,
        receive: bool,
        source: str = "",
        source_region: str = "",
    ) -> messages.Reserved:
        """As `reserve`, with memory of our own. Until `release` returns it is the pump's, however the transfer ends."""
        command = messages.Bring(
            attempt=attempt, extent=extent, windows=windows, ttl_s=ttl_s, receive=receive, source=source
        )
        return await self._held(command, source_region)

    async def _held(self, command: messages.Reserve | messages.Bring, source_region: str) -> messages.Reserved:
        attempt, loop = command.attempt, asyncio.get_running_loop()
        future = self._reserved[attempt] = loop.create_future()
        if command.receive:
            self._sources[attempt], self._tokens[attempt] = source_region, command.extent.stop
            self._moved[attempt] = loop.create_future()
        self._channel.send(command)
        return await self._answered(future)

    def send(self, command: messages.Send) -> None:
        """Begin to push what the attempt's memory holds; `moved` waits for the end."""
        self._moved[command.attempt] = asyncio.get_running_loop().create_future()
        self._channel.send(command)

    def allow(self, region: str, bytes_per_s: float | None) -> None:
        """How much may leave for a region from now on; None: as much as the line takes."""
        self.allowed[region] = math.inf if bytes_per_s is None else bytes_per_s
        self._channel.send(messages.Allow(region, bytes_per_s))

    def parts_ready(self, attempt: AttemptId, parts: Iterable[int]) -> None:
        self._channel.send(messages.PartsReady(attempt, tuple(parts)))

    async def moved(self, attempt: AttemptId) -> messages.Sent | messages.Received:
        """The transfer of the attempt, complete and checked. Raises TransferFailed."""
        return await asyncio.shield(self._moved[attempt])

    async def stopped(self, attempt: AttemptId) -> int:
        """Let no more of an incoming transfer in. Up to which row all of the extent has arrived and was checked;
        nothing touches these any more."""
        self._channel.send(messages.Stop(attempt))
        try:
            await self._answered(asyncio.shield(self._moved[attempt]))
        except TransferFailed as lost:
            return lost.boundary_tokens
        return self._tokens[attempt]

    async def release(self, attempt: AttemptId) -> None:
        """End the attempt's transfer and give its memory back; when this returns nothing touches it. Idempotent."""
        self._sources.pop(attempt, None)
        self._tokens.pop(attempt, None)
        if moved := self._moved.pop(attempt, None):
            _reject(moved, TransferFailed(attempt, "released"))
        future = self._released.get(attempt)
        if future is None:
            future = self._released[attempt] = asyncio.get_running_loop().create_future()
            self._channel.send(messages.Release(attempt))
        await self._answered(asyncio.shield(future))

    async def probe(self, address: str) -> int | None:
        """Incarnation of the pump that answers at `address`, None if none does."""
        future = self._probed.setdefault(address, asyncio.get_running_loop().create_future())
        self._channel.send(messages.Probe(address))
        return await self._answered(asyncio.shield(future))

    async def _answered(self, answer: Awaitable[T]) -> T:
        return await answered(f"pump of {self._node}", ANSWER_DEADLINE_S, answer)


def _resolve(future: asyncio.Future[Any] | None, value: Any) -> None:
    if future and not future.done():
        future.set_result(value)


def _reject(future: asyncio.Future[Any] | None, error: Exception) -> None:
    if future and not future.done():
        future.set_exception(error)
        future.exception()  # a failure that nobody waits for is no news: the attempt was released
