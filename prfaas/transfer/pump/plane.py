"""What the threads of one pump share: who we are, the memory, the two machines, and the way to the control thread.

Lane threads call the machines themselves, each under its one lock: a hop through another thread for every frame would
cost more than the frame. A lock is held for the machine's own work only, never over a system call, a checksum or a
cipher. What a machine commands is filed for the control thread before the lock is let go, so that it is carried out in
the order in which it was decided; only waking a lane is done at once.
"""

import itertools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from prfaas.transfer import incoming, outgoing
from prfaas.transfer.attempts import LaneId
from prfaas.transfer.egress import Sent
from prfaas.transfer.frames import Header, ProtocolError
from prfaas.transfer.pump.lane import Lane
from prfaas.transfer.pump.mailbox import Mailbox
from prfaas.transfer.pump.messages import Probed, Start
from prfaas.transfer.receiver import Receiver
from prfaas.transfer.sender import Sender
from prfaas.transfer.tickets import Keys, keys

#: Lanes each way; what would be one more is refused.
MAX_LANES = 128
_KEYS = 1024

Command = incoming.Command | outgoing.Command
Notice = Command | Probed


@dataclass(slots=True)
class Plane:
    """`numbers` names lanes of either direction, those of the Sender too: no two have the same. `memory`: the pool.
    `held`: attempts that have windows of it, and only these may be touched. `back_keys`: what opens the answers to
    those that we send."""

    start: Start
    memory: memoryview
    secret: bytes = field(repr=False)
    sender: Sender
    receiver: Receiver
    numbers: "itertools.count[int]"
    inbox: Mailbox[Notice] = field(default_factory=Mailbox)
    inbound: dict[LaneId, Lane] = field(default_factory=dict)
    outbound: dict[LaneId, Lane] = field(default_factory=dict)
    probes: dict[LaneId, Lane] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    back_keys: dict[str, bytes] = field(default_factory=dict, repr=False)
    _sending: threading.Lock = field(default_factory=threading.Lock)
    _receiving: threading.Lock = field(default_factory=threading.Lock)

    @property
    def sealing(self) -> bool:
        return self.start.integrity == "aes-gcm"

    @property
    def connections(self) -> int:
        return len(self.inbound) + len(self.outbound) + len(self.probes)

    @property
    def silence_s(self) -> float:
        """After so long without a sign a lane is given up: soon enough for what it carried to be sent again before an
        attempt is."""
        return self.start.no_progress_s / 2

    @property
    def keepalive_s(self) -> float:
        """Often enough that only a broken line looks silent."""
        return min(1.0, self.silence_s / 4)

    def new_lane(self) -> LaneId:
        """For lanes that the Sender does not know."""
        return LaneId(next(self.numbers))

    def new_salt(self) -> int:
        """No two lanes of this process have the same, in whichever direction they were dialled."""
        return next(self.numbers)

    def keys(self, attempt: str) -> Keys:
        """Of an attempt that is sent to us, open or not."""
        return _keys(self.secret, attempt)

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

    # The sending side.

    def tell_sender(self, event: outgoing.Event) -> None:
        with self._sending:
            called = self._file(self.sender.handle(event))
        self._call(called)

    def take(self, lane: LaneId, max_bytes: int, now: float) -> outgoing.Work | None:
        with self._sending:
            return self.sender.take(lane, max_bytes, now)

    def wrote(self, lane: LaneId, now: float) -> None:
        with self._sending:
            called = self._file(self.sender.wrote(lane, now))
        self._call(called)

    def readings(self, now: float) -> list[tuple[Sent, float, float | None]]:
        """Of each region that is sent to, how long its work has waited, and for how long nothing has come back."""
        with self._sending:
            return [
                (sent, self.sender.queue_age_s(sent.region, now), self.sender.stalled_s(sent.region, now))
                for sent in self.sender.egress.readings(now)
            ]

    # The receiving side. A ProtocolError of the machine has been counted by it.

    def tell_receiver(self, event: incoming.Event) -> None:
        with self._receiving:
            try:
                called = self._file(self.receiver.handle(event))
            except ProtocolError as error:
                error.counted = True
                raise
        self._call(called)

    def claim(self, lane: LaneId, header: Header, now: float) -> incoming.Place | incoming.Discard:
        with self._receiving:
            try:
                return self.receiver.claim(lane, header, now)
            except ProtocolError as error:
                error.counted = True
                raise

    def landed(self, lane: LaneId, now: float) -> None:
        with self._receiving:
            called = self._file(self.receiver.landed(lane, now))
        self._call(called)

    def missed(self, lane: LaneId, error: ProtocolError, now: float) -> None:
        with self._receiving:
            called = self._file(self.receiver.missed(lane, error.cause, error.detail, now))
        self._call(called)

    def replies(self, lane: LaneId) -> list[incoming.Reply]:
        with self._receiving:
            return self.receiver.replies(lane)

    def _file(self, commands: Iterable[Command]) -> list[Command]:
        """Under the machine's lock. What is left to be done without it."""
        commands = list(commands)
        for command in commands:
            if not isinstance(command, outgoing.Wake | incoming.Answerable):
                self.inbox.put(command, wake=False)
        return commands

    def _call(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case outgoing.Wake():
                    lanes = [self.outbound.get(lane) for lane in command.lanes]
                case incoming.Answerable():
                    lanes = [self.inbound.get(lane) for lane in command.lanes]
                case _:
                    self.inbox.wake()
                    continue
            for lane in lanes:
                if lane is not None:
                    lane.wake()


_keys = lru_cache(_KEYS)(keys)
