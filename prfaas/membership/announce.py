"""Keeps one router's record in the store: what arrives at it, for the leader who plans for all of them."""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress

import structlog

from prfaas.errors import PeerUnavailable
from prfaas.membership.plans import RouterRecord, routers_prefix
from prfaas.membership.records import encode
from prfaas.membership.store import Lease, LeaseExpired, Store

log = structlog.get_logger(__name__)

STOP_S = 2.0


class Announcement:
    """`run` in a task of its own. `describe` is called once per interval; a router that is gone is forgotten with its
    lease."""

    def __init__(
        self,
        store: Store,
        cluster: str,
        router: str,
        describe: Callable[[int], RouterRecord],
        *,
        interval_s: float = 5.0,
        lease_ttl_s: float = 30.0,
    ) -> None:
        self._store, self._key, self._describe = store, routers_prefix(cluster) + router, describe
        self._interval_s, self._lease_ttl_s = interval_s, lease_ttl_s
        self._lease: Lease | None = None

    async def run(self) -> None:
        """Until cancellation, which removes the record at once."""
        seq = 0
        try:
            while True:
                seq += 1
                try:
                    await self._put(self._describe(seq))
                except LeaseExpired:
                    self._lease = None
                except PeerUnavailable as error:
                    log.debug("announcement_waits_for_store", detail=error.detail)
                await asyncio.sleep(self._interval_s * random.uniform(0.9, 1.1))
        finally:
            await self._leave()

    async def _put(self, record: RouterRecord) -> None:
        if self._lease is None:
            self._lease = await self._store.grant(round(self._lease_ttl_s))
        else:
            await self._store.keep_alive(self._lease)
        await self._store.put(self._key, encode(record), self._lease)

    async def _leave(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            with suppress(PeerUnavailable, TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._store.revoke(lease)
