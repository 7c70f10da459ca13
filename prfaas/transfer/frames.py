"""Frames of the KV data plane: a fixed header, then `length` bytes of payload.

A header is refused before memory is taken for its payload: the magic and the header's own checksum tell noise from
frames, and every kind has a longest payload. The greeting frames (HELLO, WELCOME, REFUSE) stay at wire version 1 for
ever, so that nodes of any two versions can tell each other why they will not talk.
"""

import struct
from dataclasses import dataclass
from enum import Enum, IntEnum

from crc32c import crc32c

from prfaas.cluster import WireRange
from prfaas.errors import PrfaasError

MAGIC = b"PFKV"
WIRE = WireRange(1, 1)
GREETING_WIRE = 1
#: The attempt of frames that belong to none.
NO_ATTEMPT = "0" * 32

Bytes = bytes | bytearray | memoryview


class Kind(IntEnum):
    """Dialler: HELLO, OFFER, PART..., SEAL (KEEPALIVE while it has nothing to say). Listener: WELCOME, ACCEPT, ACK.
    REFUSE answers a HELLO or an OFFER, ABORT ends what had been accepted."""

    HELLO = 1
    WELCOME = 2
    REFUSE = 3
    OFFER = 4
    ACCEPT = 5
    PART = 6
    KEEPALIVE = 7
    SEAL = 8
    ACK = 9
    ABORT = 10


class Cause(Enum):
    """Why a transfer, or a connection that wanted to become one, came to nothing. The first cause is the one that is
    kept."""

    CONNECT = "connect"
    PEER_GONE = "peer_gone"
    NO_PROGRESS = "no_progress"
    MALFORMED = "malformed"
    CHECKSUM = "checksum"
    WIRE = "wire"
    NAMESPACE = "namespace"
    INCARNATION = "incarnation"
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
#: Longest payload of each kind. A part of an offer takes 24 bytes; a part has the size that the offer gave it.
LIMIT_BYTES = {
    Kind.HELLO: SMALL_BYTES,
    Kind.WELCOME: SMALL_BYTES,
    Kind.REFUSE: SMALL_BYTES,
    Kind.OFFER: 4 << 20,
    Kind.ACCEPT: 0,
    Kind.PART: 1 << 30,
    Kind.KEEPALIVE: 0,
    Kind.SEAL: SMALL_BYTES,
    Kind.ACK: 0,
    Kind.ABORT: SMALL_BYTES,
}


class ProtocolError(PrfaasError):
    """What came over the wire is not acceptable. Ends the connection, and the attempt if it belonged to one."""

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(f"{cause.value}: {detail}")
        self.cause, self.detail = cause, detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    kind: Kind
    attempt: str = NO_ATTEMPT
    generation: int = 0
    index: int = 0
    offset: int = 0
    length: int = 0
    payload_crc: int = 0
    version: int = WIRE.newest


#: magic, version, kind, zero, attempt, generation, part index, offset, length, payload crc; then the crc of all that.
_FIELDS = struct.Struct("<4sBBH16sIIQII")
_CRC = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CRC.size


def header_for(kind: Kind, payload: Bytes = b"", *, attempt: str = NO_ATTEMPT, generation: int = 0) -> bytes:
    """The encoded header of any frame but a part."""
    return encode(
        Header(
            kind=kind,
            attempt=attempt,
            generation=generation,
            length=len(payload),
            payload_crc=crc32c(payload),
            version=GREETING_WIRE if kind in (Kind.HELLO, Kind.WELCOME, Kind.REFUSE) else WIRE.newest,
        )
    )


def encode(header: Header) -> bytes:
    assert header.length <= LIMIT_BYTES[header.kind], f"{header.kind.name} of {header.length} bytes"
    fields = _FIELDS.pack(
        MAGIC,
        header.version,
        header.kind,
        0,
        bytes.fromhex(header.attempt),
        header.generation,
        header.index,
        header.offset,
        header.length,
        header.payload_crc,
    )
    return fields + _CRC.pack(crc32c(fields))


def decode(buffer: Bytes) -> Header:
    """Raises ProtocolError when the bytes are not a header that we accept."""
    fields = bytes(buffer[: _FIELDS.size])
    magic, version, kind, _, attempt, generation, index, offset, length, payload_crc = _FIELDS.unpack(fields)
    if magic != MAGIC:
        raise ProtocolError(Cause.MALFORMED, f"magic {magic!r}")
    if _CRC.unpack_from(buffer, _FIELDS.size) != (crc32c(fields),):
        raise ProtocolError(Cause.CHECKSUM, "header")
    if not WIRE.oldest <= version <= WIRE.newest and version != GREETING_WIRE:
        raise ProtocolError(Cause.WIRE, f"ours {WIRE.oldest}-{WIRE.newest}, theirs {version}")
    try:
        kind = Kind(kind)
    except ValueError:
        raise ProtocolError(Cause.MALFORMED, f"kind {kind}") from None
    if length > LIMIT_BYTES[kind]:
        raise ProtocolError(Cause.MALFORMED, f"{kind.name} of {length} bytes, limit {LIMIT_BYTES[kind]}")
    return Header(
        kind=kind,
        attempt=attempt.hex(),
        generation=generation,
        index=index,
        offset=offset,
        length=length,
        payload_crc=payload_crc,
        version=version,
    )


def check_payload(header: Header, payload: Bytes) -> None:
    """Raises ProtocolError when the payload is not the one the header was made for."""
    actual = crc32c(payload)
    if actual != header.payload_crc:
        what = f"part {header.index}" if header.kind is Kind.PART else header.kind.name
        raise ProtocolError(Cause.CHECKSUM, f"{what}: {actual:#010x}, header says {header.payload_crc:#010x}")
