"""Frames of the token link over plain TCP: a length, a kind, and so many bytes.

A frame is refused by its header, before memory is taken for it; what was refused ends the connection. GREETING is the
first frame of either side and stays as it is for ever, so that any two versions can tell each other why they will not
talk; after it a MESSAGE is a ToWorker or a FromWorker, and a PING is answered with a PONG.
"""

import struct
from collections.abc import Iterable
from enum import IntEnum

from google.protobuf.message import DecodeError

from prfaas.cluster import Incarnation, NodeId, WireRange
from prfaas.rpc.v1 import worker_pb2 as pb

#: What is spoken after the greeting.
LINK_WIRE = WireRange(1, 1)
MAGIC = b"prfaas link\n"
#: Of a greeting, and of any frame before the greeting has been accepted.
MAX_GREETING_BYTES = 4096
#: Who nobody in particular is: for a greeting that only asks who answers.
ANYBODY = NodeId("")

_HEADER = struct.Struct("<IB")
HEADER_BYTES = _HEADER.size

Frame = tuple["Kind", bytes]


class Kind(IntEnum):
    GREETING = 1
    MESSAGE = 2
    PING = 3
    PONG = 4


_KINDS = {int(kind): kind for kind in Kind}


class Malformed(Exception):
    """What came is no frame, or none that may come now."""


def header(kind: Kind, length: int) -> bytes:
    return _HEADER.pack(length, kind)


def frame(kind: Kind, body: bytes = b"") -> bytes:
    return _HEADER.pack(len(body), kind) + body


class FrameReader:
    """Bytes in, however they are cut; whole frames out. Holds at most one frame that is not whole, of at most
    `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held: list[bytes] = []
        self.held_bytes, self._needed = 0, HEADER_BYTES

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are whole now. Raises Malformed; no use after that."""
        if self._held:
            self._held.append(data)
            self.held_bytes += len(data)
            if self.held_bytes < self._needed:
                return []
            data = b"".join(self._held)
            self._held, self.held_bytes = [], 0
        frames: list[Frame] = []
        start, end, needed = 0, len(data), HEADER_BYTES
        while end - start >= HEADER_BYTES:
            length, kind = _HEADER.unpack_from(data, start)
            if length > self.max_bytes:
                raise Malformed(f"a frame of {length} bytes; at most {self.max_bytes} are accepted")
            if kind not in _KINDS:
                raise Malformed(f"a frame of unknown kind {kind}")
            needed = HEADER_BYTES + length
            if end - start < needed:
                break
            frames.append((_KINDS[kind], data[start + HEADER_BYTES : start + needed]))
            start += needed
            needed = HEADER_BYTES
        if start < end:
            self._held, self.held_bytes, self._needed = [data[start:]], end - start, needed
        return frames


def repeated(elements: Iterable[bytes]) -> bytes:
    """The message whose field 1 repeats these serialized elements: what protobuf makes of a ToWorker or a FromWorker,
    without a copy of each element into one first."""
    parts: list[bytes] = []
    for element in elements:
        parts.append(_tag(len(element)))
        parts.append(element)
    return b"".join(parts)


def _tag(length: int) -> bytes:
    """Field 1, of so many bytes."""
    return _TAGS[length] if length < len(_TAGS) else b"\x0a" + _varint(length)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


_TAGS = tuple(b"\x0a" + _varint(length) for length in range(256))


def greeting(node: NodeId, incarnation: Incarnation, refused: str = "", wire: WireRange = LINK_WIRE) -> bytes:
    """A whole frame: of a router whom it means, of a worker who it is."""
    said = pb.LinkGreeting(
        oldest=wire.oldest, newest=wire.newest, node=node, incarnation=incarnation, refused=refused[:1024]
    )
    return frame(Kind.GREETING, MAGIC + said.SerializeToString())


def read_greeting(kind: Kind, body: bytes) -> pb.LinkGreeting:
    """Raises Malformed for what is none."""
    if kind is not Kind.GREETING or not body.startswith(MAGIC):
        raise Malformed("no greeting of a token link")
    try:
        return pb.LinkGreeting.FromString(body[len(MAGIC) :])
    except DecodeError as error:
        raise Malformed("no greeting of a token link") from error


def same_wire(said: pb.LinkGreeting, wire: WireRange = LINK_WIRE) -> bool:
    return wire.meets(WireRange(said.oldest, said.newest))
