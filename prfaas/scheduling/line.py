"""What a link is planned with, between one queue and the next.

The estimate of a link is for the next second: it recovers within half a minute when nothing waits, as the fast loop
must find out soon that a line is wide again. Roles take minutes to change, and behind a narrow line that half of the
time nothing waits for, they would change at every look. So the slow loop goes by what the line carried while it was
pressed, and the other way round believes neither a few bad seconds nor a few good ones:

- A link is as narrow as the median estimate under a queue that lasts, once that rests on enough reports. Before that
  it is what it was before the queue.
- It is taken for wide again when it has carried more, or when no such queue was seen for some minutes.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field, replace

from prfaas.cluster import LinkState
from prfaas.scheduling.readings import known

#: What takes longer than this to send waits for the line, and is not the tail of a transfer.
LASTING_QUEUE_S = 0.5
#: Reports under a queue that are remembered. A line that becomes wider without losing its queue is believed after half
#: of them at the latest.
REMEMBERED = 120


@dataclass(slots=True)
class LineMemory:
    """`memory_s`: a narrow line counts for so long after its last queue. `needed_reports` under a queue make it one."""

    memory_s: float
    needed_reports: int
    _pressed: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _pressed_at: float = -math.inf
    #: How the link was before the queue.
    _calm: LinkState | None = None

    def see(self, link: LinkState | None, now: float) -> None:
        """Once per report."""
        if now - self._pressed_at > self.memory_s:
            self._pressed.clear()
        capacity = known(link.capacity_bytes_per_s) if link is not None else None
        if link is not None and capacity is not None and link.queued_bytes > LASTING_QUEUE_S * capacity:
            self._pressed.append(capacity)
            self._pressed_at = now
        elif not self._pressed:
            self._calm = link

    def believed(self, link: LinkState | None) -> LinkState | None:
        """The link with what it is planned with. One that nothing is known of stays so."""
        if link is None or not self._pressed:
            return link
        if link.capacity_bytes_per_s is not None and known(link.capacity_bytes_per_s) is None:
            return link
        if len(self._pressed) >= self.needed_reports:
            return replace(link, capacity_bytes_per_s=max(statistics.median(self._pressed), _goodput(link)))
        before = link if self._calm is None else self._calm
        capacity = before.capacity_bytes_per_s
        return replace(link, capacity_bytes_per_s=None if capacity is None else max(capacity, _goodput(link)))

    def check(self) -> None:
        assert all(capacity >= 0 for capacity in self._pressed)
        assert not self._pressed or self._pressed_at > -math.inf


def _goodput(link: LinkState) -> float:
    """It has just carried that."""
    return known(link.goodput_bytes_per_s) or 0.0
