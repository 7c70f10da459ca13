"""Who may talk to whom, and what the other side is told when it may not."""

import msgspec
import pytest

from prfaas.cluster import WireRange
from prfaas.transfer.frames import SMALL_BYTES, Cause, ProtocolError
from prfaas.transfer.greeting import Hello, Welcome, compare, pack, refusal, refused, unpack

HELLO = Hello(node="p0", namespace="kimi", oldest_wire=1, newest_wire=2, incarnation=9)


def refusal_of(hello: Hello) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        compare(hello, "kimi", 9, WireRange(2, 3))
    return caught.value


@pytest.mark.parametrize("incarnation", [9, None])
def test_a_fitting_peer_is_welcome(incarnation: int | None):
    """Also one that only asks who is there."""
    compare(msgspec.structs.replace(HELLO, incarnation=incarnation), "kimi", 9, WireRange(2, 3))


def test_another_namespace_is_refused_with_both_values():
    """R12."""
    error = refusal_of(msgspec.structs.replace(HELLO, namespace="qwen"))
    assert error.cause is Cause.NAMESPACE and "kimi" in error.detail and "qwen" in error.detail


def test_field_C3_another_incarnation_is_refused_with_both_values():
    error = refusal_of(msgspec.structs.replace(HELLO, incarnation=0xABC))
    assert error.cause is Cause.INCARNATION and "0x9" in error.detail and "0xabc" in error.detail


def test_wire_ranges_that_do_not_meet_are_refused_with_both_values():
    error = refusal_of(msgspec.structs.replace(HELLO, newest_wire=1))
    assert error.cause is Cause.WIRE and "2-3" in error.detail and "1-1" in error.detail


def test_the_wire_version_is_compared_first():
    """Of a peer whose version we cannot speak nothing else can be trusted to mean what we think."""
    assert refusal_of(Hello(node="", namespace="x", oldest_wire=8, newest_wire=9, incarnation=1)).cause is Cause.WIRE


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x81\xa4node\x01", msgspec.msgpack.encode([1, 2]), b"\x90" * 99])
def test_a_greeting_that_is_none_is_refused(payload: bytes):
    with pytest.raises(ProtocolError) as caught:
        unpack(payload, Hello)
    assert caught.value.cause is Cause.MALFORMED


def test_fields_of_a_newer_peer_are_skipped():
    """Fields are only added, so a greeting can be read across versions."""
    newer = msgspec.msgpack.encode({"node": "d0", "incarnation": 5, "lanes": 8})
    assert unpack(newer, Welcome) == Welcome(node="d0", incarnation=5)
    assert unpack(pack(HELLO), Hello) == HELLO


def test_a_refusal_keeps_its_cause_and_stays_small():
    """However much there is to say about it."""
    payload = refusal(Cause.MISSING_PART, "x" * 100_000)
    assert len(payload) <= SMALL_BYTES
    assert refused(payload).cause is Cause.MISSING_PART


def test_a_cause_that_only_a_newer_peer_knows_is_still_a_refusal():
    error = refused(msgspec.msgpack.encode({"cause": "solar_flare", "detail": "outage"}))
    assert error.cause is Cause.ABORTED and "solar_flare" in error.detail
