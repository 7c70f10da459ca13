"""How many lanes a peer is worth, and when one may be dialled again.

A lane carries about one send buffer per round trip, so a long line needs several. Lanes are opened when there is work
for them and kept; a peer whose lanes keep failing rests, twice as long each time.
"""

import math
from dataclasses import dataclass

from prfaas.transfer.frames import Cause

#: What one connection keeps on its way at most.
WINDOW_BYTES = 2_700_000
#: Over a shorter way than this lanes keep processors busy and not the line: more of them at a time only get in each
#: other's way.
NEAR_RTT_S = 1e-3
NEAR_LANES = 2


def wanted_lanes(line_bytes_per_s: float | None, rtt_s: float | None, least: int, most: int) -> int:
    """Between `least` and `most`; `least` where the line is not known."""
    if line_bytes_per_s is None or rtt_s is None:
        return least
    return max(least, min(most, math.ceil(line_bytes_per_s * rtt_s / WINDOW_BYTES)))


@dataclass(slots=True)
class Rest:
    """When a peer may be dialled. The first failure of a lane that worked costs nothing but the shortest rest."""

    shortest_s: float
    longest_s: float
    until: float = 0.0
    failures: int = 0
    cause: Cause = Cause.CONNECT
    detail: str = ""

    def failed(self, cause: Cause, detail: str, now: float) -> None:
        """Lanes that fail together count as one."""
        self.cause, self.detail = cause, detail
        if not self.over(now):
            return
        rest_s = min(self.longest_s, self.shortest_s * 2.0 ** min(self.failures, 30))
        self.until = now + rest_s
        self.failures += 1

    def recovered(self) -> None:
        """Bytes got through."""
        self.failures = 0

    def over(self, now: float) -> bool:
        return now >= self.until
