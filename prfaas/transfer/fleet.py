"""The lanes of one sending pump: for every peer as many as there is work for, and no more than are worth while.

Lanes are dialled when work waits, kept while they are good, and closed when they are stuck, silent, long idle, or idle
while another peer needs one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from prfaas.transfer.attempts import TOMBSTONES, Hang, LaneId
from prfaas.transfer.frames import Cause
from prfaas.transfer.lanes import Rest, wanted_lanes
from prfaas.transfer.line import Lane, Line
from prfaas.transfer.outbox import Outbox
from prfaas.transfer.outgoing import Command, Destination, Dial, Peer
from prfaas.transfer.pieces import PIECE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """`connect_s`: from Begin to the receiver's acceptance. `no_progress_s`: how long nothing may be acknowledged while
    something is owed. `silence_s`: a lane that says nothing for so long is replaced. `abort_grace_s`: how long a lane
    may finish its frame of an attempt whose memory is wanted back. `ageing_s`: longest wait of an urgency for one turn.
    `finishing_bytes`: an attempt with no more than that, and no more than an eighth, left to send is nearly over.
    `apart_bytes`: a frame that has so many does not begin another place. `idle_s`: how long a lane is kept without
    work. `rest_s` to `longest_rest_s`: before a peer is dialled again."""

    connect_s: float = 5.0
    no_progress_s: float = 10.0
    silence_s: float = 4.0
    abort_grace_s: float = 1.0
    frame_bytes: int = 1 << 20
    piece_bytes: int = PIECE_BYTES
    apart_bytes: int | None = None
    ageing_s: float = 0.5
    finishing_bytes: int = 4 << 20
    least_lanes: int = 4
    most_lanes: int = 16
    total_lanes: int = 128
    idle_s: float = 900.0
    rest_s: float = 0.05
    longest_rest_s: float = 2.0
    tombstones: int = TOMBSTONES


class Fleet:
    """`allowances`: bytes per second that may be sent to a region, where that is limited."""

    def __init__(self, params: Params, lane_ids: Iterator[int]) -> None:
        self._params, self._lane_ids = params, lane_ids
        self.lines: dict[Peer, Line] = {}
        self.lanes: dict[LaneId, Lane] = {}
        self.allowances: dict[str, float | None] = {}

    def line(self, to: Destination) -> Line:
        line = self.lines.get(to.peer)
        if line is None:
            rest = Rest(self._params.rest_s, self._params.longest_rest_s)
            line = Line(peer=to.peer, region=to.region, outbox=Outbox(self._params.ageing_s), rest=rest)
            self.lines[line.peer] = line
        return line

    def drop(self, lane_id: LaneId) -> Lane:
        """Its last word has come."""
        lane = self.lanes.pop(lane_id)
        del lane.line.lanes[lane_id]
        return lane

    def stir(self, line: Line, now: float) -> list[Command]:
        """Wake and dial as many lanes as there is work for."""
        frames = line.frames(self._params.frame_bytes)
        if not frames:
            return []
        commands: list[Command] = [*line.wake(frames)]
        if not line.attempts or not line.rest.over(now):
            return commands
        params = self._params
        wanted = wanted_lanes(self.allowances.get(line.region), line.rtt_s, params.least_lanes, params.most_lanes)
        for _ in range(line.missing(frames, wanted)):
            if len(self.lanes) >= params.total_lanes:
                return [*commands, *self._make_room(line)]
            commands.append(self._dial(line, now))
        return commands

    def tend(self, now: float) -> list[Command]:
        """Close lanes that are no good and open those that are due."""
        commands: list[Command] = [hang for lane in self.lanes.values() for hang in self._judge(lane, now)]
        for line in self.lines.values():
            commands += self.stir(line, now)
        for line in list(self.lines.values()):
            if not line.lanes and not line.attempts:
                del self.lines[line.peer]
            elif not line.lanes and line.rest.over(now) and len(self.lanes) < self._params.total_lanes:
                # While prefill computes there is nothing to send; but each end must hear that the other one lives.
                commands.append(self._dial(line, now))
        return commands

    def _dial(self, line: Line, now: float) -> Dial:
        lane = Lane(id=LaneId(next(self._lane_ids)), line=line, heard_at=now)
        self.lanes[lane.id] = line.lanes[lane.id] = lane
        return Dial(lane.id, line.peer)

    def _make_room(self, line: Line) -> list[Command]:
        """Lanes are for those who have work: one that has none, of another peer, is closed."""
        idle = [
            (lane.last, lane.idle_since, lane.id)
            for lane in self.lanes.values()
            if lane.line is not line and lane.idle_since is not None and lane.free and not lane.owed
        ]
        return [self.lanes[min(idle)[2]].hang(Cause.BUSY, "another peer needs a lane")] if idle else []

    def _judge(self, lane: Lane, now: float) -> list[Hang]:
        params = self._params
        if lane.hung is not None:
            return []
        if lane.touching and lane.touching.ending and now - lane.taken_at > params.abort_grace_s:
            return [lane.hang(Cause.ABORTED, "stuck in a frame of an attempt that was ended")]
        if lane.up and now - lane.heard_at > params.silence_s:
            return [lane.hang(Cause.NO_PROGRESS, f"silent for {params.silence_s:g} s")]
        idle = lane.idle_since is not None and now - lane.idle_since > params.idle_s
        if idle and not lane.owed and not lane.last:
            return [lane.hang(Cause.ABORTED, "idle")]
        return []
