"""The outgoing lanes as lines to regions: how fast each may send, and what the kernel says about it.

A region's allowance is split evenly over the lanes that are sending there now; one that sleeps has what it may send if
all of them wake up between two looks. The kernel spaces the packets, so that an allowance costs no work per frame.
"""

from dataclasses import dataclass, field

from prfaas.transfer.egress import Sent
from prfaas.transfer.outgoing import Peer, Sampled
from prfaas.transfer.pump.lane import Lane
from prfaas.transfer.pump.messages import Egress
from prfaas.transfer.pump.plane import Plane

#: Peers whose region is remembered.
_PEERS = 4096


@dataclass(slots=True)
class _Region:
    """What lanes that are gone have left behind, and what those that are open say."""

    retransmitted_bytes: int = 0
    unsent_bytes: int = 0
    lanes: int = 0
    rtt_s: float | None = None
    congestion: str = ""
    allowed_bytes_per_s: float | None = None
    seen: dict[int, int] = field(default_factory=dict)


class Lines:
    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._of_peer: dict[Peer, str] = {}
        self._regions: dict[str, _Region] = {}
        #: Lanes that had something on its way at the last look.
        self._sending: frozenset[int] = frozenset()
        #: How much lanes had written when all of it was seen to have left.
        self._settled: dict[int, int] = {}

    def belongs(self, peer: Peer, region: str) -> None:
        self._of_peer[peer] = region
        if len(self._of_peer) > _PEERS:
            del self._of_peer[next(iter(self._of_peer))]

    def lane(self, lane: Lane, peer: Peer) -> Lane:
        """A lane that is about to be dialled."""
        lane.region = self._of_peer.get(peer, "")
        return lane

    def allow(self, region: str, bytes_per_s: float | None) -> None:
        self._region(region).allowed_bytes_per_s = bytes_per_s
        self.pace()

    def pace(self) -> None:
        """There is another lane, or another allowance."""
        self._pace(self._lanes())

    @property
    def busy(self) -> bool:
        return any(self._is_due(lane) for lane in self._lanes())

    def sample(self, now: float) -> None:
        """How much of what the lanes have written is on its way, and how long a way it is."""
        unacknowledged, rtt_s = {}, {}
        lanes = self._lanes()
        for lane in lanes:
            if not self._is_due(lane):
                continue
            written, on_its_way = lane.written, lane.unacknowledged()
            if not on_its_way:
                self._settled[lane.id] = written
            # The Sender counts what is being written when it is done; its part that is on its way has left before.
            unacknowledged[lane.id] = on_its_way - lane.taken
            info = lane.info()
            if info is not None and info.rtt_s is not None:
                rtt_s[lane.id] = info.rtt_s
        self._sending = frozenset(lane.id for lane in lanes if not lane.asleep or unacknowledged.get(lane.id, 0) > 0)
        self._pace(lanes)
        self._plane.tell_sender(Sampled(unacknowledged, now, rtt_s))

    def report(self, now: float) -> tuple[Egress, ...]:
        for region in self._regions.values():
            region.lanes, region.unsent_bytes, region.rtt_s = 0, 0, None
        lanes = self._lanes()
        for lane in lanes:
            self._look(self._region(lane.region), lane)
        open_lanes = {lane.id for lane in lanes}
        for region in self._regions.values():
            region.seen = {lane: seen for lane, seen in region.seen.items() if lane in open_lanes}
        self._settled = {lane: written for lane, written in self._settled.items() if lane in open_lanes}
        return tuple(self._egress(*reading) for reading in self._plane.readings(now))

    def _look(self, region: _Region, lane: Lane) -> None:
        info = lane.info()
        if info is None:
            return
        region.lanes += 1
        region.unsent_bytes += info.unsent_bytes
        region.retransmitted_bytes += info.retransmitted_bytes - region.seen.get(lane.id, 0)
        region.seen[lane.id] = info.retransmitted_bytes
        region.congestion = lane.congestion() or region.congestion
        if info.rtt_s is not None:
            region.rtt_s = info.rtt_s if region.rtt_s is None else min(region.rtt_s, info.rtt_s)

    def _egress(self, sent: Sent, queue_age_s: float, stalled_s: float | None) -> Egress:
        region = self._region(sent.region)
        return Egress(
            region=sent.region,
            queued_bytes=sent.queued_bytes,
            sent_bytes=sent.sent_bytes,
            backlogged_bytes=sent.backlogged_bytes,
            backlogged_s=sent.backlogged_s,
            lanes=region.lanes,
            rtt_s=region.rtt_s,
            retransmitted_bytes=region.retransmitted_bytes,
            unsent_bytes=region.unsent_bytes,
            queue_age_s=queue_age_s,
            congestion=region.congestion,
            stalled_s=stalled_s,
        )

    def _pace(self, lanes: list[Lane]) -> None:
        for name, region in self._regions.items():
            there = [lane for lane in lanes if lane.region == name]
            allowed = region.allowed_bytes_per_s
            sending = sum(self._is_sending(lane) for lane in there)
            for lane in there:
                share = None if allowed is None else allowed / (sending if self._is_sending(lane) else len(there))
                lane.pace(share)

    def _is_due(self, lane: Lane) -> bool:
        """It may know more than at the last look. What was written for an attempt that is over is acknowledged by
        nobody: only a look tells that it has left."""
        return not lane.asleep or lane.written != self._settled.get(lane.id, 0)

    def _is_sending(self, lane: Lane) -> bool:
        return not lane.asleep or lane.id in self._sending

    def _lanes(self) -> list[Lane]:
        """Lane threads may end meanwhile."""
        return list(self._plane.outbound.values())

    def _region(self, region: str) -> _Region:
        return self._regions.setdefault(region, _Region())
