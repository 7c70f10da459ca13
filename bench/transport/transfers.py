"""Transfers, driven from outside in the place of the nodes and of the router."""

import os
import selectors
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from bench.transport.nodes import Node
from prfaas.kvcache.layout import Part, whole
from prfaas.transfer.pump import messages as m

REGION = "there"
TTL_S = 300.0


@dataclass(eq=False, kw_only=True)
class Transfer:
    """One attempt, from the reservations to the releases. With `hold` its parts do not become ready by themselves."""

    source: Node
    target: Node
    tokens: int
    chunk_ends: tuple[int, ...]
    urgency: int
    tenant: str = ""
    weight: float = 1.0
    hold: bool = False
    attempt: str = field(default_factory=lambda: os.urandom(16).hex())
    here: m.Reserved | None = None
    there: m.Reserved | None = None
    sent: m.Sent | None = None
    received_at: float | None = None
    began_at: float = 0.0
    released: int = 0

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.source.layout.parts(self.tokens, self.chunk_ends)

    @property
    def nbytes(self) -> int:
        return self.source.layout.size_bytes(self.tokens)

    @property
    def is_open(self) -> bool:
        """Offered; parts may become ready."""
        return self.here is not None and self.there is not None

    @property
    def is_delivered(self) -> bool:
        return self.sent is not None and self.received_at is not None

    @property
    def is_over(self) -> bool:
        return self.released == 2

    def begin(self) -> None:
        self.began_at = time.monotonic()
        for node, receive in ((self.target, True), (self.source, False)):
            node.tell(
                m.Reserve(
                    attempt=self.attempt,
                    extent=whole(self.tokens),
                    ttl_s=TTL_S,
                    receive=receive,
                    source=self.source.name,
                )
            )

    def ready(self, parts: Iterable[Part]) -> None:
        self.source.tell(m.PartsReady(self.attempt, tuple(part.index for part in parts)))

    def handle(self, node: Node, event: m.Event) -> None:
        match event:
            case m.Reserved():
                if node is self.target:
                    self.there = event
                else:
                    self.here = event
                if self.here is not None and self.there is not None:
                    self._send(self.there)
            case m.Sent():
                self.sent = event
                self._release_when_delivered()
            case m.Received():
                self.received_at = time.monotonic()
                self._release_when_delivered()
            case m.Released():
                self.released += 1
            case _:
                raise RuntimeError(f"{node.name}: {event}")

    def verify(self) -> None:
        """The target's engine reads what the source's has."""
        here, there = self.here, self.there
        assert here is not None and there is not None
        read = self.source.engine.crc, self.target.engine.crc
        if read[0](here.span, here.nbytes) != read[1](there.span, there.nbytes):
            damaged = [
                part.index
                for part in self.parts
                if read[0](here.span + part.offset, part.nbytes) != read[1](there.span + part.offset, part.nbytes)
            ]
            raise RuntimeError(f"{self.attempt} from {here.span} arrived damaged at {there.span}: parts {damaged}")

    def _send(self, there: m.Reserved) -> None:
        self.source.tell(
            m.Send(
                attempt=self.attempt,
                address=self.target.address,
                peer_incarnation=self.target.incarnation,
                generation=there.generation,
                chunk_ends=self.chunk_ends,
                region=REGION,
                ticket=there.ticket,
                key_out=there.key_out,
                key_back=there.key_back,
                urgency=self.urgency,
                tenant=self.tenant,
                weight=self.weight,
            )
        )
        if not self.hold:
            self.ready(self.parts)

    def _release_when_delivered(self) -> None:
        if self.is_delivered:
            for node in (self.source, self.target):
                node.tell(m.Release(self.attempt))


class Driver:
    """Reads what the nodes' pumps report and gives it to the transfers it concerns. Closes the nodes at the end."""

    def __init__(self, *nodes: Node) -> None:
        self._nodes = nodes
        self._transfers: dict[str, Transfer] = {}
        self._selector = selectors.DefaultSelector()
        for node in nodes:
            self._selector.register(node.channel, selectors.EVENT_READ, node)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._selector.close()
        for node in self._nodes:
            node.close()

    def begin(self, transfer: Transfer) -> None:
        self._transfers[transfer.attempt] = transfer
        transfer.begin()

    def run_until(self, done: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not done():
            self.step(deadline - time.monotonic())
            if time.monotonic() > deadline:
                raise RuntimeError(f"not done after {limit_s} s; in flight: {[*self._transfers.values()]}")

    def step(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            node: Node = key.data
            events = node.channel.receive(0)
            if events is None:
                raise RuntimeError(f"the pump of {node.name} has ended")
            for event in events:
                self._note(node, event)

    def _note(self, node: Node, event: m.Event) -> None:
        match event:
            case m.Load():
                node.load, node.loaded_at = event, time.monotonic()
            case m.Reserved() | m.Sent() | m.Received() | m.Released() | m.Refused() | m.TransferLost():
                transfer = self._transfers[event.attempt]
                transfer.handle(node, event)
                if transfer.is_over:
                    del self._transfers[event.attempt]
            case _:
                raise RuntimeError(f"{node.name}: {event}")
