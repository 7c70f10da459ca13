"""Frames of the KV data plane: a fixed header, then `length` bytes of payload, and a tag behind them when it is sealed.

A header is refused before memory is taken for its payload: the magic and the header's own checksum tell noise from
frames, and every kind has a longest payload. A DATA frame carries a run of consecutive pieces. The greeting
frames (HELLO, WELCOME, REFUSE) stay at wire version 1 for ever, in plain, so that nodes of any two versions can tell
each other why they will not talk.
"""

import struct
from dataclasses import dataclass
from enum import Enum, IntEnum

from crc32c import crc32c

from prfaas.cluster import WireRange
from prfaas.errors import PrfaasError

MAGIC = b"PFK2"
WIRE = WireRange(3, 3)
GREETING_WIRE = 1
#: The attempt of frames that belong to none.
NO_ATTEMPT = "0" * 32
#: What a sealed payload is longer by on the wire.
TAG_BYTES = 16

Bytes = bytes | bytearray | memoryview


class Kind(IntEnum):
    """Dialler: HELLO, OFFER, DATA, SEAL. Listener: WELCOME, REFUSE (ends the lane), ACCEPT, ACK, COMPLETE. Both: ABORT
    (ends an attempt), KEEPALIVE."""

    HELLO = 1
    WELCOME = 2
    REFUSE = 3
    OFFER = 4
    ACCEPT = 5
    DATA = 6
    KEEPALIVE = 7
    SEAL = 8
    ACK = 9
    ABORT = 10
    COMPLETE = 11


GREETINGS = frozenset({Kind.HELLO, Kind.WELCOME, Kind.REFUSE})
#: Frames of an attempt: sealed with its keys where the pump encrypts.
OF_ATTEMPT = frozenset({Kind.OFFER, Kind.ACCEPT, Kind.DATA, Kind.SEAL, Kind.ACK, Kind.ABORT, Kind.COMPLETE})


class Cause(Enum):
    """Why a transfer, or a connection that wanted to carry some, came to nothing. The first cause is the one that is
    kept."""

    CONNECT = "connect"
    PEER_GONE = "peer_gone"
    NO_PROGRESS = "no_progress"
    MALFORMED = "malformed"
    CHECKSUM = "checksum"
    WIRE = "wire"
    NAMESPACE = "namespace"
    INCARNATION = "incarnation"
    TICKET = "ticket"
    UNKNOWN_ATTEMPT = "unknown_attempt"
    CLOSED_ATTEMPT = "closed_attempt"
    STALE_GENERATION = "stale_generation"
    ALREADY_OFFERED = "already_offered"
    OFFER_MISMATCH = "offer_mismatch"
    UNEXPECTED_PART = "unexpected_part"
    DUPLICATE_PART = "duplicate_part"
    MISSING_PART = "missing_part"
    SEAL_MISMATCH = "seal_mismatch"
    BUSY = "busy"
    EXPIRED = "expired"
    ABORTED = "aborted"


#: The line or the peer failed, or somebody decided to stop. Every other cause means that a frame was refused.
NOT_THE_FRAMES_FAULT = frozenset(
    {Cause.CONNECT, Cause.PEER_GONE, Cause.NO_PROGRESS, Cause.BUSY, Cause.EXPIRED, Cause.ABORTED}
)

SMALL_BYTES = 4 << 10
CONTROL_BYTES = 64 << 10
DATA_BYTES = 4 << 20
#: Of a DATA frame that is sealed: each end of each lane holds its ciphertext while it is written or read.
SEALED_BYTES = 1 << 20
#: Longest plain payload of each kind.
LIMIT_BYTES = {
    Kind.HELLO: SMALL_BYTES,
    Kind.WELCOME: SMALL_BYTES,
    Kind.REFUSE: SMALL_BYTES,
    Kind.OFFER: CONTROL_BYTES,
    Kind.ACCEPT: CONTROL_BYTES,
    Kind.DATA: DATA_BYTES,
    Kind.KEEPALIVE: 0,
    Kind.SEAL: SMALL_BYTES,
    Kind.ACK: CONTROL_BYTES,
    Kind.ABORT: SMALL_BYTES,
    Kind.COMPLETE: SMALL_BYTES,
}


