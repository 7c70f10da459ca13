"""Work without end: so many transfers always in flight between two workers."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.transport.transfers import Driver, Transfer


@dataclass(frozen=True, slots=True)
class Delivery:
    at: float
    nbytes: int


@dataclass(eq=False)
class Flow:
    """`make` gives the next transfer; `depth` of them are always in flight until `stop`."""

    driver: Driver
    make: Callable[[], Transfer]
    depth: int = 2
    delivered: list[Delivery] = field(default_factory=list)
    on_delivery: Callable[[Transfer], None] = lambda transfer: None
    _running: list[Transfer] = field(default_factory=list)
    _stopped: bool = False

    def start(self) -> None:
        for _ in range(self.depth):
            self._next()

    def advance(self) -> None:
        """Note what was delivered, and replace what is over."""
        for transfer in self._running:
            if transfer.is_over:
                assert transfer.received_at is not None
                self.delivered.append(Delivery(transfer.received_at, transfer.nbytes))
                self.on_delivery(transfer)
        over = sum(transfer.is_over for transfer in self._running)
        self._running = [transfer for transfer in self._running if not transfer.is_over]
        for _ in range(0 if self._stopped else over):
            self._next()

    def stop(self) -> None:
        self._stopped = True

    @property
    def is_idle(self) -> bool:
        return not self._running

    @property
    def bytes_delivered(self) -> int:
        return sum(delivery.nbytes for delivery in self.delivered)

    def _next(self) -> None:
        transfer = self.make()
        self._running.append(transfer)
        self.driver.begin(transfer)


def run_flows(driver: Driver, flows: list[Flow], done: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Keep the flows going until `done`."""
    deadline = time.monotonic() + limit_s
    while not done():
        driver.step(min(0.05, deadline - time.monotonic()))
        for flow in flows:
            flow.advance()
        if time.monotonic() > deadline:
            raise RuntimeError(f"not done after {limit_s} s")


def drain(driver: Driver, flows: list[Flow]) -> None:
    """Let what is in flight end."""
    for flow in flows:
        flow.stop()
    run_flows(driver, flows, lambda: all(flow.is_idle for flow in flows))
