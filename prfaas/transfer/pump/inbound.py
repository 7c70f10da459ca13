"""Incoming connections: the thread that accepts them, and what the thread of each one does."""

import errno
import socket
import time

from prfaas.transfer.attempts import Drained
from prfaas.transfer.frames import WIRE, Cause, Header, Kind, ProtocolError, check_payload, header_for
from prfaas.transfer.greeting import Hello, Welcome, compare, pack, unpack
from prfaas.transfer.offer import Offer, Seal
from prfaas.transfer.pump.lane import Land, Lane
from prfaas.transfer.pump.plane import MAX_LANES, Plane
from prfaas.transfer.pump.sockets import send_at_once
from prfaas.transfer.receiver import (
    Acknowledge,
    Admit,
    OfferAnnounced,
    OfferArrived,
    PartArrived,
    SealArrived,
    Turned,
)

#: The system is short of something for everybody; the listener waits this long for it.
SHORTAGE_S = 0.1
#: The control thread decides in well under a millisecond; it is only late when the node does not read what we send it.
DECISION_S = 10.0
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


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
            sock.close()
            plane.inbox.put(Turned(Cause.BUSY))
            continue
        plane.run(plane.inbound, Lane(plane.new_lane(), sock), lambda lane: serve(plane, lane))


def serve(plane: Plane, lane: Lane) -> None:
    """Body of an inbound lane's thread. Until an offer is announced the connection is nobody's; from then on the
    control thread is owed exactly one Drained."""
    try:
        send_at_once(lane.sock)
        _greet(plane, lane)
        offer = lane.expect(Kind.OFFER)
    except ProtocolError as error:
        plane.inbox.put(Turned(error.cause))
        return
    landing = failure = None
    try:
        landing = _negotiate(plane, lane, offer)
        _receive(plane, lane, offer, landing)
    except ProtocolError as error:
        failure = error
    cause, detail = (failure.cause, failure.detail) if failure else (None, "")
    plane.inbox.put(Drained(lane.id, offer.attempt, time.monotonic(), cause, detail))
    if failure:
        lane.farewell(Kind.ABORT if landing else Kind.REFUSE, failure, offer.attempt)


def _greet(plane: Plane, lane: Lane) -> None:
    """Noise is dropped without a word; a peer that speaks the protocol hears why it is refused."""
    start = plane.start
    lane.limit(start.connect_s, altogether=True)
    hello = unpack(lane.payload(lane.expect(Kind.HELLO)), Hello)
    try:
        compare(hello, start.namespace, start.incarnation, WIRE)
    except ProtocolError as error:
        lane.farewell(Kind.REFUSE, error)
        raise
    welcome = pack(Welcome(node=start.node, incarnation=start.incarnation))
    lane.write(header_for(Kind.WELCOME, welcome), welcome)
    lane.limit(start.connect_s, altogether=True)


def _negotiate(plane: Plane, lane: Lane, header: Header) -> Land:
    """No memory is taken for the offer before the control thread knows the attempt."""
    plane.inbox.put(OfferAnnounced(lane.id, header.attempt, header.generation))
    admit = lane.answer(DECISION_S)
    assert isinstance(admit, Admit), admit
    offer = unpack(lane.payload(header), Offer)
    plane.inbox.put(OfferArrived(lane.id, header.attempt, offer))
    landing = lane.answer(DECISION_S)
    assert isinstance(landing, Land), landing
    return landing


def _receive(plane: Plane, lane: Lane, offer: Header, landing: Land) -> None:
    lane.write(header_for(Kind.ACCEPT, attempt=offer.attempt, generation=offer.generation))
    lane.limit(plane.start.no_progress_s, altogether=False)
    while (header := lane.header()).kind is Kind.PART:
        part = landing.grant.claim(header)
        place = landing.memory[part.offset : part.offset + part.nbytes]
        lane.read(place)
        check_payload(header, place)
        plane.inbox.put(PartArrived(lane.id, offer.attempt, part.index, header.payload_crc), wake=False)
    if header.kind is not Kind.SEAL:
        raise ProtocolError(Cause.MALFORMED, f"{header.kind.name} where PART or SEAL was due")
    landing.grant.fits(header)
    plane.inbox.put(SealArrived(lane.id, offer.attempt, unpack(lane.payload(header), Seal)))
    acknowledge = lane.answer(DECISION_S)
    assert isinstance(acknowledge, Acknowledge), acknowledge
    lane.write(header_for(Kind.ACK, attempt=offer.attempt, generation=offer.generation))
