"""Who is on the other end of a lane: compared before anything else of it is parsed.

The dialler says which wire versions, namespace and way of checking bytes it has and which incarnation it means to
reach; the listener welcomes it or refuses it with both values. Who the dialler says it is proves nothing by itself: the
ticket of every offer is bound to that name.
"""

from typing import Annotated, TypeVar

import msgspec

from prfaas.cluster import WireRange
from prfaas.transfer.frames import SMALL_BYTES, Bytes, Cause, ProtocolError

DETAIL_CHARS = 400

Salt = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """`incarnation` is whom the dialler means to reach; None asks who is there. `own_incarnation`: lanes of one node
    with the same are of one process. `integrity`: how the payloads of attempts are protected; both ends must do it the
    same way."""

    node: str
    namespace: str
    oldest_wire: int
    newest_wire: int
    incarnation: int | None
    own_incarnation: int = 0
    integrity: str = "crc32c"
    #: The dialler's part of the nonces of what it seals here: no other lane of its process has it. Each end makes its
    #: own, so that nobody on the way can have a nonce used twice by telling a wrong one.
    salt: Salt = 0


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """`salt`: as the dialler's, of what the listener seals."""

    node: str
    incarnation: int
    salt: Salt = 0


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Payload of REFUSE and ABORT. `cause` is a word of Cause, or one that only a newer peer knows."""

    cause: str
    detail: str = ""


Message = TypeVar("Message")


def pack(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def unpack(payload: Bytes, kind: type[Message]) -> Message:
    """Raises ProtocolError. Fields we do not know are skipped: a newer peer may add some."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(Cause.MALFORMED, f"{kind.__name__}: {error}") from None


def compare(hello: Hello, namespace: str, incarnation: int, wire: WireRange, integrity: str = "crc32c") -> None:
    """Raises ProtocolError when the dialler must not talk to us."""
    theirs = WireRange(hello.oldest_wire, hello.newest_wire)
    if not wire.meets(theirs):
        raise ProtocolError(Cause.WIRE, f"ours {wire.oldest}-{wire.newest}, theirs {theirs.oldest}-{theirs.newest}")
    if hello.namespace != namespace:
        raise ProtocolError(Cause.NAMESPACE, f"ours {namespace}, theirs {hello.namespace[:64]}")
    if hello.incarnation not in (None, incarnation):
        raise ProtocolError(Cause.INCARNATION, f"ours {incarnation:#x}, theirs {hello.incarnation:#x}")
    if hello.incarnation is not None and hello.integrity != integrity:
        raise ProtocolError(Cause.WIRE, f"integrity: ours {integrity}, theirs {hello.integrity[:16]}")


def refusal(cause: Cause, detail: str) -> bytes:
    payload = pack(Refusal(cause=cause.value, detail=detail[:DETAIL_CHARS]))
    assert len(payload) <= SMALL_BYTES
    return payload


def refused(payload: Bytes) -> ProtocolError:
    """What a REFUSE or ABORT from the peer means here."""
    said = unpack(payload, Refusal)
    try:
        return ProtocolError(Cause(said.cause), f"peer: {said.detail}")
    except ValueError:
        return ProtocolError(Cause.ABORTED, f"peer: {said.cause[:32]} {said.detail}")
