"""Which router runs the slow loop: whoever holds the leader key, under a short lease of its own.

A leader counts its lease from before it asked for it, so that it gives up no later than the store does; a leader that
cannot reach the store stops leading when its lease is over. Two that believe they lead for a moment do no harm: plans
are compared by epoch.
"""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress

import structlog

from prfaas.errors import PeerUnavailable
from prfaas.membership.plans import LeaderRecord, leader_key, read
from prfaas.membership.records import encode
from prfaas.membership.store import Lease, LeaseExpired, Store

log = structlog.get_logger(__name__)

STOP_S = 2.0


class Election:
    """`run` in a task of its own. `epoch` says the highest epoch that this router knows."""

    def __init__(
        self, store: Store, cluster: str, router: str, epoch: Callable[[], int], *, lease_ttl_s: float = 10.0
    ) -> None:
        self._store, self._key, self._router, self._epoch = store, leader_key(cluster), router, epoch
        self._ttl_s = max(2, round(lease_ttl_s))
        self._lease: Lease | None = None
        self._holds_key = False
        self._until = 0.0
        #: Who led when this router last looked.
        self.leader: str | None = None

    @property
    def leads(self) -> bool:
        return self._holds_key and asyncio.get_running_loop().time() < self._until

    async def run(self) -> None:
        """Until cancellation, which gives the lead up at once."""
        try:
            while True:
                led = self.leads
                try:
                    await self._turn()
                except LeaseExpired:
                    self._lease, self._holds_key = None, False
                except PeerUnavailable as error:
                    log.debug("election_waits_for_store", detail=error.detail)
                if self.leads is not led:
                    log.info("leads" if self.leads else "leads no longer", router=self._router)
                await asyncio.sleep(self._ttl_s / 4 * random.uniform(0.8, 1.0))
        finally:
            await self._leave()

    async def _turn(self) -> None:
        asked_at = asyncio.get_running_loop().time()
        if self._lease is None:
            self._lease = await self._store.grant(self._ttl_s)
        else:
            await self._store.keep_alive(self._lease)
        await self._hold_key(self._lease)
        self._until = asked_at + self._ttl_s

    async def _hold_key(self, lease: Lease) -> None:
        """Also for a leader: a store that came back has the key no more, or another's."""
        entry = await self._store.get(self._key)
        if entry is None:
            record = LeaderRecord(router=self._router, since_epoch=self._epoch())
            won = await self._store.compare_and_put(self._key, encode(record), 0, lease)
            self._holds_key = won is not None
            self.leader = self._router if won is not None else None
        else:
            self._holds_key = entry.lease == lease
            holder = read(LeaderRecord, entry.value)
            self.leader = holder.router if holder is not None else None

    async def _leave(self) -> None:
        lease, self._lease, self._holds_key = self._lease, None, False
        if lease is not None:
            with suppress(PeerUnavailable, TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._store.revoke(lease)
