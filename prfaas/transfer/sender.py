"""Outgoing transfers of one pump: what is offered, which pieces leave when and on which lane, and what becomes of them
when a lane is lost.

Opened -> Begin -> OfferWork -> Accepted -> DataWork... -> SealWork -> Completed -> Delivered. Lanes take work when they
can write, so a faster one takes more. Whatever a lane did not get answered goes out again on another: every frame is
known by what it asks for (an offer for an acceptance, pieces for an acknowledgement, a seal for completion).

Here is what lanes are given to write and when an attempt is given up; what the node says is in wishes.py, what lanes
say in answers.py, and the moves that all of these share in books.py.
"""

import itertools
from collections.abc import Iterator
from typing import assert_never

from prfaas.kvcache.layout import KvLayout
from prfaas.transfer.answers import Answers
from prfaas.transfer.attempts import (
    LaneId,
    Opened,
    Phase,
    Release,
    Tick,
)
from prfaas.transfer.books import Books
from prfaas.transfer.fleet import Fleet
from prfaas.transfer.fleet import Params as Params
from prfaas.transfer.frames import Cause
from prfaas.transfer.line import Lane
from prfaas.transfer.outbound import Outbound
from prfaas.transfer.outgoing import (
    Aborted,
    AbortWork,
    Accepted,
    Acked,
    Allowance,
    Begin,
    Command,
    Completed,
    DataWork,
    Event,
    Heard,
    LaneDown,
    LaneUp,
    PartsReady,
    Sampled,
    Work,
)
from prfaas.transfer.pieces import Run
from prfaas.transfer.wishes import Wishes

#: Frames written in one go, where parts are small.
MAX_RUNS = 64