class ProtocolError(PrfaasError):
    """What came over the wire is not acceptable. Whether that ends an attempt or a lane is for its catcher to say.
    `counted`: it is in the count of refusals already."""

    counted = False

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(f"{cause.value}: {detail}")
        self.cause, self.detail = cause, detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """`index` and `count`: the pieces of a DATA frame. `offset`: how many bytes of the transfer come before
    its first. `length`: of the payload in plain. `counter`: with the lane's salt, the nonce of a sealed payload."""

    kind: Kind
    attempt: str = NO_ATTEMPT
    generation: int = 0
    index: int = 0
    count: int = 0
    offset: int = 0
    length: int = 0
    counter: int = 0
    payload_crc: int = 0
    sealed: bool = False
    version: int = WIRE.newest

    @property
    def wire_bytes(self) -> int:
        """What follows the header."""
        return self.length + TAG_BYTES if self.sealed else self.length


#: magic, version, kind, flags, attempt, generation, first piece, pieces, offset, length, counter; then the crc of the
#: payload; then the crc of all that.
_BOUND = struct.Struct("<4sBBH16sIIIQIQ")
_CRC = struct.Struct("<I")
#: What a sealed payload is bound to: the header but for the checksums.
AAD_BYTES = _BOUND.size
HEADER_BYTES = AAD_BYTES + 2 * _CRC.size
_SEALED = 1
_KINDS = {int(kind): kind for kind in Kind}


def longest(kind: Kind, *, sealed: bool) -> int:
    """Plain payload bytes that a frame may have."""
    return min(LIMIT_BYTES[kind], SEALED_BYTES) if sealed else LIMIT_BYTES[kind]


def header_for(kind: Kind, payload: Bytes = b"", *, attempt: str = NO_ATTEMPT, generation: int = 0) -> bytes:
    """The encoded header of a frame in plain, of any kind but DATA."""
    return encode(
        Header(
            kind=kind,
            attempt=attempt,
            generation=generation,
            length=len(payload),
            payload_crc=crc32c(payload),
            version=GREETING_WIRE if kind in GREETINGS else WIRE.newest,
        )
    )


def encode(header: Header) -> bytes:
    assert header.length <= longest(header.kind, sealed=header.sealed), f"{header.kind.name} of {header.length} bytes"
    assert not (header.sealed and header.payload_crc), "a sealed payload has its tag"
    bound = _BOUND.pack(
        MAGIC,
        header.version,
        header.kind,
        _SEALED if header.sealed else 0,
        bytes.fromhex(header.attempt),
        header.generation,
        header.index,
        header.count,
        header.offset,
        header.length,
        header.counter,
    ) + _CRC.pack(header.payload_crc)
    return bound + _CRC.pack(crc32c(bound))


def decode(buffer: Bytes) -> Header:
    """Raises ProtocolError when the bytes are not a header that we accept."""
    magic, version, kind_number, flags, attempt, generation, index, count, offset, length, counter = _BOUND.unpack_from(
        buffer
    )
    if magic != MAGIC:
        raise ProtocolError(Cause.MALFORMED, f"magic {magic!r}")
    checked = AAD_BYTES + _CRC.size
    if _CRC.unpack_from(buffer, checked) != (crc32c(bytes(buffer[:checked])),):
        raise ProtocolError(Cause.CHECKSUM, "header")
    kind = _KINDS.get(kind_number)
    if not WIRE.oldest <= version <= WIRE.newest and not (version == GREETING_WIRE and kind in GREETINGS):
        raise ProtocolError(Cause.WIRE, f"ours {WIRE.oldest}-{WIRE.newest}, theirs {version}")
    if kind is None:
        raise ProtocolError(Cause.MALFORMED, f"kind {kind_number}")
    if flags & ~_SEALED or (flags and kind not in OF_ATTEMPT):
        raise ProtocolError(Cause.MALFORMED, f"{kind.name} with flags {flags:#x}")
    if length > (limit := longest(kind, sealed=bool(flags))):
        raise ProtocolError(Cause.MALFORMED, f"{kind.name} of {length} bytes, limit {limit}")
    return Header(
        kind=kind,
        attempt=attempt.hex(),
        generation=generation,
        index=index,
        count=count,
        offset=offset,
        length=length,
        counter=counter,
        payload_crc=_CRC.unpack_from(buffer, AAD_BYTES)[0],
        sealed=bool(flags),
        version=version,
    )


def check_payload(header: Header, payload: Bytes) -> None:
    """Raises ProtocolError when the payload is not the one the header was made for."""
    actual = crc32c(payload)
    if actual != header.payload_crc:
        what = f"piece {header.index}+{header.count}" if header.kind is Kind.DATA else header.kind.name
        raise ProtocolError(Cause.CHECKSUM, f"{what}: {actual:#010x}, header says {header.payload_crc:#010x}")
