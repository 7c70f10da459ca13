"""Incoming lanes: the thread that accepts them, and what the thread of each one does.

A connection has a deadline for its greeting and is nobody's until its first frame that was acceptable. When all places
are taken, the oldest such connection has to go for a new one, and else the one that was idle for longest.

Anybody can say whose lane it is and of which attempt its frames are. Where frames are sealed nothing of a lane is
believed until a frame of an attempt of that peer has opened on it: DATA up to then claims nothing before it has opened,
and ends only its lane when it does not. Afterwards what does not open was damaged on the way, and ends the attempt.
"""

import errno
import socket
import time
from typing import assert_never

from prfaas.transfer import incoming
from prfaas.transfer.frames import NOT_THE_FRAMES_FAULT, WIRE, Cause, Header, Kind, ProtocolError
from prfaas.transfer.greeting import Hello, Welcome, compare, pack, refusal, refused, unpack
from prfaas.transfer.incoming import (
    Discard,
    Greeted,
    Heard,
    LaneGone,
    OfferArrived,
    OfferRefused,
    PeerAborted,
    Place,
    SealArrived,
    Turned,
)
from prfaas.transfer.offer import Offer, Seal
from prfaas.transfer.pump.lane import Lane
from prfaas.transfer.pump.plane import MAX_LANES, Plane
from prfaas.transfer.pump.sockets import tune
from prfaas.transfer.pump.talk import Talk, spread
from prfaas.transfer.replies import Progress, Total
from prfaas.transfer.tickets import TICKET_BYTES, verify

#: The system is short of something for everybody; the listener waits this long for it.
SHORTAGE_S = 0.1
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
#: A lane that was used so lately keeps its place.
IDLE_S = 1.0
#: What has landed is acknowledged when nothing more is there to be read, and at the latest after so many bytes.
UNANSWERED_BYTES = 1 << 20
#: What a frame counts at least: what there is to say of many small ones has to fit a frame, too.
LEAST_BYTES = 1 << 10


def accept_for_ever(plane: Plane, listener: socket.socket) -> None:
    """Body of the accept thread."""
    while True:
        try:
            sock, _ = listener.accept()
        except ConnectionError:
            continue
        except OSError as error:
            if error.errno not in _SHORTAGES:
                raise
            time.sleep(SHORTAGE_S)
            continue
        if len(plane.inbound) >= MAX_LANES:
            plane.tell_receiver(Turned(Cause.BUSY))
            if not _make_room(plane):
                sock.close()
                continue
        _take_in(plane, sock)


def _take_in(plane: Plane, sock: socket.socket) -> None:
    try:
        lane = Lane(plane.new_lane(), sock)
    except OSError as error:
        sock.close()
        if error.errno not in _SHORTAGES:
            raise
        return
    plane.run(plane.inbound, lane, lambda lane: serve(plane, lane))


def _make_room(plane: Plane) -> bool:
    """Hang up on the oldest lane that has carried nothing for anybody; if there is none, on the one that has had
    nothing to do for longest. Its place is free as soon as its thread has ended."""
    lanes = [lane for lane in list(plane.inbound.values()) if not lane.stopped]
    strangers = [lane for lane in lanes if not lane.proven]
    idle_since = time.monotonic() - IDLE_S
    idle = [lane for lane in lanes if lane.asleep and lane.worked_at < idle_since]
    found = next(iter(strangers), None) or min(idle, key=lambda lane: lane.worked_at, default=None)
    if found is None:
        return False
    found.hang_up(Cause.BUSY, "its place is needed")
    return True


def serve(plane: Plane, lane: Lane) -> None:
    """Body of an incoming lane's thread."""
    talk = Talk(lane, sealing=plane.sealing)
    try:
        hello = _greet(plane, lane, talk)
    except ProtocolError as error:
        plane.tell_receiver(Turned(error.cause))
        return
    Incoming(plane, lane, talk, hello).run()


