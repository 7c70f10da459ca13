"""A shard at work: its machine, its pump and the tier below brought together, a task per transfer.

Whatever the machine orders is carried out here, and what becomes of it is told to the machine. Memory that a transfer
uses goes back to the machine only after the pump has let go of it (R16), and a transfer out counts only if its lease
held to the end (R17). Everything runs on one event loop; `spawn` is the owning task group's create_task.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any, assert_never

import structlog

from prfaas.cluster import Namespace
from prfaas.errors import InvalidRequest, NamespaceMismatch, Overloaded, PeerUnavailable
from prfaas.kvcache import objects
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS, KEY_BYTES
from prfaas.kvcache.placement import PROMPT_UNITS
from prfaas.kvcache.prefix import Change
from prfaas.kvcache.shard import Shard
from prfaas.node.pool_dock import Counts, Dock, Terms
from prfaas.node.pool_feed import Feed
from prfaas.node.pool_in import Incoming
from prfaas.node.pool_out import Outgoing
from prfaas.node.pool_tier import Tier
from prfaas.node.pump_client import PumpClient
from prfaas.rpc.cache import Abandon, Await, Get, Got, Lease, Leased, LeaseId, Put, Release, Renew, Wanted

TICK_S = 0.1
#: Each pins what it found; a holder that forgets them has them for their time.
MAX_LEASES = 1 << 16

log = structlog.get_logger()


class PoolShard:
    """`pump_events` is the task that delivers what the pump says, and ends with it; `got` is told how long each
    transfer out took. `tier` is set before anything is asked, where there is a tier below memory."""

    def __init__(
        self,
        terms: Terms,
        shard: Shard,
        pump: PumpClient,
        pump_events: asyncio.Task[None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        got: Callable[[float], None],
    ) -> None:
        self.terms, self.shard = terms, shard
        self._create_task = spawn
        self._tasks: set[asyncio.Task[None]] = set()
        self.feed = Feed(terms.incarnation, terms.namespace, shard.snapshot)
        self.counts = Counts()
        self.draining = False
        self.tier: Tier | None = None
        dock = Dock(
            terms=terms,
            machine=shard,
            pump=pump,
            pump_events=pump_events,
            spawn=self.spawn,
            obey=self._obey,
            counts=self.counts,
        )
        self._outgoing, self._incoming = Outgoing(dock, got), Incoming(dock)

    # -- leases

    def lease(self, asked: Lease) -> Leased:
        self._check(asked.namespace, asked.keys)
        if self.shard.leases >= MAX_LEASES:
            self.counts.lookups["refused"] += 1
            raise Overloaded("leases")
        lease = objects.LeaseId(secrets.token_hex(16))
        ttl_s = min(asked.ttl_s, self.terms.lease_ttl_s)
        limit = min(asked.limit_tokens, len(asked.keys) // KEY_BYTES * HASH_UNIT_TOKENS)
        found = self.shard.lease(lease, asked.holder, asked.tenant, asked.keys, limit, asked.joint, monotonic(), ttl_s)
        self._obey()
        self.counts.lookups["hit" if found else "miss"] += 1
        return Leased(LeaseId(lease) if found else None, found.kv_tokens, found.state_tokens, found.matched_tokens)

    def renew(self, asked: Renew) -> bool:
        ttl_s = min(asked.ttl_s, self.terms.lease_ttl_s)
        valid = not self.draining and self.shard.renew(objects.LeaseId(asked.lease), monotonic(), ttl_s)
        self._obey()
        return valid

    def release(self, asked: Release) -> bool:
        valid = self.shard.release(objects.LeaseId(asked.lease), monotonic())
        self.counts.released += valid
        self._obey()
        return valid

    # -- transfers

    async def get(self, asked: Get) -> Got:
        """Raises TransferFailed, Overloaded, DeadlineExceeded, InvalidRequest. However the caller leaves, what is being
        sent is ended in order."""
        if asked.attempt in self._incoming:
            raise InvalidRequest("is under way", param="attempt")
        return await self._outgoing.get(asked)

    async def put(self, asked: Put) -> Wanted:
        """Raises Overloaded, NamespaceMismatch, InvalidRequest."""
        self._check(asked.namespace, asked.keys)
        if asked.put in self._outgoing:
            raise InvalidRequest("is under way", param="put")
        return await self._incoming.put(asked)

    def abandon(self, asked: Abandon) -> None:
        """Nothing will come for this put: others may put the same at once. Idempotent; of a put that has come, or that
        nobody knows, nothing changes."""
        self._incoming.abandon(asked)

    async def awaited(self, asked: Await) -> bool:
        """Whether the put has been published. Raises DeadlineExceeded; of a put that nobody knows: no."""
        return await self._incoming.awaited(asked)

    # -- the machine's orders

    async def run(self) -> None:
        """Let time pass for the machine."""
        while True:
            self.shard.tick(monotonic())
            self._obey()
            await asyncio.sleep(TICK_S)

    async def recover(self) -> int:
        """Take up what the lower tier still has; before anything else. How many objects that are."""
        if self.tier is None:
            return 0
        stored = await self.tier.recovered()
        self.shard.recovered(stored)
        self._obey()
        return len(stored)

    async def drain(self, timeout_s: float) -> None:
        """Grant nothing more; what is being sent, and being written to the tier below, may finish in so much time. What
        is still coming in would be of use to nobody."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._outgoing.idle.wait()
                if self.tier is not None:
                    await self.tier.idle.wait()
        except TimeoutError:
            log.warning("drain cut off what was under way", gets=len(self._outgoing))
        self.feed.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task of this shard's. Raises PeerUnavailable when it is ending."""
        try:
            task = self._create_task(work)
        except RuntimeError:
            work.close()
            raise PeerUnavailable(self.terms.shard, "is ending") from None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cut off what is under way, in order."""
        for task in (tasks := [*self._tasks]):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def answered(self, order: objects.Load | objects.Spill, ok: bool) -> None:
        """The tier below is done with an order."""
        match order:
            case objects.Load():
                self.shard.loaded(order.op, ok)
            case objects.Spill():
                self.shard.spilled(order.op, ok)
        self._obey()

    def _obey(self) -> None:
        changes: list[Change] = []
        while commands := self.shard.take():
            for command in commands:
                if isinstance(command, Change):
                    changes.append(command)
                else:
                    self._carry_out(command)
        if changes:
            self.feed.publish(changes)

    def _carry_out(self, command: objects.Command) -> None:
        match command:
            case objects.Load() | objects.Spill() | objects.Drop():
                assert self.tier is not None, "there is no tier below"
                self.tier.submit(command)
            case objects.Serve(get=get, windows=windows):
                self._outgoing.served(get, windows)
            case objects.Miss(get=get, cause=cause):
                self._outgoing.missed(get, cause)
            case objects.Published(put=put):
                self._incoming.published(put)
            case objects.Discarded(put=put, cause=cause):
                self._incoming.discarded(put, cause)
            case objects.Alarm():
                log.error(
                    "another content under a key that is taken",
                    key=command.key.unit.hex(),
                    kind=command.key.kind.value,
                    tenant=command.tenant,
                )
            case Change():
                raise AssertionError("changes go to the feed")
            case _:
                assert_never(command)

    def _check(self, namespace: Namespace, keys: bytes) -> None:
        if self.draining:
            raise PeerUnavailable(self.terms.shard, "is draining")
        if namespace != self.terms.namespace:
            raise NamespaceMismatch(self.terms.namespace, namespace)
        if not keys or len(keys) % KEY_BYTES or len(keys) > PROMPT_UNITS * KEY_BYTES:
            raise InvalidRequest("are not those of a prompt", param="keys")
