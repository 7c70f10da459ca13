"""Who may send into a reservation, and with which keys.

The receiver mints a ticket when it reserves and is the only one that can verify it: a MAC under a secret that never
leaves its process, over the attempt, its own incarnation, the node that may send, how much and until when. The keys of
an attempt come from the same secret, one for each direction; both reach the sender over the control plane.
"""

import hashlib
import hmac
import struct
from dataclasses import dataclass, field

from prfaas.transfer.frames import Bytes, Cause, ProtocolError

SECRET_BYTES = 32
KEY_BYTES = 16

#: digest of the source, bytes that may be sent, expiry on the receiver's own clock in milliseconds.
_CLAIMS = struct.Struct("<16sQQ")
#: what the MAC covers besides: the attempt and the incarnation.
_CONTEXT = struct.Struct("<16sQ")
_MAC_BYTES = 32
TICKET_BYTES = _CLAIMS.size + _MAC_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """AES-128 keys of one attempt: of what goes to its receiver, and of what comes back."""

    to_receiver: bytes = field(repr=False)
    to_sender: bytes = field(repr=False)


def mint(secret: bytes, *, attempt: str, source: str, incarnation: int, nbytes: int, expires_at: float) -> bytes:
    claims = _CLAIMS.pack(_name(source), nbytes, int(expires_at * 1000))
    return claims + _mac(secret, attempt, incarnation, claims)


def verify(secret: bytes, ticket: Bytes, *, attempt: str, source: str, incarnation: int, now: float) -> int:
    """How many bytes the ticket is for. Raises ProtocolError with the cause `ticket`."""
    if len(ticket) != TICKET_BYTES:
        raise ProtocolError(Cause.TICKET, f"{len(ticket)} bytes")
    claims = bytes(ticket[: _CLAIMS.size])
    if not hmac.compare_digest(bytes(ticket[_CLAIMS.size :]), _mac(secret, attempt, incarnation, claims)):
        raise ProtocolError(Cause.TICKET, "not one of ours")
    for_source, nbytes, expires_ms = _CLAIMS.unpack(claims)
    if for_source != _name(source):
        raise ProtocolError(Cause.TICKET, f"not for {source[:64]}")
    if now * 1000 >= expires_ms:
        raise ProtocolError(Cause.TICKET, "expired")
    return int(nbytes)


def keys(secret: bytes, attempt: str) -> Keys:
    return Keys(
        to_receiver=_derive(secret, b"kv to receiver", attempt), to_sender=_derive(secret, b"kv to sender", attempt)
    )


def _name(source: str) -> bytes:
    return hashlib.sha256(source.encode()).digest()[:16]


def _mac(secret: bytes, attempt: str, incarnation: int, claims: bytes) -> bytes:
    context = _CONTEXT.pack(bytes.fromhex(attempt), incarnation)
    return hmac.digest(secret, b"kv ticket" + context + claims, "sha256")


def _derive(secret: bytes, label: bytes, attempt: str) -> bytes:
    return hmac.digest(secret, label + bytes.fromhex(attempt), "sha256")[:KEY_BYTES]
