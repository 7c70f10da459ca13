"""What the thread of an outgoing connection does: send one attempt's parts as they become ready, or ask who is
there."""

import time

from crc32c import crc32c

from prfaas.kvcache.layout import Part
from prfaas.transfer.attempts import Drained
from prfaas.transfer.frames import WIRE, Header, Kind, ProtocolError, encode, header_for
from prfaas.transfer.greeting import Hello, Welcome, pack, unpack
from prfaas.transfer.offer import seal_for
from prfaas.transfer.pump.lane import Lane
from prfaas.transfer.pump.messages import Probed
from prfaas.transfer.pump.plane import Plane
from prfaas.transfer.pump.sockets import connect, send_at_once
from prfaas.transfer.sender import Accepted, Dial, PartSent, Stream


def send(plane: Plane, lane: Lane, dial: Dial, memory: memoryview) -> None:
    """Body of an outbound lane's thread. The control thread is owed exactly one Drained."""
    failure = None
    try:
        _greet(plane, lane, dial.to.address, dial.to.incarnation)
        _offer(plane, lane, dial)
        _stream(plane, lane, dial, memory)
    except ProtocolError as error:
        failure = error
    cause, detail = (failure.cause, failure.detail) if failure else (None, "")
    plane.inbox.put(Drained(lane.id, dial.attempt, time.monotonic(), cause, detail))
    if failure and lane.stopped:
        lane.farewell(Kind.ABORT, failure, dial.attempt)


def probe(plane: Plane, lane: Lane, address: str) -> None:
    """Body of the thread that asks who is at `address`."""
    incarnation = None
    try:
        incarnation = _greet(plane, lane, address, None).incarnation
    except ProtocolError:
        pass
    plane.inbox.put(Probed(address=address, incarnation=incarnation))


def _greet(plane: Plane, lane: Lane, address: str, incarnation: int | None) -> Welcome:
    start = plane.start
    lane.connected(connect(address, start.connect_s, lane.orders))
    send_at_once(lane.sock)
    lane.limit(start.connect_s, altogether=True)
    hello = pack(
        Hello(
            node=start.node,
            namespace=start.namespace,
            oldest_wire=WIRE.oldest,
            newest_wire=WIRE.newest,
            incarnation=incarnation,
        )
    )
    lane.write(header_for(Kind.HELLO, hello), hello)
    return unpack(lane.payload(lane.expect(Kind.WELCOME)), Welcome)


def _offer(plane: Plane, lane: Lane, dial: Dial) -> None:
    payload = pack(dial.offer)
    lane.write(header_for(Kind.OFFER, payload, attempt=dial.attempt, generation=dial.to.generation), payload)
    lane.expect(Kind.ACCEPT)
    plane.inbox.put(Accepted(lane.id, dial.attempt, time.monotonic()))


def _stream(plane: Plane, lane: Lane, dial: Dial, memory: memoryview) -> None:
    """Prefill may compute for long between two parts: meanwhile a keepalive tells silence from a broken line, to both
    ends."""
    lane.limit(plane.start.no_progress_s, altogether=False)
    sent: dict[int, tuple[Part, int]] = {}
    last = False
    while not last:
        orders = lane.wait(plane.keepalive_s, lane.sock)
        lane.check_progress()
        if not orders:
            lane.listen()
            lane.write(header_for(Kind.KEEPALIVE, attempt=dial.attempt, generation=dial.to.generation))
        for order in orders:
            assert isinstance(order, Stream), order
            for part in order.parts:
                lane.listen()
                sent[part.index] = (part, _send_part(lane, dial, part, memory))
                plane.inbox.put(PartSent(lane.id, dial.attempt, part.index), wake=False)
            last = order.last
    parts, crcs = zip(*(sent[index] for index in sorted(sent)), strict=True) if sent else ((), ())
    seal = pack(seal_for(dial.offer.tokens, parts, crcs))
    lane.write(header_for(Kind.SEAL, seal, attempt=dial.attempt, generation=dial.to.generation), seal)
    lane.expect(Kind.ACK)


def _send_part(lane: Lane, dial: Dial, part: Part, memory: memoryview) -> int:
    """The part's checksum."""
    payload = memory[part.offset : part.offset + part.nbytes]
    header = Header(
        kind=Kind.PART,
        attempt=dial.attempt,
        generation=dial.to.generation,
        index=part.index,
        offset=part.offset,
        length=part.nbytes,
        payload_crc=crc32c(payload),
    )
    lane.write(encode(header), payload)
    return header.payload_crc