class Sender:
    """`lane_ids` gives each lane that is to be dialled its name; `sent_bytes` counts what was written to lanes."""

    def __init__(self, layout: KvLayout, params: Params | None = None, lane_ids: Iterator[int] | None = None) -> None:
        self._params = params or Params()
        self._fleet = Fleet(self._params, lane_ids or itertools.count(1))
        self._books = Books(self._params, self._fleet)
        self._wishes, self._answers = Wishes(layout, self._books), Answers(self._books)
        self._attempts, self.egress = self._books.attempts, self._books.egress
        self.sent_bytes = 0
        self.resent_bytes = 0

    def __contains__(self, attempt: str) -> bool:
        return attempt in self._attempts

    @property
    def failed(self) -> int:
        return self._attempts.failed

    def was_closed(self, attempt: str) -> bool:
        return self._attempts.was_closed(attempt)

    def phase(self, attempt: str) -> Phase | None:
        """None for an attempt that is not known, or no longer."""
        found = self._attempts.get(attempt)
        return found.phase if found else None

    def lanes(self, region: str) -> int:
        """How many are up."""
        return sum(lane.up for lane in self._fleet.lanes.values() if lane.line.region == region)

    def queue_age_s(self, region: str, now: float) -> float:
        """How long the attempt has waited that any lane to the region has served last, of those with something to
        send."""
        waiting = (a.served_at for a in self._attempts if a.sendable_bytes and a.to.region == region)
        return max(0.0, now - min(waiting, default=now))

    def stalled_s(self, region: str, now: float) -> float | None:
        """For how long nothing has been heard from there that is owed: answers to offers and seals, acknowledgements.
        None when nothing is. A peer that cannot be reached is not the line's doing."""
        lines = [line for line in self._fleet.lines.values() if line.region == region and line.up]
        owed = [
            max(attempt.asked_at, attempt.moved_at)
            for line in lines
            for attempt in line.attempts.values()
            if attempt.awaited and (attempt.owed or attempt.asks is not None)
        ]
        heard_at = max((lane.heard_at for line in lines for lane in line.lanes.values()), default=now)
        return max(0.0, now - max(heard_at, min(owed))) if owed else None

    def handle(self, event: Event) -> list[Command]:
        match event:
            case Opened():
                return self._wishes.opened(event)
            case Release():
                return self._wishes.release(event.attempt)
            case Allowance():
                self._fleet.allowances[event.region] = event.bytes_per_s
                return []
        self._books.now = max(self._books.now, event.now)
        match event:
            case Begin():
                return self._wishes.begin(event)
            case PartsReady():
                return self._wishes.ready(event)
            case LaneUp():
                return self._answers.lane_up(event)
            case LaneDown():
                return self._answers.lane_down(event)
            case Heard():
                self._books.hear(event.lane)
                return []
            case Accepted():
                return self._answers.accepted(event)
            case Acked():
                return self._answers.acked(event)
            case Completed():
                return self._answers.completed(event)
            case Aborted():
                return self._answers.aborted(event)
            case Sampled():
                return self._answers.sampled(event)
            case Tick():
                return self._tick()
            case _:
                assert_never(event)

    def take(self, lane_id: LaneId, max_bytes: int, now: float) -> Work | None:
        """What the lane is to write next, DATA of about `max_bytes` at most; None: it may sleep until it is woken."""
        self._books.now = max(self._books.now, now)
        lane = self._fleet.lanes[lane_id]
        assert lane.up and lane.work is None, "a lane writes one thing at a time"
        lane.work = None if lane.hung is not None else self._control(lane) or self._data(lane, max_bytes)
        if lane.work is not None:
            lane.taken_at, lane.idle_since = self._books.now, None
        elif lane.idle_since is None:
            lane.idle_since = self._books.now
        return lane.work

    def wrote(self, lane_id: LaneId, now: float) -> list[Command]:
        """The lane has written what it took, and touches no memory any more."""
        self._books.now = max(self._books.now, now)
        lane = self._fleet.lanes[lane_id]
        if isinstance(lane.work, DataWork):
            lane.written_bytes += lane.work.nbytes
            self.sent_bytes += lane.work.nbytes
        lane.work = None
        commands = self._books.let_go(lane)
        # A seal may have become due with what was taken.
        return [*commands, *self._fleet.stir(lane.line, self._books.now)] if lane.line.outbox.control else commands

    def check(self) -> None:
        self._books.check()

    def _control(self, lane: Lane) -> Work | None:
        """Offers and seals of attempts that have ended meanwhile are skipped."""
        queue = lane.line.outbox.control
        while queue:
            work = queue.popleft()
            if isinstance(work, AbortWork):
                return work
            attempt = lane.line.attempts.get(work.attempt)
            if attempt is not None:
                attempt.offered, attempt.asks, attempt.asked_at = True, lane.id, self._books.now
                lane.asks[attempt.id] = None
                return work
        return None

    def _data(self, lane: Lane, max_bytes: int) -> Work | None:
        attempt_id = lane.line.outbox.first(self._books.now) if lane.line.room(lane) > 0 else None
        attempt = lane.line.attempts[attempt_id] if attempt_id is not None else None
        if attempt is None:
            return None
        resent_bytes = attempt.resent_bytes
        runs: list[Run] = []
        rest_bytes = max_bytes
        while rest_bytes > 0 and len(runs) < MAX_RUNS:
            run = attempt.take(lane.id, rest_bytes, self._params.apart_bytes, alone=not runs)
            if run is None:
                break
            runs.append(run)
            lane.flight[attempt.id, run.first] = (attempt, run)
            rest_bytes -= run.nbytes
        nbytes = max_bytes - rest_bytes
        lane.taken_bytes += nbytes
        lane.touching = attempt
        attempt.touches += 1
        attempt.served_at = self._books.now
        self.resent_bytes += attempt.resent_bytes - resent_bytes
        lane.line.outbox.charge(attempt.id, nbytes, self._books.now)
        self._books.refresh(attempt)
        return DataWork(attempt.id, attempt.to, tuple(runs), nbytes)

    def _tick(self) -> list[Command]:
        commands: list[Command] = []
        for attempt in self._attempts.late(self._books.now):
            commands += self._books.close(attempt, Cause.EXPIRED, "")
        for attempt in self._attempts:
            commands += self._judge(attempt)
        return [*commands, *self._fleet.tend(self._books.now)]

    def _judge(self, attempt: Outbound) -> list[Command]:
        """Whether it is time to give the attempt up. Where dialling again would come too late it is."""
        if not attempt.awaited:
            return []
        line = self._fleet.lines[attempt.to.peer]
        last_chance = self._books.now if line.lanes else max(self._books.now, line.rest.until)
        if attempt.phase is Phase.OFFERED:
            if last_chance - attempt.begun_at <= self._params.connect_s:
                return []
            return self._books.fail(attempt, Cause.CONNECT, line.rest.detail or "the offer was not answered")
        if not attempt.owed and line.up:
            attempt.moved_at = self._books.now
        if last_chance - attempt.moved_at <= self._params.no_progress_s:
            return []
        if line.up:
            return self._books.fail(
                attempt, Cause.NO_PROGRESS, f"nothing acknowledged for {self._params.no_progress_s:g} s"
            )
        return self._books.fail(attempt, Cause.PEER_GONE, line.rest.detail or line.rest.cause.value)
