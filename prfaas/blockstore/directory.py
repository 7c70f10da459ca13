"""The directory of a disk store: who uses it, and what lies where.

block-store        says that the directory is ours, and of which namespace; locked by the process that uses it
incoming/          files being written; whatever is there at the start was cut short, and goes
00/ ... ff/        objects, by a checksum of their key
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from crc32c import crc32c

FOLDERS = tuple(f"{number:02x}" for number in range(256))
INCOMING = "incoming"
_MARKER = "block-store"
_MAX_MARKER_BYTES = 4096


def take(root: Path, namespace: str) -> tuple[int, int]:
    """Lock the directory, which is made or already ours, and bring it into order: the lock, to be closed, and the bytes
    of all objects. Raises OSError, also when it is not ours, is another namespace's, or somebody uses it; then nothing
    in it has changed."""
    lock = _lock(root)
    try:
        _keep_to(lock, root, namespace)
        for folder in (*FOLDERS, INCOMING):
            (root / folder).mkdir(exist_ok=True, mode=0o700)
        fsync_folder(root)
        for leftover in (root / INCOMING).iterdir():
            leftover.unlink()
        return lock, sum(_bytes_in(root / folder) for folder in FOLDERS)
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


def _bytes_in(folder: Path) -> int:
    """As far as it can be found out: what cannot be is no reason not to use the rest."""
    nbytes = 0
    with suppress(OSError):
        for path in files_in(folder):
            with suppress(OSError):
                nbytes += path.stat().st_size
    return nbytes


def _keep_to(lock: int, root: Path, namespace: str) -> None:
    """The first that uses the directory writes its name into it, before any object."""
    said = os.pread(lock, _MAX_MARKER_BYTES, 0).decode(errors="replace")
    if not said.endswith("\n"):  # new, or cut short: then nothing has been stored
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{namespace}\n".encode(), 0)
        os.fsync(lock)
    elif said != f"{namespace}\n":
        raise OSError(
            f"{root} keeps the cache of another model (namespace {said.strip()}, this is {namespace}):"
            " give this one another folder, or empty that one"
        )


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
