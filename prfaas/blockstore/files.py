"""One object in one file: written and synced, or read and verified, whole."""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prfaas.blockstore.envelope import MAX_HEAD_BYTES, PRELUDE_BYTES, Head, head_bytes, intact, open_head
from prfaas.blockstore.hands import Bytes

#: What reading a file ends with that is not there, or that the disk has lost.
_LOST = {errno.ENOENT, errno.EISDIR, errno.EIO, errno.EBADMSG, errno.EUCLEAN}


@dataclass(frozen=True, slots=True)
class Content:
    """The bytes of an object: its head and its data."""

    head: bytes
    data: Bytes

    @property
    def nbytes(self) -> int:
        return len(self.head) + self.data.nbytes


def write_whole(path: Path, content: Content) -> None:
    """A new file, on the disk when this returns; its name is not yet."""
    with path.open("xb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(content.head))
        _write_all(file.fileno(), content.data.data)
        os.fsync(file.fileno())


def read_whole(path: Path, own: Callable[[bytes], Head | None]) -> Content | None:
    """Head and data of the object in a file that `own` recognises by its head; None if there is no such, or it is
    damaged. Raises OSError where that cannot be said."""
    try:
        with path.open("rb", buffering=0) as file:
            raw = _head_of(file.fileno())
            head = own(raw)
            if head is None or os.fstat(file.fileno()).st_size != head.total_bytes:
                return None
            data = np.empty(head.data_bytes, np.uint8)
            if not _read_all(file.fileno(), data.data, head.head_bytes) or not intact(head, data.data):
                return None
            return Content(raw, data)
    except OSError as error:
        if error.errno not in _LOST:
            raise
        return None


def read_head(path: Path, tag: bytes) -> Head | None:
    """The verified head of the object in a file of the right length. Raises OSError where that cannot be said."""
    try:
        with path.open("rb", buffering=0) as file:
            head = open_head(tag, _head_of(file.fileno()))
            return head if head is not None and os.fstat(file.fileno()).st_size == head.total_bytes else None
    except OSError as error:
        if error.errno not in _LOST:
            raise
        return None


def _head_of(fd: int) -> bytes:
    """The bytes at the start that are a head, if one begins there."""
    prelude = os.pread(fd, PRELUDE_BYTES, 0)
    length = head_bytes(prelude)
    assert length is None or length <= MAX_HEAD_BYTES
    return prelude if length is None else os.pread(fd, length, 0)


def _write_all(fd: int, left: memoryview) -> None:
    while left:
        left = left[os.write(fd, left) :]


def _read_all(fd: int, into: memoryview, offset: int) -> bool:
    """False when the file ends before."""
    while into:
        count = os.preadv(fd, [into], offset)
        if count == 0:
            return False
        into, offset = into[count:], offset + count
    return True
