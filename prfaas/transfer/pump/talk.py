"""Frames on a lane: how they are written and read, in plain or sealed.

Nothing is read before its length was checked, and memory beyond a small scratch is only taken for a frame of an attempt
that was asked for. Payloads of DATA go from the pool to the socket and from the socket to the pool; only a cipher's
output lies in between, and what it takes or makes in one piece that lies in several.
"""

import time
from collections.abc import Iterator, Sequence

from crc32c import crc32c

from prfaas.transfer.frames import (
    CONTROL_BYTES,
    GREETING_WIRE,
    GREETINGS,
    HEADER_BYTES,
    NO_ATTEMPT,
    OF_ATTEMPT,
    TAG_BYTES,
    WIRE,
    Bytes,
    Cause,
    Header,
    Kind,
    ProtocolError,
    decode,
    encode,
)
from prfaas.transfer.greeting import refusal, refused
from prfaas.transfer.pieces import Run
from prfaas.transfer.pump.lane import Lane
from prfaas.transfer.pump.seal import Opener, Sealer

#: What is received is checksummed in parts so small that they are still in the processor's cache, and so large that
#: handing the interpreter over to other lanes and back costs little beside them.
CHECKED_BYTES = 512 << 10
#: Over a checksum the interpreter is kept: it takes less time than a hand-over where lanes compete.
_KEPT = 0
#: Frames in one call: each takes two of the 1,024 buffers that the kernel allows.
MAX_RUNS = 500


