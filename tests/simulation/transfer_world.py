"""Senders and receivers in virtual time, joined by lanes that delay, stall, tear frames and die, all from a seed.

The pumps here are real in what counts: memory of a pool that is used again, read while a frame is written and written
while one is read, often in many windows, and others at either end; lanes whose two ends learn of the end at different
times or, half open, never.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from prfaas.kvcache.blocks import BlockPool
from prfaas.kvcache.layout import Extent, KvLayout, Part, TensorKind, TensorSpec, Window, chunk_ends, whole
from prfaas.transfer import incoming, outgoing, receiver, sender
from prfaas.transfer.attempts import Answer, Free, Hang, LaneId, Lost, Opened, Release, Tick
from prfaas.transfer.frames import Cause, Header, Kind
from prfaas.transfer.pieces import Run

LAYOUT = KvLayout(
    layers=(
        (TensorSpec("state", TensorKind.STATE, "uint8", (150,)),),
        (TensorSpec("keys", TensorKind.TOKENS, "uint8", (24,)), TensorSpec("values", TensorKind.TOKENS, "uint8", (8,))),
    )
)
PIECE_BYTES = 64
CHUNK_TOKENS = 16
SENDING = sender.Params(
    connect_s=2.0,
    no_progress_s=3.0,
    silence_s=1.0,
    abort_grace_s=0.3,
    frame_bytes=256,
    piece_bytes=PIECE_BYTES,
    ageing_s=0.2,
    finishing_bytes=128,
    least_lanes=3,
    most_lanes=6,
    total_lanes=5,
    idle_s=2.0,
    rest_s=0.02,
    longest_rest_s=0.3,
)
RECEIVING = receiver.Params(window_bytes=700, no_progress_s=3.0, abort_grace_s=0.3, piece_bytes=PIECE_BYTES)
POOL_BYTES = 1 << 15
TICK_S = 0.1


@dataclass(slots=True, eq=False)
class Lane:
    """A connection. `cut`: nothing more enters it. Of the far end: `inbox` has arrived there, `reading` is what its
    thread does, `ended` says that it knows of the end."""

    out_id: LaneId
    in_id: LaneId
    source: "SendPump"
    target: "ReceivePump"
    latency_s: float
    frame_s: float
    cut: bool = False
    half_open: bool = False
    stuck: bool = False
    dialler_gone: bool = False
    listener_gone: bool = False
    writing: outgoing.Work | None = None
    reading: "tuple[Data, incoming.Place] | None" = None
    inbox: deque[object] = field(default_factory=deque)
    there: list[tuple[float, object]] = field(default_factory=list)
    back: list[tuple[float, object]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Data:
    attempt: str
    generation: int
    run: Run
    payload: bytes
    damaged: bool = False
    torn: bool = False


@dataclass(frozen=True, slots=True)
class End:
    """The end of the stream."""


@dataclass(slots=True)
class Story:
    """What is known of one attempt from outside."""

    source: "SendPump"
    target: "ReceivePump"
    extent: Extent
    content: list[bytes]
    #: Where the parts lie at each end.
    here: tuple[Part, ...]
    there: tuple[Part, ...]
    begun: bool = False
    sent: str | None = None
    received: str | None = None
    unacked_lost: int = 0
    must_arrive: bool = False


class World:
    def __init__(self, seed: int, *, senders: int = 2, receivers: int = 2) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.healed = False
        self.dark_until = 0.0
        self.stories: dict[str, Story] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._ids = itertools.count(1)
        self.lanes: list[Lane] = []
        self.senders = [SendPump(self, f"p{n}") for n in range(senders)]
        self.receivers = [ReceivePump(self, f"d{n}") for n in range(receivers)]
        self.counts: dict[str, int] = {}

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._serial), action))

    def run(self, until: float) -> None:
        while self._heap and self._heap[0][0] <= until:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        self.now = until

    def often(self, odds: float) -> bool:
        return not self.healed and self.rng.random() < odds

    def tick(self) -> None:
        for lane in self.lanes:
            if not (lane.cut or lane.half_open):
                if lane.out_id in lane.source.lanes:
                    lane.source.tell(outgoing.Heard(lane.out_id, self.now))
                if not lane.stuck and not lane.listener_gone:
                    lane.target.tell(incoming.Heard(lane.in_id, self.now))
        self.lanes = [lane for lane in self.lanes if not (lane.dialler_gone and lane.listener_gone)]
        for pump in (*self.senders, *self.receivers):
            pump.tick()
        self.after(TICK_S, self.tick)

    # Stories.

    def transfer(self, *, orderly: bool = False) -> None:
        """A node pair makes an attempt, with all that can come between when it is not `orderly`."""
        rng = self.rng
        source, target = rng.choice(self.senders), rng.choice(self.receivers)
        attempt = f"{next(self._ids):032x}"
        extent, ttl_s = self._extent(), 60.0 if orderly else rng.choice([1.0, 4.0, 20.0])
        ends = tuple(end for end in chunk_ends(extent.stop, CHUNK_TOKENS) if end > extent.first)
        here_rooms, there_rooms = self._rooms(extent, ends), self._rooms(extent, ends)
        here = source.pool.reserve(attempt, _bytes_of(here_rooms))
        there = target.pool.reserve(attempt, _bytes_of(there_rooms))
        if there is None or here is None:
            target.pool.free(attempt)
            source.pool.free(attempt)
            self.after(0.2, partial(self.transfer, orderly=orderly)) if orderly else None
            return
        here_windows, there_windows = _windows(here_rooms, here.offset), _windows(there_rooms, there.offset)
        parts = LAYOUT.extent_parts(extent, ends, here_windows)
        self.stories[attempt] = Story(
            source,
            target,
            extent,
            [rng.randbytes(part.nbytes) for part in parts],
            parts,
            LAYOUT.extent_parts(extent, ends, there_windows),
            must_arrive=orderly,
        )
        target.tell(Opened(attempt, extent, there_windows, there.generation, self.now + ttl_s * rng.choice([1.0, 0.5])))
        source.tell(Opened(attempt, extent, here_windows, here.generation, self.now + ttl_s))
        to = outgoing.Destination(
            address=target.node, incarnation=target.incarnation, generation=there.generation, region=target.node
        )
        self.after(rng.random() * 0.2, partial(self._begin, attempt, to, ends))
        order = list(range(len(parts)))
        if rng.random() < 0.3:
            rng.shuffle(order)
        at = 0.0
        for index in order:
            at += rng.random() * rng.choice([0.0, 0.01, 0.2])
            self.after(at, partial(source.compute, attempt, index))
        if not orderly:
            for pump in (source, target):
                if rng.random() < 0.15:
                    self.after(rng.random() * 2, partial(pump.tell, Release(attempt)))

    def _extent(self) -> Extent:
        """A sequence, the rest of one, or what a cache holds of it."""
        tokens = self.rng.choice([0, 1, 7, 16, 40, 60])
        first, states = self.rng.choice([0, 0, 16, 32]), self.rng.choice([(tokens,), (tokens,), (), (16, 32, 48)])
        if first >= tokens:
            return whole(tokens)
        return Extent(first, tokens, tuple(at for at in states if first <= at <= tokens))

    def _rooms(self, extent: Extent, ends: tuple[int, ...]) -> list[tuple[int, int, bool]]:
        """(first, stop, state) of each window, in the order in which they lie: one if there can be, or as many as there
        can be."""
        if extent.states in ((), (extent.stop,)) and self.rng.random() < 0.5:
            return [(extent.first, extent.stop, bool(extent.states))]
        rooms = [(at, at, True) for at in extent.states]
        rooms += [(first, stop, False) for first, stop in itertools.pairwise((extent.first, *ends))]
        self.rng.shuffle(rooms)
        return rooms

    def _begin(self, attempt: str, to: outgoing.Destination, ends: tuple[int, ...]) -> None:
        story = self.stories[attempt]
        if story.source.retired:
            return
        story.begun = True
        begin = outgoing.Begin(
            attempt=attempt,
            to=to,
            chunk_ends=ends,
            now=self.now,
            urgency=self.rng.choice([outgoing.Urgency.NORMAL, outgoing.Urgency.BACKGROUND, outgoing.Urgency.FINISHING]),
            tenant=self.rng.choice("ab"),
            weight=self.rng.choice([1.0, 3.0]),
        )
        story.source.tell(begin)

    # Faults.

    def fault(self) -> None:
        if self.healed:
            return
        rng = self.rng
        live = [lane for lane in self.lanes if not lane.cut]
        faults = ["cut", "cut", "cut", "half_open", "stuck", "restart_receiver", "restart_sender", "cut_all", "dark"]
        what = rng.choice(faults)
        if what in ("restart_receiver", "restart_sender") and rng.random() < 0.6:
            what = "cut"
        if what == "restart_receiver":
            self._restart(self.receivers)
        elif what == "restart_sender":
            self._restart(self.senders)
        elif what in ("cut_all", "dark"):
            if what == "dark":
                self.dark_until = self.now + rng.choice([0.5, 4.0])
            for lane in live:
                self.cut(lane)
        elif live:
            lane = rng.choice(live)
            if what == "cut":
                self.cut(lane)
            elif what == "half_open":
                lane.half_open = True
            else:
                lane.stuck = True
        self.count(what)
        self.after(rng.expovariate(2.0), self.fault)

    def _restart(self, pumps: "list[SendPump] | list[ReceivePump]") -> None:
        index = self.rng.randrange(len(pumps))
        old = pumps[index]
        old.retired = True
        pumps[index] = type(old)(self, old.node)
        for lane in list(self.lanes):
            if old in (lane.source, lane.target):
                self.cut(lane)

    def cut(self, lane: Lane) -> None:
        """Of what is on its way a beginning still arrives; the frame after it may arrive in part."""
        if lane.cut:
            return
        lane.cut = True
        kept = self.rng.randint(0, len(lane.there))
        torn = lane.there[kept : kept + 1]
        del lane.there[kept:]
        for at, frame in torn:
            if isinstance(frame, Data):
                lane.there.append((at, replace(frame, torn=True)))
        del lane.back[self.rng.randint(0, len(lane.back)) :]
        if not lane.half_open or self.healed:
            self.after(self.rng.random() * 0.5, partial(lane.target.ended, lane))
            self.after(self.rng.random() * 0.5, partial(lane.source.down, lane, Cause.PEER_GONE))

    def heal(self) -> None:
        """From here on lines are good. What was half open is found out by the system."""
        self.healed = True
        for lane in list(self.lanes):
            lane.stuck = False
            if lane.half_open:
                lane.half_open = False
                lane.cut = False
                self.cut(lane)
            elif not lane.cut and not lane.dialler_gone:
                lane.source.resume(lane)
                lane.target.resume(lane)

    def check(self) -> None:
        for pump in (*self.senders, *self.receivers):
            pump.machine.check()
            pump.pool.check()

    def balance(self) -> None:
        """Everything has ended, once, and nothing is left of it."""
        for attempt, story in self.stories.items():
            if not story.source.retired and story.begun:
                assert story.sent is not None, f"{attempt}: its sender's node waits for ever"
            if not story.target.retired:
                assert story.received is not None, f"{attempt}: its receiver's node waits for ever"
            if story.must_arrive:
                assert (story.sent, story.received) == ("delivered", "complete"), f"{attempt}: {story}"
        for pump in (*self.senders, *self.receivers):
            assert pump.pool.spans == 0, f"{pump.node}: spans are held"
            pump.machine.check()
            pump.at_rest()


def _bytes_of(rooms: list[tuple[int, int, bool]]) -> int:
    return sum(LAYOUT.window_bytes(stop - first, state) for first, stop, state in rooms)


def _windows(rooms: list[tuple[int, int, bool]], at: int) -> tuple[Window, ...]:
    sizes = [LAYOUT.window_bytes(stop - first, state) for first, stop, state in rooms]
    offsets = itertools.accumulate(sizes, initial=at)
    return tuple(Window(first, stop, next(offsets), state) for first, stop, state in rooms)


class SendPump:
    def __init__(self, world: World, node: str) -> None:
        self.world, self.node = world, node
        self.name = f"{node}/{world.rng.getrandbits(32):x}"
        self.machine = sender.Sender(LAYOUT, SENDING)
        self.pool = BlockPool(POOL_BYTES, 64)
        self.memory = bytearray(POOL_BYTES)
        self.lanes: dict[LaneId, Lane] = {}
        self.retired = False
        #: Bytes that were on lanes when they were lost, not acknowledged by what had come back.
        self.lost_bytes = 0

    def tell(self, event: outgoing.Event) -> None:
        if not self.retired:
            self.perform(self.machine.handle(event))

    def tick(self) -> None:
        sample = {lane_id: self.world.rng.choice([0, 100]) for lane_id in self.lanes}
        self.tell(outgoing.Sampled(sample, self.world.now))
        self.tell(Tick(self.world.now))

    def compute(self, attempt: str, index: int) -> None:
        if self.retired or self.pool.span(attempt) is None:
            return
        story = self.world.stories[attempt]
        part = story.here[index]
        self.memory[part.offset : part.offset + part.nbytes] = story.content[index]
        self.tell(outgoing.PartsReady(attempt, (index,), self.world.now))

    def perform(self, commands: Iterable[outgoing.Command]) -> None:
        world = self.world
        for command in commands:
            match command:
                case outgoing.Dial(lane, peer):
                    world.after(world.rng.random() * 0.1, partial(self.dialled, lane, peer))
                case outgoing.Wake(lanes):
                    for lane in lanes:
                        world.after(0.0, partial(self.write, self.lanes[lane]))
                case Hang(lane):
                    world.count("hang out")
                    if lane in self.lanes:
                        hung = self.lanes[lane]
                        world.cut(hung)
                        world.after(0.01, partial(self.down, hung, command.cause))
                case outgoing.Delivered(attempt, nbytes, _, lost, resent):
                    story = world.stories[attempt]
                    assert story.sent is None, "two outcomes"
                    assert story.received == "complete" or story.target.retired, "delivered and not received"
                    assert nbytes == LAYOUT.extent_bytes(story.extent)
                    assert lost == story.unacked_lost, "lanes had something else when they were lost"
                    assert resent <= lost, "more was sent again than lanes had lost"
                    story.sent = "delivered"
                    world.count("delivered")
                    world.after(world.rng.random(), partial(self.tell, Release(attempt)))
                case Lost(attempt, cause):
                    story = world.stories[attempt]
                    assert story.begun and story.sent is None, "two outcomes"
                    story.sent = cause.value
                    world.count(f"sender lost: {cause.value}")
                    if not world.often(0.1):
                        world.after(world.rng.random(), partial(self.tell, Release(attempt)))
                case Free(attempt):
                    for lane in self.lanes.values():
                        work = lane.writing
                        assert not isinstance(work, outgoing.DataWork) or work.attempt != attempt, "freed under a lane"
                    self.pool.free(attempt)
                case Answer():
                    pass

    def dialled(self, lane_id: LaneId, peer: outgoing.Peer) -> None:
        world = self.world
        if self.retired:
            return
        target = next(pump for pump in world.receivers if pump.node == peer.address)
        if target.incarnation != peer.incarnation:
            self.tell(outgoing.LaneDown(lane_id, Cause.INCARNATION, "another", world.now))
            return
        if world.often(1.0 if world.now < world.dark_until else 0.2):
            self.tell(outgoing.LaneDown(lane_id, Cause.CONNECT, "refused", world.now))
            return
        slow = world.rng.choice([0.001, 0.01, 0.05])
        in_id = LaneId(next(world._ids))
        lane = Lane(lane_id, in_id, self, target, world.rng.choice([0.001, 0.02, 0.1]), slow)
        self.lanes[lane_id] = lane
        world.lanes.append(lane)
        target.tell(incoming.Greeted(lane.in_id, self.name, world.now))
        self.tell(outgoing.LaneUp(lane_id, world.now))
        self.write(lane)

    def write(self, lane: Lane) -> None:
        if self.retired or lane.dialler_gone or lane.cut or lane.writing is not None:
            return
        work = self.machine.take(lane.out_id, self.world.rng.choice([64, 128, 256]), self.world.now)
        if work is None:
            return
        lane.writing = work
        if isinstance(work, outgoing.DataWork):
            assert self.pool.span(work.attempt) is not None, "what is sent was freed"
        self.world.after(self.world.rng.random() * lane.frame_s, partial(self.wrote, lane))

    def wrote(self, lane: Lane) -> None:
        if self.retired or lane.dialler_gone or lane.writing is None or lane.stuck:
            return
        work, lane.writing = lane.writing, None
        for frame in self.frames(work):
            self.put(lane, frame)
        self.perform(self.machine.wrote(lane.out_id, self.world.now))
        self.write(lane)

    def resume(self, lane: Lane) -> None:
        if lane.writing is not None:
            self.wrote(lane)

    def frames(self, work: outgoing.Work) -> Iterable[object]:
        if not isinstance(work, outgoing.DataWork):
            return [work]
        span = self.pool.span(work.attempt)
        assert span is not None, "what is sent was freed"
        frames = []
        for run in work.runs:
            payload = b"".join(bytes(self.memory[start : start + nbytes]) for start, nbytes in run.places)
            frames.append(Data(work.attempt, work.to.generation, run, payload, self.world.often(0.002)))
        return frames

    def put(self, lane: Lane, frame: object) -> None:
        """Order within a lane is kept."""
        if lane.cut or lane.half_open:
            return
        world = self.world
        at = max(world.now + lane.latency_s * (0.5 + world.rng.random()), lane.there[-1][0] if lane.there else 0.0)
        lane.there.append((at, frame))
        world.after(at - world.now, partial(lane.target.arrived, lane))

    def answered(self, lane: Lane) -> None:
        """A reply has come back."""
        if self.retired or lane.dialler_gone or not lane.back or lane.half_open:
            return
        if lane.back[0][0] > self.world.now + 1e-9:
            return
        _, reply = lane.back.pop(0)
        now, lane_id = self.world.now, lane.out_id
        match reply:
            case incoming.Accept(attempt, applied, credit):
                self.tell(outgoing.Accepted(lane_id, attempt, applied, credit, now))
            case incoming.Ack(attempt, ranges, credit):
                self.tell(outgoing.Acked(lane_id, attempt, ranges, credit, now))
            case incoming.Done(attempt, nbytes):
                self.tell(outgoing.Completed(lane_id, attempt, nbytes, now))
            case incoming.Abort(attempt, cause, detail):
                self.tell(outgoing.Aborted(lane_id, attempt, cause, detail, now))

    def down(self, lane: Lane, cause: Cause) -> None:
        if lane.dialler_gone:
            return
        lane.dialler_gone, lane.writing = True, None
        self.world.cut(lane)
        if self.retired:
            return
        while lane.back and not lane.half_open:
            lane.back[0] = (0.0, lane.back[0][1])
            lane.dialler_gone = False
            self.answered(lane)
            lane.dialler_gone = True
        known = self.machine._fleet.lanes[lane.out_id].flight
        for (attempt, _), (_, run) in known.items():
            self.world.stories[attempt].unacked_lost += run.nbytes
            self.lost_bytes += run.nbytes
        del self.lanes[lane.out_id]
        self.tell(outgoing.LaneDown(lane.out_id, cause, "", self.world.now))

    def at_rest(self) -> None:
        assert len(self.machine._attempts) == 0
        assert not any(lane.flight or lane.asks or lane.work for lane in self.machine._fleet.lanes.values())
        self.machine.handle(outgoing.Sampled(dict.fromkeys(self.lanes, 0), self.world.now))
        assert all(sent.queued_bytes == 0 for sent in self.machine.egress.readings(self.world.now))
        assert self.machine.resent_bytes <= self.lost_bytes


class ReceivePump:
    def __init__(self, world: World, node: str) -> None:
        self.world, self.node = world, node
        self.incarnation = world.rng.getrandbits(64)
        self.machine = receiver.Receiver(LAYOUT, RECEIVING)
        self.pool = BlockPool(POOL_BYTES, 64)
        self.memory = bytearray(POOL_BYTES)
        self.retired = False

    def tell(self, event: incoming.Event) -> None:
        if not self.retired:
            self.perform(self.machine.handle(event))

    def tick(self) -> None:
        self.tell(Tick(self.world.now))

    def lane(self, lane_id: LaneId) -> Lane | None:
        return next((lane for lane in self.world.lanes if lane.in_id == lane_id), None)

    def perform(self, commands: Iterable[incoming.Command]) -> None:
        world = self.world
        for command in commands:
            match command:
                case incoming.Complete(attempt, nbytes):
                    self.completed(attempt, nbytes)
                    world.after(world.rng.random(), partial(self.tell, Release(attempt)))
                case Lost(attempt, cause):
                    story = world.stories[attempt]
                    assert story.received is None, "two outcomes"
                    story.received = cause.value
                    world.count(f"receiver lost: {cause.value}")
                    self.boundary(attempt)
                    if not world.often(0.1):
                        world.after(world.rng.random(), partial(self.tell, Release(attempt)))
                case Free(attempt):
                    for lane in world.lanes:
                        if lane.target is self and lane.reading is not None:
                            assert lane.reading[1].attempt != attempt, "freed under a lane"
                    self.pool.free(attempt)
                case incoming.Answerable(lanes):
                    for lane_id in lanes:
                        if (lane := self.lane(lane_id)) is not None:
                            world.after(0.0, partial(self.reply, lane))
                case Hang(lane_id):
                    world.count("hang in")
                    if (lane := self.lane(lane_id)) is not None:
                        world.cut(lane)
                        world.after(0.01, partial(self.gone, lane))
                case Answer():
                    pass

    def completed(self, attempt: str, nbytes: int) -> None:
        story = self.world.stories[attempt]
        assert story.received is None, "two outcomes"
        story.received = "complete"
        assert nbytes == LAYOUT.extent_bytes(story.extent)
        assert self.machine.boundary(attempt) == story.extent.stop
        for part in story.there:
            self.same(attempt, part)

    def boundary(self, attempt: str) -> None:
        """What a lost attempt says can be used can be used."""
        tokens, story = self.machine.boundary(attempt), self.world.stories[attempt]
        if tokens > story.extent.first:
            self.world.count("kept in part" if tokens < story.extent.stop else "kept whole")
            for part in story.there:
                if part.stop <= tokens:
                    self.same(attempt, part)

    def same(self, attempt: str, part: Part) -> None:
        assert self.pool.span(attempt) is not None
        have = bytes(self.memory[part.offset : part.offset + part.nbytes])
        assert have == self.world.stories[attempt].content[part.index], f"part {part.index} differs"

    def arrived(self, lane: Lane) -> None:
        while lane.there and lane.there[0][0] <= self.world.now + 1e-9 and not lane.half_open:
            lane.inbox.append(lane.there.pop(0)[1])
        self.read(lane)

    def ended(self, lane: Lane) -> None:
        """The kernel says so, behind all that it has."""
        lane.inbox.extend(frame for _, frame in lane.there)
        lane.there.clear()
        lane.inbox.append(End())
        self.read(lane)

    def read(self, lane: Lane) -> None:
        now = self.world.now
        while not (self.retired or lane.listener_gone or lane.reading) and lane.inbox:
            match lane.inbox.popleft():
                case End():
                    self.gone(lane)
                case Data() as frame:
                    self.claim(lane, frame)
                case outgoing.OfferWork(attempt, to, offer):
                    self.tell(incoming.OfferArrived(lane.in_id, attempt, to.generation, offer, now))
                case outgoing.SealWork(attempt, to, seal):
                    self.tell(incoming.SealArrived(lane.in_id, attempt, to.generation, seal, now))
                case outgoing.AbortWork(attempt, to, cause, detail):
                    self.tell(incoming.PeerAborted(lane.in_id, attempt, to.generation, cause, detail, now))
            self.reply(lane)

    def claim(self, lane: Lane, frame: Data) -> None:
        run = frame.run
        header = Header(
            kind=Kind.DATA,
            attempt=frame.attempt,
            generation=frame.generation,
            index=run.first,
            count=run.count,
            offset=run.offset,
            length=run.nbytes,
        )
        place = self.machine.claim(lane.in_id, header, self.world.now)
        if isinstance(place, incoming.Discard):
            self.world.count(f"discard {place.cause and place.cause.value}")
            return
        lane.reading = (frame, place)
        self.fill(frame, place, run.nbytes // 2)
        if not frame.torn:
            self.world.after(self.world.rng.random() * lane.frame_s, partial(self.filled, lane, lane.reading))

    def fill(self, frame: Data, place: incoming.Place, nbytes: int) -> None:
        """Nobody else may have got the memory since it was reserved for this frame's attempt."""
        span = self.pool.span(place.attempt)
        assert span is not None and span.generation == frame.generation, "written after it was freed"
        payload = frame.payload[:nbytes]
        for offset, length in place.places:
            assert span.offset <= offset and offset + length <= span.offset + span.nbytes
            now, payload = payload[:length], payload[length:]
            self.memory[offset : offset + len(now)] = now

    def filled(self, lane: Lane, reading: tuple[Data, incoming.Place]) -> None:
        if self.retired or lane.listener_gone or lane.stuck or lane.reading is not reading:
            return
        frame, place = reading
        self.fill(frame, place, len(frame.payload))
        lane.reading = None
        if frame.damaged:
            self.perform(self.machine.missed(lane.in_id, Cause.CHECKSUM, "", self.world.now))
        else:
            self.perform(self.machine.landed(lane.in_id, self.world.now))
        self.reply(lane)
        self.read(lane)

    def resume(self, lane: Lane) -> None:
        if lane.reading is not None and not lane.reading[0].torn:
            self.filled(lane, lane.reading)
        self.read(lane)

    def reply(self, lane: Lane) -> None:
        if self.retired or lane.listener_gone:
            return
        world = self.world
        for reply in self.machine.replies(lane.in_id):
            if lane.cut or lane.half_open:
                continue
            at = max(world.now + lane.latency_s * (0.5 + world.rng.random()), lane.back[-1][0] if lane.back else 0.0)
            lane.back.append((at, reply))
            world.after(at - world.now, partial(lane.source.answered, lane))

    def gone(self, lane: Lane) -> None:
        if lane.listener_gone:
            return
        lane.reading = None
        lane.listener_gone = True
        self.world.cut(lane)
        self.tell(incoming.LaneGone(lane.in_id, self.world.now))

    def at_rest(self) -> None:
        assert len(self.machine._attempts) == 0
        assert not any(lane.claim for lane in self.machine._lanes.values())
        assert not any(lane.acks or lane.replies for lane in self.machine._lanes.values())
