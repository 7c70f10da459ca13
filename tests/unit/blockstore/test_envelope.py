"""An object as bytes: what is not exactly what was sealed is not accepted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.blockstore.envelope import PRELUDE_BYTES, Head, head_bytes, intact, open_head, seal, tag_of
from prfaas.blockstore.port import MAX_HEADER_BYTES

TAG = tag_of("model-a")
keys, headers, datas = st.binary(min_size=1, max_size=64), st.binary(max_size=300), st.binary(max_size=300)


@given(keys, headers, datas)
def test_a_sealed_object_is_opened(key: bytes, header: bytes, data: bytes):
    """Key, header, lengths and checksum come back; how long the head is shows in its first bytes."""
    raw = seal(TAG, key, header, memoryview(data))
    head = open_head(TAG, raw + data)
    assert head is not None
    assert (head.key, head.header, head.data_bytes, head.total_bytes) == (key, header, len(data), len(raw) + len(data))
    assert head_bytes(raw[:PRELUDE_BYTES]) == len(raw) == head.head_bytes
    assert intact(head, memoryview(data))


@given(keys, headers, datas, st.data())
def test_any_flipped_bit_shows(key: bytes, header: bytes, data: bytes, draw: st.DataObject):
    """Wherever it is: in the head the head is not opened, in the data it does not fit the head."""
    raw = seal(TAG, key, header, memoryview(data))
    both = bytearray(raw + data)
    bit = draw.draw(st.integers(0, len(both) * 8 - 1))
    both[bit // 8] ^= 1 << bit % 8
    head = open_head(TAG, bytes(both))
    assert head is None or not intact(head, memoryview(both)[len(raw) :])
    assert (head is None) == (bit // 8 < len(raw))


@given(keys, headers, datas, st.data())
def test_a_cut_off_object_shows(key: bytes, header: bytes, data: bytes, draw: st.DataObject):
    """At any length but its own."""
    raw = seal(TAG, key, header, memoryview(data)) + data
    cut = raw[: draw.draw(st.integers(0, len(raw) - 1))]
    head = open_head(TAG, cut)
    assert head is None or not intact(head, memoryview(cut)[head.head_bytes :])


@given(st.binary(max_size=400))
def test_other_bytes_are_no_object(raw: bytes):
    """Whatever it is, it is refused without an error."""
    assert open_head(TAG, raw) is None


def test_an_object_of_another_namespace_is_foreign():
    """KV of another model must not be served under the same key."""
    raw = seal(TAG, b"key", b"header", memoryview(b"data"))
    assert isinstance(open_head(tag_of("model-a"), raw), Head)
    assert open_head(tag_of("model-b"), raw) is None


def test_nothing_longer_than_the_limits_is_sealed():
    """What could not be opened again is our own mistake."""
    with pytest.raises(AssertionError):
        seal(TAG, b"", b"", memoryview(b""))
    with pytest.raises(AssertionError):
        seal(TAG, b"k" * 65, b"", memoryview(b""))
    with pytest.raises(AssertionError):
        seal(TAG, b"k", bytes(MAX_HEADER_BYTES + 1), memoryview(b""))
