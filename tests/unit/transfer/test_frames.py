"""A header says exactly what was meant or is refused; nothing in it is believed before that."""

import struct

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from prfaas.transfer.frames import (
    GREETINGS,
    HEADER_BYTES,
    MAGIC,
    OF_ATTEMPT,
    SEALED_BYTES,
    TAG_BYTES,
    WIRE,
    Cause,
    Header,
    Kind,
    ProtocolError,
    check_payload,
    decode,
    encode,
    header_for,
    longest,
)

DATA = Header(
    kind=Kind.DATA, attempt="0123456789abcdef" * 2, generation=7, index=3, count=4, offset=1 << 33, length=1 << 20
)


@st.composite
def headers(draw: st.DrawFn) -> Header:
    kind = draw(st.sampled_from(Kind))
    sealed = kind in OF_ATTEMPT and draw(st.booleans())
    return Header(
        kind=kind,
        attempt=draw(st.binary(min_size=16, max_size=16)).hex(),
        generation=draw(st.integers(0, (1 << 32) - 1)),
        index=draw(st.integers(0, (1 << 32) - 1)),
        count=draw(st.integers(0, (1 << 32) - 1)),
        offset=draw(st.integers(0, (1 << 64) - 1)),
        length=draw(st.integers(0, longest(kind, sealed=sealed))),
        counter=draw(st.integers(0, (1 << 64) - 1)),
        payload_crc=0 if sealed else draw(st.integers(0, (1 << 32) - 1)),
        sealed=sealed,
        version=1 if kind in GREETINGS else WIRE.newest,
    )


@given(headers())
def test_a_header_survives_the_wire(header: Header):
    encoded = encode(header)
    assert len(encoded) == HEADER_BYTES
    assert decode(encoded) == decode(bytearray(encoded)) == decode(memoryview(encoded)) == header


@given(headers(), st.integers(0, HEADER_BYTES * 8 - 1))
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
        decode(forged(kind=kind, length=length, version=1 if kind in GREETINGS else WIRE.newest))


def test_kinds_and_versions_that_we_do_not_know_are_refused():
    with pytest.raises(ProtocolError) as caught:
        decode(forged(kind=77, version=WIRE.newest))
    assert caught.value.cause is Cause.MALFORMED
    for kind, version in ((Kind.HELLO, 4), (Kind.DATA, 2), (Kind.DATA, 4)):
        with pytest.raises(ProtocolError, match=f"ours 3-3, theirs {version}") as caught:
            decode(forged(kind=kind, version=version))
        assert caught.value.cause is Cause.WIRE


@pytest.mark.parametrize(
    ("kind", "flags"), [(Kind.HELLO, 1), (Kind.KEEPALIVE, 1), (Kind.DATA, 2), (Kind.DATA, 1 << 15)]
)
def test_flags_that_mean_nothing_are_refused(kind: Kind, flags: int):
    """A greeting is never sealed; and what a flag says that we do not know cannot be ignored."""
    with pytest.raises(ProtocolError, match="flags"):
        decode(forged(kind=kind, flags=flags, version=1 if kind in GREETINGS else WIRE.newest))


def test_a_sealed_payload_is_longer_by_its_tag():
    assert DATA.wire_bytes == DATA.length
    assert Header(kind=Kind.DATA, length=100, sealed=True).wire_bytes == 100 + TAG_BYTES


def test_a_sealed_frame_is_no_longer_than_what_a_lane_holds_of_it():
    """Both ends of every lane keep the ciphertext of one frame: that is bounded apart."""
    assert decode(forged(kind=Kind.DATA, flags=1, length=SEALED_BYTES, version=WIRE.newest)).length == SEALED_BYTES
    with pytest.raises(ProtocolError, match=f"limit {SEALED_BYTES}"):
        decode(forged(kind=Kind.DATA, flags=1, length=SEALED_BYTES + 1, version=WIRE.newest))
    assert decode(forged(kind=Kind.DATA, length=SEALED_BYTES + 1, version=WIRE.newest)).length == SEALED_BYTES + 1


def test_a_payload_is_the_one_its_header_was_made_for():
    payload = b"some rows of layer 3"
    header = decode(header_for(Kind.SEAL, payload, attempt=DATA.attempt, generation=7))
    check_payload(header, payload)
    with pytest.raises(ProtocolError, match="SEAL"):
        check_payload(header, b"some rows of layer 4")


def test_field_B3_damage_names_the_pieces():
    with pytest.raises(ProtocolError, match=r"piece 3\+4"):
        check_payload(DATA, b"damaged")


def forged(*, kind: int = Kind.HELLO, version: int = 1, length: int = 0, flags: int = 0) -> bytes:
    """A header of the right form with whatever it is to claim."""
    fields = struct.pack("<4sBBH16sIIIQIQI", MAGIC, version, kind, flags, bytes(16), 0, 0, 0, 0, length, 0, 0)
    return fields + struct.pack("<I", crc32c(fields))