def _greet(plane: Plane, lane: Lane, talk: Talk) -> Hello:
    """Noise is dropped without a word; a peer that speaks the protocol hears why it is refused."""
    start = plane.start
    tune(lane.sock, start.congestion)
    lane.limit(start.connect_s, altogether=True)
    hello = unpack(talk.payload(talk.expect(Kind.HELLO)), Hello)
    try:
        compare(hello, start.namespace, start.incarnation, WIRE, start.integrity)
    except ProtocolError as error:
        talk.farewell(error)
        raise
    salt = plane.new_salt()
    talk.put(Kind.WELCOME, pack(Welcome(node=start.node, incarnation=start.incarnation, salt=salt)))
    talk.secure(salt, hello.salt)
    lane.limit(plane.silence_s, altogether=False)
    return hello


class Incoming:
    """A lane that was welcomed."""

    def __init__(self, plane: Plane, lane: Lane, talk: Talk, hello: Hello) -> None:
        self._plane, self._lane, self._talk, self._hello = plane, lane, talk, hello
        self._unanswered_bytes = 0
        #: A frame of an attempt of this peer has opened, so he is at the other end.
        self._is_peers = False

    def run(self) -> None:
        plane, lane = self._plane, self._lane
        peer = f"{self._hello.node}/{self._hello.own_incarnation:x}"
        plane.tell_receiver(Greeted(lane.id, peer, time.monotonic()))
        lane.on_movement = self._crept
        failure = None
        try:
            while True:
                self._turn()
        except ProtocolError as error:
            failure = error
        if not failure.counted and failure.cause not in NOT_THE_FRAMES_FAULT:
            plane.tell_receiver(Turned(failure.cause))
        last_words = plane.replies(lane.id)
        plane.tell_receiver(LaneGone(lane.id, time.monotonic()))
        if failure.cause is not Cause.PEER_GONE and not lane.stopped:
            self._say_goodbye(last_words, failure)

    def _turn(self) -> None:
        header = self._talk.begin()
        if header is None:
            self._answer()
            self._talk.rest(self._plane.silence_s, self._plane.keepalive_s)
            return
        self._hear(header)
        if header.kind is not Kind.KEEPALIVE:
            self._lane.worked_at = self._lane.heard_at
        if self._unanswered_bytes >= UNANSWERED_BYTES:
            self._answer()

    def _crept(self) -> None:
        """Some of a frame has come that takes long: the sender does not know how much has arrived, but for our word."""
        now = time.monotonic()
        self._plane.tell_receiver(Heard(self._lane.id, now))
        if now >= self._lane.spoke_at + self._plane.keepalive_s:
            self._talk.put(Kind.KEEPALIVE)

    def _hear(self, header: Header) -> None:
        match header.kind:
            case Kind.DATA:
                self._land(header)
            case Kind.OFFER:
                self._offered(header)
            case Kind.SEAL:
                seal = unpack(self._payload(header), Seal)
                now = self._lane.heard_at
                event = SealArrived(self._lane.id, header.attempt, header.generation, seal, now)
                self._plane.tell_receiver(event)
            case Kind.ABORT:
                why = refused(self._payload(header))
                self._plane.tell_receiver(
                    PeerAborted(
                        self._lane.id, header.attempt, header.generation, why.cause, why.detail, self._lane.heard_at
                    )
                )
            case Kind.KEEPALIVE:
                self._plane.tell_receiver(Heard(self._lane.id, self._lane.heard_at))
            case _:
                raise ProtocolError(Cause.MALFORMED, f"{header.kind.name} from a dialler")

    def _land(self, header: Header) -> None:
        opened = self._opened_early(header)
        claimed = self._plane.claim(self._lane.id, header, self._lane.heard_at)
        match claimed:
            case Discard():
                if opened is None:
                    self._talk.discard(header)
                self._unanswered_bytes += LEAST_BYTES
            case Place():
                self._lane.proven = True
                memory = self._plane.memory
                places = [memory[offset : offset + nbytes] for offset, nbytes in claimed.places]
                try:
                    if opened is None:
                        self._talk.land(header, self._key(header), places)
                    else:
                        spread(opened, places)
                        self._is_peers = True
                except ProtocolError as error:
                    self._plane.missed(self._lane.id, error, time.monotonic())
                    error.counted = True
                    raise
                self._plane.landed(self._lane.id, time.monotonic())
                self._unanswered_bytes += max(LEAST_BYTES, header.length)
            case _:
                assert_never(claimed)

    def _opened_early(self, header: Header) -> memoryview | None:
        """The payload of a sealed frame on a lane that anybody may have made. Of an attempt that is not known nothing
        is wanted, whoever sends it."""
        key = self._key(header)
        if key is None or self._is_peers or header.attempt not in self._plane.held:
            return None
        return self._talk.unsealed(header, key)

    def _offered(self, header: Header) -> None:
        """The ticket is verified before anything of the offer is read."""
        ticket = self._talk.front(TICKET_BYTES) if header.length >= TICKET_BYTES else b""
        try:
            nbytes = self._verify(header.attempt, ticket)
        except ProtocolError as error:
            self._talk.discard(header, len(ticket))
            self._refuse_offer(header.attempt, error.detail)
            return
        offer = unpack(self._talk.payload(header, self._key(header), ticket), Offer)
        self._is_peers = True
        if (offered_bytes := self._plane.start.layout.extent_bytes(offer.extent)) != nbytes:
            self._refuse_offer(header.attempt, f"for {nbytes} bytes, not {offered_bytes}")
            return
        self._lane.proven = True
        event = OfferArrived(self._lane.id, header.attempt, header.generation, offer, self._lane.heard_at)
        self._plane.tell_receiver(event)

    def _verify(self, attempt: str, ticket: bytes) -> int:
        """How many bytes it is for."""
        if not ticket:
            raise ProtocolError(Cause.TICKET, "none")
        start = self._plane.start
        return verify(
            self._plane.secret,
            ticket,
            attempt=attempt,
            source=self._hello.node,
            incarnation=start.incarnation,
            now=time.monotonic(),
        )

    def _refuse_offer(self, attempt: str, detail: str) -> None:
        """Answered at once: what is owed to somebody without a ticket must not pile up."""
        self._plane.tell_receiver(OfferRefused(self._lane.id, attempt, Cause.TICKET, detail, self._lane.heard_at))
        self._answer()

    def _payload(self, header: Header) -> bytearray:
        return self._talk.payload(header, self._key(header))

    def _key(self, header: Header) -> bytes | None:
        return self._plane.keys(header.attempt).to_receiver if header.sealed else None

    def _answer(self) -> None:
        self._unanswered_bytes = 0
        for reply in self._plane.replies(self._lane.id):
            self._put(reply)

    def _put(self, reply: incoming.Reply) -> None:
        key = self._plane.keys(reply.attempt).to_sender if self._plane.sealing else None
        kind, payload = _frame_of(reply)
        self._talk.put(kind, payload, attempt=reply.attempt, key=key)

    def _say_goodbye(self, last_words: list[incoming.Reply], failure: ProtocolError) -> None:
        try:
            for reply in last_words:
                self._put(reply)
        except ProtocolError:
            return
        self._talk.farewell(failure)


def _frame_of(reply: incoming.Reply) -> tuple[Kind, bytes]:
    match reply:
        case incoming.Accept():
            return Kind.ACCEPT, pack(Progress(ranges=reply.applied, credit_bytes=reply.credit_bytes))
        case incoming.Ack():
            return Kind.ACK, pack(Progress(ranges=reply.ranges, credit_bytes=reply.credit_bytes))
        case incoming.Done():
            return Kind.COMPLETE, pack(Total(payload_bytes=reply.payload_bytes))
        case incoming.Abort():
            return Kind.ABORT, refusal(reply.cause, reply.detail)
        case _:
            assert_never(reply)
