"""The embedded store, switched off and on again for a drill: a page on the loopback address that asks for a token.

Whatever becomes of who switched it off, it comes back by itself after the time that was said.
"""

import asyncio
import hmac
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import parse_qs

import structlog

from prfaas.membership.server import EmbeddedStoreServer
from prfaas.observe.http import TEXT, serve_text

MAX_OFF_S = 3600.0
#: Its port may be in use for a moment yet.
AGAIN_S = 0.2
#: And may stay so, when another process has it: a cluster that ends does not wait for that.
SETTLE_S = 30.0

Answer = tuple[int, str, bytes]

log = structlog.get_logger()


@asynccontextmanager
async def store_switch(store: EmbeddedStoreServer, token: str) -> AsyncIterator[str]:
    """The page's address. Afterwards the store is on."""
    switch = _Switch(store, token)
    commands = {"/store/stop": switch.stop, "/store/start": switch.start}
    async with await serve_text("127.0.0.1", 0, {}, commands) as page:
        try:
            yield f"http://127.0.0.1:{page.sockets[0].getsockname()[1]}"
        finally:
            await switch.settle()


class _Switch:
    def __init__(self, store: EmbeddedStoreServer, token: str) -> None:
        self._store, self._token = store, token
        self._enough = asyncio.Event()
        self._off: asyncio.Task[None] | None = None

    def stop(self, query: str) -> Answer:
        given = parse_qs(query)
        if not self._allowed(given):
            return 403, TEXT, b"the token is wrong\n"
        try:
            seconds = float(given.get("seconds", [""])[-1])
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= MAX_OFF_S:
            return 400, TEXT, f"say seconds= above 0, and at most {MAX_OFF_S:g}\n".encode()
        if self._off is not None and not self._off.done():
            return 409, TEXT, b"it is off already\n"
        self._enough.clear()
        self._off = asyncio.create_task(self._be_off(seconds), name="store off")
        return 200, TEXT, f"off for {seconds:g} s\n".encode()

    def start(self, query: str) -> Answer:
        if not self._allowed(parse_qs(query)):
            return 403, TEXT, b"the token is wrong\n"
        self._enough.set()
        return 200, TEXT, b"on\n"

    async def settle(self) -> None:
        self._enough.set()
        if self._off is not None:
            await asyncio.wait({self._off}, timeout=SETTLE_S)
            self._off.cancel()

    def _allowed(self, given: dict[str, list[str]]) -> bool:
        return hmac.compare_digest(given.get("token", [""])[-1].encode(), self._token.encode())

    async def _be_off(self, seconds: float) -> None:
        log.warning("store is off", seconds=seconds)
        await self._store.stop()
        try:
            async with asyncio.timeout(seconds):
                await self._enough.wait()
        except TimeoutError:
            pass
        while True:
            try:
                await self._store.start()
                break
            except RuntimeError as error:
                log.warning("the store's port is not free yet", error=str(error))
                await asyncio.sleep(AGAIN_S)
        log.warning("store is on")
