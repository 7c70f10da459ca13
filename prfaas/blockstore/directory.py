"""The directory of a disk store: who uses it, and what lies where.

block-store        says that the directory is ours; locked by the process that uses it
incoming/          files being written; whatever is there at the start was cut short, and goes
00/ ... ff/        objects, by a checksum of their key
"""

import fcntl
import os
from pathlib import Path

from crc32c import crc32c

FOLDERS = tuple(f"{number:02x}" for number in range(256))
INCOMING = "incoming"
_MARKER = "block-store"


def take(root: Path) -> tuple[int, int]:
    """Lock the directory, which is made or already ours, and bring it into order: the lock, to be closed, and the bytes
    of all objects. Raises OSError, also when it is not ours or somebody uses it."""
    lock = _lock(root)
    try:
        for folder in (*FOLDERS, INCOMING):
            (root / folder).mkdir(exist_ok=True, mode=0o700)
        fsync_folder(root)
        for leftover in (root / INCOMING).iterdir():
            leftover.unlink()
        return lock, sum(path.stat().st_size for folder in FOLDERS for path in files_in(root / folder))
    except OSError:
        os.close(lock)
        raise


def folder_of(key: bytes) -> str:
    return FOLDERS[crc32c(key) % len(FOLDERS)]


def files_in(folder: Path) -> list[Path]:
    """Its files proper: nothing of ours is a link or a folder."""
    with os.scandir(folder) as entries:
        return [folder / entry.name for entry in entries if entry.is_file(follow_symlinks=False)]


def fsync_folder(path: Path) -> None:
    """Names that files were given in it are on the disk when this returns."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _lock(root: Path) -> int:
    root.mkdir(parents=True, exist_ok=True)
    if not (root / _MARKER).exists() and any(root.iterdir()):
        raise OSError(f"{root} holds other things than a block store")
    lock = os.open(root / _MARKER, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise OSError(f"{root} is in use by another process") from None
    return lock
