"""What the thread of an outgoing lane does: write what the Sender gives it, hear what the receiver answers, and keep
the connection alive meanwhile; or ask who is there."""

import time
from typing import assert_never

from prfaas.transfer.frames import DATA_BYTES, SEALED_BYTES, WIRE, Cause, Header, Kind, ProtocolError
from prfaas.transfer.greeting import Hello, Welcome, pack, refusal, refused, unpack
from prfaas.transfer.outgoing import (
    Aborted,
    AbortWork,
    Accepted,
    Acked,
    Completed,
    DataWork,
    Destination,
    Dial,
    Heard,
    LaneDown,
    LaneUp,
    OfferWork,
    SealWork,
    Work,
)
from prfaas.transfer.pieces import PIECE_BYTES
from prfaas.transfer.pump.lane import LINGER_S, Lane
from prfaas.transfer.pump.messages import Probed
from prfaas.transfer.pump.plane import Plane
from prfaas.transfer.pump.sockets import connect, tune
from prfaas.transfer.pump.talk import Talk
from prfaas.transfer.replies import Progress, Total

#: How much a lane takes at once: what it writes in so long, because frames cost; but no more, because what is urgent
#: waits for it, and it is lost with the lane.
TURN_S = 0.01
LEAST_BYTES = PIECE_BYTES


def carry(plane: Plane, lane: Lane, dial: Dial) -> None:
    """Body of an outgoing lane's thread. The Sender is owed exactly one LaneDown."""
    try:
        outgoing = Outgoing(plane, lane)
        outgoing.greet(dial.peer.address, dial.peer.incarnation)
        plane.tell_sender(LaneUp(lane.id, time.monotonic()))
        outgoing.work()
    except ProtocolError as error:
        plane.tell_sender(LaneDown(lane.id, error.cause, error.detail, time.monotonic()))


def probe(plane: Plane, lane: Lane, address: str) -> None:
    """Body of the thread that asks who is at `address`."""
    incarnation = None
    try:
        incarnation = Outgoing(plane, lane).greet(address, None).incarnation
    except ProtocolError:
        pass
    plane.inbox.put(Probed(address=address, incarnation=incarnation))


class Outgoing:
    def __init__(self, plane: Plane, lane: Lane) -> None:
        self._plane, self._lane = plane, lane
        self._talk = Talk(lane, sealing=plane.sealing)
        self._turn_bytes = LEAST_BYTES

    def greet(self, address: str, incarnation: int | None) -> Welcome:
        start = self._plane.start
        self._lane.connected(connect(address, start.connect_s, self._lane))
        tune(self._lane.sock, start.congestion)
        self._lane.limit(start.connect_s, altogether=True)
        hello = Hello(
            node=start.node,
            own_incarnation=start.incarnation,
            namespace=start.namespace,
            oldest_wire=WIRE.oldest,
            newest_wire=WIRE.newest,
            incarnation=incarnation,
            integrity=start.integrity,
            salt=self._plane.new_salt(),
        )
        self._talk.put(Kind.HELLO, pack(hello))
        welcome = unpack(self._talk.payload(self._talk.expect(Kind.WELCOME)), Welcome)
        self._talk.secure(hello.salt, welcome.salt)
        self._lane.limit(self._plane.silence_s, altogether=False)
        return welcome

    def work(self) -> None:
        """Until the line or somebody ends it."""
        while True:
            while (header := self._talk.begin()) is not None:
                self._hear(header)
            work = self._plane.take(self._lane.id, self._turn_bytes, time.monotonic())
            if work is None:
                self._talk.rest(self._plane.silence_s, self._plane.keepalive_s)
                continue
            self._lane.taken = 0
            try:
                self._write(work)
            except ProtocolError as error:
                if error.cause is Cause.PEER_GONE:
                    self._last_words()
                raise
            self._plane.wrote(self._lane.id, time.monotonic())
            self._lane.taken = 0

    def _write(self, work: Work) -> None:
        to = work.to
        match work:
            case DataWork():
                began = time.monotonic()
                self._talk.put_data(work.attempt, to.generation, self._key(to), work.runs, self._plane.memory)
                self._adapt(work.nbytes, time.monotonic() - began)
            case OfferWork():
                self._put(Kind.OFFER, work.attempt, to, pack(work.offer), front=to.ticket)
            case SealWork():
                self._put(Kind.SEAL, work.attempt, to, pack(work.seal))
            case AbortWork():
                self._put(Kind.ABORT, work.attempt, to, refusal(work.cause, work.detail))
            case _:
                assert_never(work)

    def _put(self, kind: Kind, attempt: str, to: Destination, payload: bytes, front: bytes = b"") -> None:
        self._talk.put(kind, payload, attempt=attempt, generation=to.generation, key=self._key(to), front=front)

    def _key(self, to: Destination) -> bytes | None:
        if not self._plane.sealing:
            return None
        assert to.keys is not None
        return to.keys.to_receiver

    def _adapt(self, nbytes: int, took_s: float) -> None:
        """Buffers on the way may make a line look fast that is not: it is believed step by step."""
        turn_bytes = int(nbytes / max(took_s, 1e-6) * TURN_S)
        most_bytes = SEALED_BYTES if self._plane.sealing else DATA_BYTES
        self._turn_bytes = max(LEAST_BYTES, min(turn_bytes, 2 * self._turn_bytes, most_bytes))

    def _hear(self, header: Header) -> None:
        lane, now = self._lane.id, self._lane.heard_at
        if header.kind is Kind.KEEPALIVE:
            self._plane.tell_sender(Heard(lane, now))
            return
        key = self._plane.back_keys.get(header.attempt)
        if header.sealed and key is None:
            self._talk.discard(header)  # an answer about an attempt that is over
            return
        payload, attempt = self._talk.payload(header, key), header.attempt
        match header.kind:
            case Kind.ACCEPT:
                said = unpack(payload, Progress)
                self._plane.tell_sender(Accepted(lane, attempt, said.ranges, said.credit_bytes, now))
            case Kind.ACK:
                said = unpack(payload, Progress)
                self._plane.tell_sender(Acked(lane, attempt, said.ranges, said.credit_bytes, now))
            case Kind.COMPLETE:
                total = unpack(payload, Total)
                self._plane.tell_sender(Completed(lane, attempt, total.payload_bytes, now))
            case Kind.ABORT:
                why = refused(payload)
                self._plane.tell_sender(Aborted(lane, attempt, why.cause, why.detail, now))
            case _:
                raise ProtocolError(Cause.MALFORMED, f"{header.kind.name} from a listener")

    def _last_words(self) -> None:
        """A write failed: what the peer said before it closed is the better reason."""
        try:
            self._lane.limit(LINGER_S, altogether=True)
            while True:
                self._hear(self._talk.next())
        except ProtocolError as error:
            if error.cause not in (Cause.PEER_GONE, Cause.NO_PROGRESS):
                raise error from None