class Talk:
    """`sealing`: frames of attempts are sealed, and are not accepted otherwise. The greetings tell the salts."""

    def __init__(self, lane: Lane, *, sealing: bool) -> None:
        self._lane, self.sealing = lane, sealing
        self._sealer, self._opener = Sealer(0, 0), Opener(0, 0)
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._scratch = memoryview(bytearray(CONTROL_BYTES + TAG_BYTES))
        self._sealed, self._plain = memoryview(b""), memoryview(b"")

    def rest(self, silence_s: float, keepalive_s: float) -> None:
        """There is nothing to do. A keepalive tells silence from a broken line, to both ends; and when one is due,
        nothing has gone for a while: what large frames needed is given back."""
        now = time.monotonic()
        silence_ends, speak_at = self._lane.heard_at + silence_s, self._lane.spoke_at + keepalive_s
        if now >= silence_ends:
            raise ProtocolError(Cause.NO_PROGRESS, f"nothing heard for {silence_s:g} s")
        if now >= speak_at:
            self._sealed, self._plain = memoryview(b""), memoryview(b"")
            self.put(Kind.KEEPALIVE)
        else:
            self._lane.sleep(min(silence_ends, speak_at) - now)

    def secure(self, own_salt: int, peer_salt: int) -> None:
        self._sealer, self._opener = Sealer(own_salt, peer_salt), Opener(peer_salt, own_salt)

    # What comes.

    def begin(self) -> Header | None:
        """The header of the next frame; None if none has begun to come. A REFUSE is raised as what it says."""
        return self._header() if self._lane.begin(self._head) else None

    def next(self) -> Header:
        self._lane.read(self._head)
        return self._header()

    def expect(self, kind: Kind) -> Header:
        header = self.next()
        if header.kind is not kind:
            raise ProtocolError(Cause.MALFORMED, f"{header.kind.name} where {kind.name} was due")
        return header

    def front(self, nbytes: int) -> bytes:
        """The first bytes of a payload; they are never sealed."""
        into = self._scratch[:nbytes]
        self._lane.read(into)
        return bytes(into)

    def payload(self, header: Header, key: bytes | None = None, front: bytes = b"") -> bytearray:
        """The payload of any frame but DATA, behind what was read of it already. Raises ProtocolError when it is not
        the one that was sent."""
        plain = bytearray(header.length - len(front))
        if header.sealed:
            assert key is not None
            sealed = self._scratch[: len(plain) + TAG_BYTES]
            self._lane.read(sealed)
            self._opener.open(key, header, self._head, sealed, memoryview(plain))
        else:
            self._lane.read(memoryview(plain))
            if crc32c(plain, crc32c(front)) != header.payload_crc:
                raise ProtocolError(Cause.CHECKSUM, header.kind.name)
        return plain

    def land(self, header: Header, key: bytes | None, places: list[memoryview]) -> None:
        """The payload of a DATA frame, to its places."""
        if header.sealed:
            assert key is not None
            sealed = self._room(header.wire_bytes)
            self._lane.read(sealed)
            plain = places[0] if len(places) == 1 else self._between(header.length)
            self._opener.open(key, header, self._head, sealed, plain)
            if len(places) > 1:
                spread(plain, places)
        else:
            crc = 0
            for batch in _batches(places):
                self._lane.scatter(batch)
                for part in batch:
                    crc = crc32c(part, crc, gil_release_mode=_KEPT)
            if crc != header.payload_crc:
                what = f"pieces {header.index}+{header.count}"
                raise ProtocolError(Cause.CHECKSUM, f"{what}: {crc:#010x}, header says {header.payload_crc:#010x}")

    def unsealed(self, header: Header, key: bytes) -> memoryview:
        """The payload of a sealed DATA frame, in memory of its own: `land` leaves anything in the places of one that
        does not open."""
        plain = memoryview(bytearray(header.length))
        self.land(header, key, [plain])
        return plain

    def discard(self, header: Header, done: int = 0) -> None:
        """The payload of any frame, but for what was read of it already."""
        left = header.wire_bytes - done
        while left:
            part = self._scratch[: min(left, len(self._scratch))]
            self._lane.read(part)
            left -= len(part)

    # What goes.

    def put(
        self,
        kind: Kind,
        payload: Bytes = b"",
        *,
        attempt: str = NO_ATTEMPT,
        generation: int = 0,
        key: bytes | None = None,
        front: bytes = b"",
    ) -> None:
        """Any frame but DATA; with a key all of it but `front` is sealed."""
        version = GREETING_WIRE if kind in GREETINGS else WIRE.newest
        length = len(front) + len(payload)
        if key is None:
            header = Header(
                kind=kind,
                attempt=attempt,
                generation=generation,
                length=length,
                payload_crc=crc32c(payload, crc32c(front)),
                version=version,
            )
            self._lane.write((encode(header), front, payload))
        else:
            header = Header(kind=kind, attempt=attempt, generation=generation, length=length)
            sealed = memoryview(bytearray(len(payload) + TAG_BYTES))
            self._lane.write((self._sealer.seal(key, header, payload, sealed), front, sealed))

    def put_data(
        self, attempt: str, generation: int, key: bytes | None, runs: Sequence[Run], memory: memoryview
    ) -> None:
        """A DATA frame for each run of what lies in `memory`."""
        for at in range(0, len(runs), MAX_RUNS):
            self._put_runs(attempt, generation, key, runs[at : at + MAX_RUNS], memory)

    def farewell(self, error: ProtocolError) -> None:
        """Tell the peer why the lane ends, as far as it still listens."""
        try:
            self.put(Kind.REFUSE, refusal(error.cause, error.detail))
        except ProtocolError:
            return
        self._lane.drain(self._scratch)

    def _put_runs(
        self, attempt: str, generation: int, key: bytes | None, runs: Sequence[Run], memory: memoryview
    ) -> None:
        buffers: list[Bytes] = []
        room = self._room(sum(run.nbytes + TAG_BYTES for run in runs)) if key is not None else None
        for run in runs:
            places, crc = [memory[offset : offset + nbytes] for offset, nbytes in run.places], 0
            if key is None:
                for place in places:
                    crc = crc32c(place, crc, gil_release_mode=_KEPT)
            header = Header(
                kind=Kind.DATA,
                attempt=attempt,
                generation=generation,
                index=run.first,
                count=run.count,
                offset=run.offset,
                length=run.nbytes,
                payload_crc=crc,
            )
            if key is None or room is None:
                buffers += (encode(header), *places)
            else:
                sealed, room = room[: run.nbytes + TAG_BYTES], room[run.nbytes + TAG_BYTES :]
                buffers += (self._sealer.seal(key, header, self._together(places), sealed), sealed)
        self._lane.write(buffers)

    def _header(self) -> Header:
        header = decode(self._head)
        self._lane.heard_at = time.monotonic()
        if header.kind in OF_ATTEMPT and header.sealed is not self.sealing:
            raise ProtocolError(Cause.CHECKSUM, f"{header.kind.name} is {'' if header.sealed else 'not '}sealed")
        if header.kind is Kind.REFUSE:
            raise refused(self.payload(header))
        return header

    def _room(self, nbytes: int) -> memoryview:
        """For sealed payloads; grows to the largest that this lane has carried."""
        if len(self._sealed) < nbytes:
            self._sealed = memoryview(bytearray(nbytes))
        return self._sealed[:nbytes]

    def _between(self, nbytes: int) -> memoryview:
        """For plain payloads that do not lie together."""
        if len(self._plain) < nbytes:
            self._plain = memoryview(bytearray(nbytes))
        return self._plain[:nbytes]

    def _together(self, places: Sequence[memoryview]) -> memoryview:
        """What is in the places, in one."""
        if len(places) == 1:
            return places[0]
        plain, at = self._between(sum(len(place) for place in places)), 0
        for place in places:
            plain[at : at + len(place)] = place
            at += len(place)
        return plain


def spread(plain: memoryview, places: Sequence[memoryview]) -> None:
    """A payload to its places."""
    at = 0
    for place in places:
        place[:] = plain[at : at + len(place)]
        at += len(place)


def _batches(places: list[memoryview]) -> Iterator[list[memoryview]]:
    """The places cut to what is read in one call and then checked."""
    batch: list[memoryview] = []
    left = CHECKED_BYTES
    for place in places:
        while place:
            batch.append(place[:left])
            place, left = place[left:], left - len(batch[-1])
            if not left:
                yield batch
                batch, left = [], CHECKED_BYTES
    if batch:
        yield batch
