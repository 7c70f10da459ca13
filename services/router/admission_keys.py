"""Keeps the API keys as their file has them, without a restart. A file that cannot be used leaves the keys as they
were: nobody is locked out, or let in, by a mistake in it."""

import asyncio
import os
from pathlib import Path

import structlog

from prfaas.errors import ConfigError
from services.router import api_keys
from services.router.api_keys import KeySet

#: How long a key that was revoked may still be good, about.
LOOK_S = 1.0

log = structlog.get_logger()

#: What changes when a file does.
_Mark = tuple[int, int, int] | None


class LiveKeys:
    """Raises ConfigError when the file cannot be used from the start."""

    def __init__(self, path: Path) -> None:
        self._path, self._mark = path, _mark(path)
        self.current = KeySet(api_keys.read(path))
        self.loaded, self.failed = 1, 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Read the file if it is not as it was read last."""
        mark = await asyncio.to_thread(_mark, self._path)
        if mark == self._mark:
            return
        self._mark = mark
        try:
            self.current = await asyncio.to_thread(lambda: KeySet(api_keys.read(self._path)))
        except ConfigError as error:
            self.failed += 1
            log.error("API keys could not be read, the old ones stay", file=str(self._path), error=error.message)
        else:
            self.loaded += 1
            log.info("API keys are read", file=str(self._path), keys=len(self.current))


def _mark(path: Path) -> _Mark:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
