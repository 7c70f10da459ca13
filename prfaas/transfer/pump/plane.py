"""What the threads of one pump share: who we are, the memory, the lanes that are open, and the way to the control
thread."""

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from prfaas.transfer import receiver, sender
from prfaas.transfer.attempts import LaneId
from prfaas.transfer.pump.lane import Lane
from prfaas.transfer.pump.mailbox import Mailbox
from prfaas.transfer.pump.messages import Probed, Start

#: Lanes each way; what would be one more is refused.
MAX_LANES = 128

Notice = receiver.FromLane | sender.FromLane | Probed


@dataclass(slots=True)
class Plane:
    start: Start
    memory: memoryview
    inbox: Mailbox[Notice] = field(default_factory=Mailbox)
    inbound: dict[LaneId, Lane] = field(default_factory=dict)
    outbound: dict[LaneId, Lane] = field(default_factory=dict)
    ids: "itertools.count[int]" = field(default_factory=itertools.count)

    @property
    def connections(self) -> int:
        return len(self.inbound) + len(self.outbound)

    @property
    def keepalive_s(self) -> float:
        """Often enough that only a broken line looks like no progress."""
        return min(1.0, self.start.no_progress_s / 4)

    def new_lane(self) -> LaneId:
        return LaneId(next(self.ids))

    def lane(self, lane_id: LaneId) -> Lane | None:
        """None once its thread has ended."""
        return self.inbound.get(lane_id) or self.outbound.get(lane_id)

    def run(self, lanes: dict[LaneId, Lane], lane: Lane, body: Callable[[Lane], None]) -> None:
        """Give the lane a thread; it is among `lanes` as long as that runs."""

        def thread() -> None:
            try:
                body(lane)
            finally:
                del lanes[lane.id]
                lane.close()

        lanes[lane.id] = lane
        threading.Thread(target=thread, name=f"lane-{lane.id}", daemon=True).start()
