"""A header says exactly what was meant or is refused; nothing in it is believed before that."""

import struct

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from prfaas.transfer.frames import (
    HEADER_BYTES,
    LIMIT_BYTES,
    MAGIC,
    Cause,
    Header,
    Kind,
    ProtocolError,
    check_payload,
    decode,
    encode,
    header_for,
)

PART = Header(kind=Kind.PART, attempt="0123456789abcdef" * 2, generation=7, index=3, offset=1 << 33, length=1 << 20)

headers = st.builds(
    Header,
    kind=st.sampled_from(Kind),
    attempt=st.binary(min_size=16, max_size=16).map(bytes.hex),
    generation=st.integers(0, (1 << 32) - 1),
    index=st.integers(0, (1 << 32) - 1),
    offset=st.integers(0, (1 << 64) - 1),
    payload_crc=st.integers(0, (1 << 32) - 1),
).flatmap(
    lambda header: st.integers(0, LIMIT_BYTES[header.kind]).map(
        lambda length: Header(
            kind=header.kind,
            attempt=header.attempt,
            generation=header.generation,
            index=header.index,
            offset=header.offset,
            payload_crc=header.payload_crc,
            length=length,
        )
    )
)


@given(headers)
def test_a_header_survives_the_wire(header: Header):
    encoded = encode(header)
    assert len(encoded) == HEADER_BYTES
    assert decode(encoded) == decode(bytearray(encoded)) == decode(memoryview(encoded)) == header


@given(headers, st.integers(0, HEADER_BYTES * 8 - 1))
def test_field_B3_no_flipped_bit_of_a_header_goes_unnoticed(header: Header, bit: int):
    damaged = bytearray(encode(header))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError) as caught:
        decode(damaged)
    assert caught.value.cause in (Cause.CHECKSUM, Cause.MALFORMED)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_noise_is_refused(noise: bytes):
    with pytest.raises(ProtocolError):
        decode(noise)


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("length", [1 << 31, (1 << 32) - 1])
def test_a_length_that_no_frame_has_is_refused(kind: Kind, length: int):
    """Even when everything else about the header is right."""
    with pytest.raises(ProtocolError, match=str(length)):
        decode(forged(kind=kind, length=length))


def test_kinds_and_versions_that_we_do_not_know_are_refused():
    with pytest.raises(ProtocolError) as caught:
        decode(forged(kind=77))
    assert caught.value.cause is Cause.MALFORMED
    with pytest.raises(ProtocolError, match="ours 1-1, theirs 2") as caught:
        decode(forged(version=2))
    assert caught.value.cause is Cause.WIRE


def test_a_payload_is_the_one_its_header_was_made_for():
    payload = b"some rows of layer 3"
    header = decode(header_for(Kind.SEAL, payload, attempt=PART.attempt, generation=7))
    check_payload(header, payload)
    with pytest.raises(ProtocolError, match="SEAL"):
        check_payload(header, b"some rows of layer 4")


def test_field_B3_damage_to_a_part_names_the_part():
    with pytest.raises(ProtocolError, match="part 3"):
        check_payload(PART, b"damaged")


def forged(*, kind: int = Kind.HELLO, version: int = 1, length: int = 0) -> bytes:
    """A header of the right form with whatever it is to claim."""
    fields = struct.pack("<4sBBH16sIIQII", MAGIC, version, kind, 0, bytes(16), 0, 0, 0, length, 0)
    return fields + struct.pack("<I", crc32c(fields))
