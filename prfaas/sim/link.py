"""A line between two regions as a fluid: what is being transferred shares it max-min fairly.

A transfer is fed while its prefill computes and closed when that is done. While it has more than the line lets it send
it is *backlogged* and takes an equal share; otherwise it takes only what is fed. Rates change when something starts,
ends, drains or the line steps, and at no other time. Bytes are floats here; callers round.
"""

from collections.abc import Callable

from prfaas.cluster import NodeId
from prfaas.sim.kernel import Kernel, Timer
from prfaas.sim.transfer import Sender, Transfer


class Line:
    """One direction. `give_up_s`: a transfer on which nothing moves for that long has failed."""

    def __init__(self, kernel: Kernel, capacity_bytes_per_s: float, give_up_s: float = 10.0) -> None:
        self.kernel = kernel
        self.capacity_bytes_per_s = capacity_bytes_per_s
        self._give_up_s = give_up_s
        self._transfers: dict[Transfer, None] = {}
        self._senders: dict[NodeId, Sender] = {}
        self._settled_s = kernel.now()
        self._down_since_s = kernel.now()
        self._timer: Timer | None = None

    @property
    def down(self) -> bool:
        return self.capacity_bytes_per_s <= 0

    @property
    def transfers(self) -> int:
        return len(self._transfers)

    @property
    def sent_bytes(self) -> float:
        self.settle()
        return sum(sender.sent_bytes for sender in self._senders.values())

    @property
    def waiting_bytes(self) -> float:
        """What all transfers have queued."""
        self.settle()
        return sum(transfer.queued_bytes for transfer in self._transfers)

    def open(self, source: NodeId, done: Callable[[], None], fail: Callable[[], None]) -> Transfer:
        transfer = Transfer(self, source, done, fail)
        self.settle()
        self._transfers[transfer] = None
        if self.down:
            self.kernel.call_later(self._give_up_s, self._give_up)
        return transfer

    def step(self, capacity_bytes_per_s: float) -> None:
        """The line is this fast from now on; 0 is a cut."""
        self.settle()
        if capacity_bytes_per_s <= 0 and not self.down:
            self._down_since_s = self.kernel.now()
            self.kernel.call_later(self._give_up_s, self._give_up)
        self.capacity_bytes_per_s = max(0.0, capacity_bytes_per_s)
        self.share()

    def sender(self, node: NodeId) -> Sender:
        """The counters of a node, up to now."""
        self.settle()
        return self._senders.setdefault(node, Sender())

    def queued_bytes(self, node: NodeId) -> int:
        self.settle()
        return int(sum(transfer.queued_bytes for transfer in self._transfers if transfer.source == node))

    def leave(self, transfer: Transfer) -> None:
        if transfer in self._transfers:
            self.settle()
            del self._transfers[transfer]
            self.share()

    def settle(self) -> None:
        """Account for the time since rates last changed."""
        seconds = self.kernel.now() - self._settled_s
        if seconds <= 0:
            return
        self._settled_s = self.kernel.now()
        senders: dict[NodeId, Sender] = {}
        for transfer in self._transfers:
            sender = senders.get(transfer.source)
            if sender is None:
                sender = senders[transfer.source] = self._senders.setdefault(transfer.source, Sender())
            backlogged = transfer.backlogged
            sender.moved(transfer.advance(seconds), backlogged)
        for sender in senders.values():
            sender.count(seconds)

    def share(self) -> None:
        """Give each transfer its rate by filling up: who is fed less than an equal share takes that much and no more.
        Then wait for the next drain."""
        rest, taking, limited = self.capacity_bytes_per_s, 0, []
        for transfer in self._transfers:
            if transfer.backlogged:
                taking += 1
            elif transfer.feed_bytes_per_s > 0:
                limited.append(transfer)
            else:
                transfer.rate = 0.0
        taking += len(limited)
        if len(limited) > 1:
            limited.sort(key=lambda transfer: transfer.feed_bytes_per_s)
        equal = rest / taking if taking else 0.0
        for transfer in limited:
            if transfer.feed_bytes_per_s <= equal:
                transfer.rate = transfer.feed_bytes_per_s
                rest, taking = rest - transfer.rate, taking - 1
                equal = rest / taking if taking else 0.0
            else:
                transfer.rate = equal
        for transfer in self._transfers:
            if transfer.backlogged:
                transfer.rate = equal
        self._wait()

    def check(self) -> None:
        rates = sum(transfer.rate for transfer in self._transfers)
        assert rates <= self.capacity_bytes_per_s * (1 + 1e-9), "more goes over the line than fits"
        assert all(transfer.queued_bytes >= 0 for transfer in self._transfers)

    def check_idle(self) -> None:
        self.check()
        assert not self._transfers, f"{len(self._transfers)} transfers are left on the line"

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        drains, ended = [], False
        for transfer in self._transfers:
            if (seconds := transfer.drains_in_s()) is not None:
                drains.append(seconds)
            ended |= transfer.complete
        if ended:
            self._timer = self.kernel.call_later(0.0, self._drained)
        elif drains:
            self._timer = self.kernel.call_later(min(drains), self._drained)

    def _drained(self) -> None:
        self._timer = None
        self.settle()
        ended = [transfer for transfer in self._transfers if transfer.complete]
        for transfer in ended:
            del self._transfers[transfer]
        self.share()
        for transfer in ended:
            transfer.done()

    def _give_up(self) -> None:
        """Fail what has waited for a dead line as long as it may."""
        if not self.down:
            return
        latest_s = self.kernel.now() - self._give_up_s + 1e-9
        if self._down_since_s > latest_s:
            return
        stalled = [transfer for transfer in self._transfers if transfer.opened_s <= latest_s]
        for transfer in stalled:
            self.leave(transfer)
        for transfer in stalled:
            transfer.fail()
