"""Authenticated encryption of an attempt's frames: AES-128-GCM, bound to the frame's header.

A nonce is a salt, which no other lane of the process that seals has, and a counter that the lane never turns back;
each direction has a key of its own, with which one process seals. So no nonce meets a key twice, whatever the peer or
somebody on the way says. On one lane counters rise: a frame that is played again is refused. The salt of the end that
opens is bound too, and is another on every lane: a frame that was taken off one lane opens on no other, so whoever
sends one that opens has the key.
"""

import struct
from dataclasses import replace
from functools import lru_cache

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from prfaas.transfer.frames import AAD_BYTES, TAG_BYTES, Bytes, Cause, Header, ProtocolError, encode

_NONCE = struct.Struct("<IQ")
_SALT = struct.Struct("<I")
#: An attempt's frames come through few lanes at a time; making a cipher anew costs microseconds.
_CIPHERS = 1024


@lru_cache(_CIPHERS)
def _cipher(key: bytes) -> AESGCM:
    return AESGCM(key)


class Sealer:
    """Seals what one end of one lane sends. `salt` is its own, `peer_salt` the other end's."""

    def __init__(self, salt: int, peer_salt: int) -> None:
        self._salt, self._bound, self._counter = salt, _SALT.pack(peer_salt), 0

    def seal(self, key: bytes, header: Header, plain: Bytes, into: memoryview) -> bytes:
        """The ciphertext of `plain` and its tag into `into`; the encoded header that goes before it."""
        assert len(into) == len(plain) + TAG_BYTES
        self._counter += 1
        encoded = encode(replace(header, sealed=True, counter=self._counter))
        nonce = _NONCE.pack(self._salt, self._counter)
        _cipher(key).encrypt_into(nonce, plain, encoded[:AAD_BYTES] + self._bound, into)
        return encoded


class Opener:
    """Opens what comes to one end of one lane: `salt` is that of the other end, which sealed it."""

    def __init__(self, salt: int, own_salt: int) -> None:
        self._salt, self._bound, self._counter = salt, _SALT.pack(own_salt), 0

    def open(self, key: bytes, header: Header, encoded: Bytes, sealed: Bytes, into: memoryview) -> None:
        """The plain payload into `into`. Raises ProtocolError when it is not what the peer sealed; `into` then holds
        anything."""
        if header.counter <= self._counter:
            raise ProtocolError(Cause.CHECKSUM, f"counter {header.counter} after {self._counter}")
        self._counter = header.counter
        nonce = _NONCE.pack(self._salt, header.counter)
        try:
            _cipher(key).decrypt_into(nonce, sealed, bytes(encoded[:AAD_BYTES]) + self._bound, into)
        except InvalidTag:
            raise ProtocolError(Cause.CHECKSUM, f"{header.kind.name} was not sealed by the peer") from None
