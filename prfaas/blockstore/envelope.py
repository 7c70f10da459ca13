"""An object as one run of bytes: a fixed prelude, its key and header, their checksum, then the data.

    magic, namespace's tag, three lengths, crc32c of the data | key | header | crc32c of all so far | data

The head (all but the data) is verified without the data, so that recovery need not read that. The key and the tag of
the namespace are in it: bytes that got under another name, or were written for another model, are foreign.
"""

import hashlib
import struct
from dataclasses import dataclass

from crc32c import crc32c

from prfaas.blockstore.port import MAX_HEADER_BYTES, MAX_KEY_BYTES

_MAGIC = b"PRFAASB1"
_PRELUDE = struct.Struct("<8s16sIIQI")
_SUM = struct.Struct("<I")
#: No head is longer.
MAX_HEAD_BYTES = _PRELUDE.size + MAX_KEY_BYTES + MAX_HEADER_BYTES + _SUM.size
PRELUDE_BYTES = _PRELUDE.size


def tag_of(namespace: str) -> bytes:
    """What stands for a namespace in a head."""
    return hashlib.blake2b(namespace.encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Head:
    """What a verified head says of its object."""

    key: bytes
    header: bytes
    data_bytes: int
    data_sum: int
    head_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.head_bytes + self.data_bytes


def seal(tag: bytes, key: bytes, header: bytes, data: memoryview) -> bytes:
    """The head of an object, which its data follows."""
    assert 0 < len(key) <= MAX_KEY_BYTES and len(header) <= MAX_HEADER_BYTES
    start = _PRELUDE.pack(_MAGIC, tag, len(key), len(header), len(data), crc32c(data)) + key + header
    return start + _SUM.pack(crc32c(start))


def head_bytes(prelude: bytes) -> int | None:
    """How long the head is that begins so; None when no head begins so."""
    if len(prelude) < _PRELUDE.size:
        return None
    magic, _, key_bytes, header_bytes, _, _ = _PRELUDE.unpack_from(prelude)
    if magic != _MAGIC or not 0 < key_bytes <= MAX_KEY_BYTES or header_bytes > MAX_HEADER_BYTES:
        return None
    return int(_PRELUDE.size + key_bytes + header_bytes + _SUM.size)


def open_head(tag: bytes, raw: bytes) -> Head | None:
    """The head at the start of `raw`; None when it is damaged, cut off or of another namespace."""
    length = head_bytes(raw)
    if length is None or len(raw) < length:
        return None
    _, whose, key_bytes, _, data_bytes, data_sum = _PRELUDE.unpack_from(raw)
    end = length - _SUM.size
    if whose != tag or crc32c(raw[:end]) != _SUM.unpack_from(raw, end)[0]:
        return None
    middle = _PRELUDE.size + key_bytes
    return Head(raw[_PRELUDE.size : middle], raw[middle:end], data_bytes, data_sum, length)


def intact(head: Head, data: memoryview) -> bool:
    """Whether this is the data of that head."""
    return len(data) == head.data_bytes and crc32c(data) == head.data_sum
