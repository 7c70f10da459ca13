"""What a sender learns about the lines it sends on: per region bytes waiting, bytes that have left, and how fast they
leave while more is waiting, which is the only time at which a sender sees what a line can carry.

A byte has left when the peer's kernel has it, by what our socket or the peer itself says; what sits in ours still
waits, and what a lost lane may have lost waits again. Counters only grow; whoever reads them takes differences. A
backlog counts from `SETTLE_S` after its beginning: until then bytes fill the line's own buffers and say nothing about
its rate.
"""

from dataclasses import dataclass

SETTLE_S = 0.1


@dataclass(frozen=True, slots=True)
class Sent:
    """Towards one region, since the start: bytes sent, and of those the ones sent while more was waiting, in so many
    seconds. `queued_bytes` is what waits now."""

    region: str
    queued_bytes: int
    sent_bytes: int
    backlogged_bytes: float
    backlogged_s: float


class EgressMeter:
    def __init__(self) -> None:
        self._regions: dict[str, _Region] = {}

    def queued(self, region: str, nbytes: int, now: float) -> None:
        """So many bytes could leave if the line took them."""
        if nbytes:
            self._regions.setdefault(region, _Region()).change(nbytes, now)

    def sent(self, region: str, nbytes: int, now: float) -> None:
        """So many of the bytes queued have left since this was last told, spread over that time."""
        if nbytes:
            self._regions[region].sent(nbytes, now)

    def dropped(self, region: str, nbytes: int, now: float) -> None:
        """So many of the bytes queued will not be sent."""
        if nbytes:
            self._regions[region].change(-nbytes, now)

    def readings(self, now: float) -> tuple[Sent, ...]:
        return tuple(self._regions[region].reading(region, now) for region in sorted(self._regions))

    def check(self) -> None:
        for region in self._regions.values():
            assert region.queued_bytes >= 0, "more was sent than was queued"
            assert region.backlogged_bytes <= region.sent_bytes * (1 + 1e-9)


class _Region:
    def __init__(self) -> None:
        self.queued_bytes = self.sent_bytes = 0
        self.backlogged_bytes = 0.0
        self._backlogged_s = 0.0
        #: From when the present backlog counts; None without one.
        self._counts_from: float | None = None
        #: When bytes were last seen to leave, or began to wait; and how much of the time since then counts.
        self._looked_at = self._passed_at = 0.0
        self._counted_s = 0.0

    def change(self, nbytes: int, now: float) -> None:
        self._pass(now)
        self.queued_bytes += nbytes
        if not self.queued_bytes:
            self._backlogged_s += self._counted_s
            self._counts_from, self._counted_s = None, 0.0
        elif self._counts_from is None:
            self._counts_from = now + SETTLE_S
            self._looked_at, self._counted_s = now, 0.0

    def sent(self, nbytes: int, now: float) -> None:
        self._pass(now)
        self.sent_bytes += nbytes
        elapsed_s = now - self._looked_at
        if elapsed_s > 0:
            self.backlogged_bytes += nbytes * min(1.0, self._counted_s / elapsed_s)
            self._backlogged_s += self._counted_s
            self._looked_at, self._counted_s = now, 0.0
        self.change(-nbytes, now)

    def reading(self, region: str, now: float) -> Sent:
        """Time in which nothing has left yet counts with the bytes that will."""
        self._pass(now)
        backlogged_s = self._backlogged_s + self._counted_s
        return Sent(region, self.queued_bytes, self.sent_bytes, self.backlogged_bytes, backlogged_s)

    def _pass(self, now: float) -> None:
        if self._counts_from is not None:
            self._counted_s += max(0.0, now - max(self._counts_from, self._passed_at))
        self._passed_at = max(self._passed_at, now)
