"""One transfer over a fluid line, and what its sender counts. `prfaas.sim.link` decides how fast it goes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prfaas.cluster import NodeId

if TYPE_CHECKING:
    from prfaas.sim.link import Line

#: Less than this is rounding.
DUST_BYTES = 1.0


@dataclass(slots=True)
class Sender:
    """What one node has sent over the line, and for how long it had more to send than went."""

    sent_bytes: float = 0.0
    backlogged_bytes: float = 0.0
    backlogged_s: float = 0.0
    _moved_bytes: float = 0.0
    _backlogged: bool = False

    def moved(self, nbytes: float, backlogged: bool) -> None:
        self._moved_bytes += nbytes
        self._backlogged |= backlogged

    def count(self, seconds: float) -> None:
        self.sent_bytes += self._moved_bytes
        if self._backlogged:
            self.backlogged_bytes += self._moved_bytes
            self.backlogged_s += seconds
        self._moved_bytes, self._backlogged = 0.0, False


class Transfer:
    """`done` is called when the last byte has left; `failed` when nothing moved for too long."""

    __slots__ = (
        "_closed", "_fed_bytes", "_line", "done", "fail", "feed_bytes_per_s", "opened_s", "queued_bytes", "rate",
        "source",
    )  # fmt: skip

    def __init__(self, line: "Line", source: NodeId, done: Callable[[], None], fail: Callable[[], None]) -> None:
        self._line, self.source, self.done, self.fail = line, source, done, fail
        self.opened_s = line.kernel.now()
        self.queued_bytes = self.feed_bytes_per_s = self.rate = 0.0
        self._fed_bytes = 0.0
        self._closed = False

    @property
    def backlogged(self) -> bool:
        return self.queued_bytes > DUST_BYTES

    @property
    def complete(self) -> bool:
        return self._closed and not self.backlogged

    def add(self, nbytes: float) -> None:
        """These bytes are there to be sent now."""
        self._line.settle()
        self._fed_bytes += nbytes
        self.queued_bytes += nbytes
        self._line.share()

    def feed(self, bytes_per_s: float) -> None:
        """From now on as much becomes ready to be sent."""
        if bytes_per_s != self.feed_bytes_per_s:
            self._line.settle()
            self.feed_bytes_per_s = bytes_per_s
            self._line.share()

    def close(self, total_bytes: float) -> None:
        """All is there: what makes up the total is ready now, and nothing follows."""
        self._line.settle()
        self.queued_bytes = max(0.0, self.queued_bytes + total_bytes - self._fed_bytes)
        self.feed_bytes_per_s, self._closed = 0.0, True
        self._line.share()

    def cancel(self) -> None:
        """Send no more. Idempotent."""
        self._line.leave(self)

    def advance(self, seconds: float) -> float:
        """Let time pass; the bytes that went."""
        fed, moved = self.feed_bytes_per_s * seconds, self.rate * seconds
        self._fed_bytes += fed
        self.queued_bytes = max(0.0, self.queued_bytes + fed - moved)
        return moved

    def drains_in_s(self) -> float | None:
        """When the backlog will be gone, at the present rates."""
        surplus = self.rate - self.feed_bytes_per_s
        return self.queued_bytes / surplus if surplus > 0 and self.backlogged else None
