"""What was sealed opens only as it was sealed: the same key, header, lane, and not again."""

from dataclasses import replace

import pytest

from prfaas.transfer.frames import TAG_BYTES, Cause, Header, Kind, ProtocolError, decode, encode
from prfaas.transfer.pump.seal import Opener, Sealer

KEY, SALT, OTHER = b"0123456789abcdef", 7, 8
PLAIN = b"some rows of layer 3"
HEADER = Header(kind=Kind.DATA, attempt="ab" * 16, generation=1, index=3, count=1, length=len(PLAIN))


def sealed(sealer: Sealer | None = None) -> tuple[bytes, bytes]:
    """Encoded header and ciphertext with its tag."""
    room = memoryview(bytearray(len(PLAIN) + TAG_BYTES))
    encoded = (sealer or Sealer(SALT, OTHER)).seal(KEY, HEADER, PLAIN, room)
    return encoded, bytes(room)


def opened(encoded: bytes, ciphertext: bytes, key: bytes = KEY, opener: Opener | None = None) -> bytes:
    into = memoryview(bytearray(len(ciphertext) - TAG_BYTES))
    (opener or Opener(SALT, OTHER)).open(key, decode(encoded), encoded, ciphertext, into)
    return bytes(into)


def test_what_was_sealed_opens():
    encoded, ciphertext = sealed()
    assert PLAIN not in ciphertext and decode(encoded).sealed
    assert opened(encoded, ciphertext) == PLAIN


def test_field_B3_no_flipped_bit_of_a_payload_or_tag_goes_unnoticed():
    encoded, ciphertext = sealed()
    for at in range(len(ciphertext)):
        damaged = bytearray(ciphertext)
        damaged[at] ^= 1
        with pytest.raises(ProtocolError) as caught:
            opened(encoded, bytes(damaged))
        assert caught.value.cause is Cause.CHECKSUM


@pytest.mark.parametrize("change", [{"offset": 64}, {"index": 4}, {"generation": 2}, {"attempt": "cd" * 16}])
def test_a_payload_belongs_to_its_header(change: dict[str, int]):
    """A man in the middle who repairs the header's checksum moves nothing to another place."""
    encoded, ciphertext = sealed()
    with pytest.raises(ProtocolError):
        opened(encode(replace(decode(encoded), **change)), ciphertext)


def test_another_lane_or_key_opens_nothing():
    encoded, ciphertext = sealed()
    with pytest.raises(ProtocolError):
        opened(encoded, ciphertext, opener=Opener(SALT + 1, OTHER))
    with pytest.raises(ProtocolError):
        opened(encoded, ciphertext, key=b"fedcba9876543210")


def test_a_frame_that_is_played_again_is_refused():
    sealer, opener = Sealer(SALT, OTHER), Opener(SALT, OTHER)
    first, second = sealed(sealer), sealed(sealer)
    assert first[1] != second[1], "the same bytes are never sealed the same way"
    for frame in (first, second):
        assert opened(*frame, opener=opener) == PLAIN
    for frame in (first, second):
        with pytest.raises(ProtocolError, match="counter"):
            opened(*frame, opener=opener)


def test_a_frame_that_was_taken_off_a_lane_opens_on_no_other():
    """Whoever repeats a greeting meets another salt at the other end, which is bound to every frame."""
    encoded, ciphertext = sealed()
    with pytest.raises(ProtocolError, match="not sealed by the peer"):
        opened(encoded, ciphertext, opener=Opener(SALT, OTHER + 1))
