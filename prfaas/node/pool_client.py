"""What a worker asks of the cache pool's shards, in its own region and for pulls in others.

Everything here is best effort and has a deadline: whatever goes wrong is counted by its cause and means that there is
no cache, never that a request fails. A shard that failed is left alone for a while. Lengths are tokens from the start
of the prompt.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import structlog

from prfaas.cluster import Incarnation, Namespace, NodeId, Pool, RegionId
from prfaas.config import CacheConfig
from prfaas.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NamespaceMismatch,
    Overloaded,
    PeerUnavailable,
    PrfaasError,
    TransferFailed,
)
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS, KEY_BYTES
from prfaas.kvcache.layout import Extent
from prfaas.kvcache.placement import PROMPT_UNITS, shard_of, transfers
from prfaas.membership.follow_pools import PoolsFollower
from prfaas.membership.store import Store
from prfaas.node.pool_calls import ShardCalls
from prfaas.node.tenure import Place
from prfaas.request import AttemptId, Permit
from prfaas.rpc import cache, cache_translate
from prfaas.rpc.cache import LeaseId
from prfaas.rpc.commands import NO_REGION, Destination
from prfaas.rpc.identity import Identity

#: Leases that are renewed at a time.
AT_A_TIME = 16
#: Of the time of a look-up, what one call of it may take.
LOOKUP_SHARE = 0.8
#: A lease is renewed so many times in its life.
RENEWALS = 3

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Leased:
    """What a shard has pinned of a prompt."""

    shard: NodeId
    region: RegionId
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class Hit:
    """A cached prefix, pinned until it is released: KV up to `kv_tokens` without a hole; of a joint match also the
    state at `state_tokens`, which is then the same. A hit of nothing needs no release. `matched_tokens`: how far KV
    reaches, pinned or not. `failed`: nothing was found, for want of an answer."""

    kv_tokens: int = 0
    state_tokens: int = 0
    region: RegionId = NO_REGION
    leased: Leased | None = None
    matched_tokens: int = 0
    failed: bool = False

    def fetches(self, first: int, stop: int, state: bool) -> "tuple[Fetch, ...]":
        """What has to be brought, transfer by transfer, for the KV `first:stop` and the state at the stop. Both are
        multiples of 64, and a state is where the hit has one."""
        if self.leased is None:
            return ()
        parts = [(stop, stop)] if state and first == stop else transfers(first, stop)
        return tuple(
            Fetch(self.leased, Extent(begin, end, (stop,) if state and end == stop else ())) for begin, end in parts
        )


@dataclass(frozen=True, slots=True)
class Fetch:
    """One transfer from a shard. Its receiver reserves `extent` for `source`."""

    leased: Leased
    extent: Extent

    @property
    def source(self) -> NodeId:
        return self.leased.shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a shard lacks of what was offered, and has made room for: send `extent` there, in chunks that end at each
    unit (`prfaas.kvcache.placement.unit_ends`), as the attempt `put`."""

    put: AttemptId
    shard: NodeId
    region: RegionId
    extent: Extent
    kv_address: str
    incarnation: Incarnation
    generation: int
    permit: Permit


class NoOffer(Enum):
    """Why there is nothing to send. KNOWN: the pool lacks nothing of it, or is being sent it. REFUSED: it has no room.
    FAILED: there is no shard that answers."""

    KNOWN = "known"
    REFUSED = "refused"
    FAILED = "failed"


class PoolClient:
    """One per worker, and on its event loop. `run` in a task of its own: it follows the shards there are and renews
    what is held; before that there is no cache."""

    def __init__(self, place: Place, namespace: Namespace, settings: CacheConfig, identity: Identity | None) -> None:
        self._place, self._namespace, self._settings = place, namespace, settings
        self._calls = ShardCalls(identity, asyncio.get_running_loop().time)
        self._follower: PoolsFollower | None = None
        self._held: dict[LeaseId, Leased] = {}
        self._asides: set[asyncio.Task[None]] = set()
        #: What went wrong, by cause.
        self.failures: Counter[str] = Counter()

    async def run(self, store: Store, cluster: str) -> None:
        """Until it is cancelled; then what is held is left to its time."""
        self._follower = PoolsFollower(store, cluster)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follower.run(), name="pools")
                group.create_task(self._renew_for_ever(), name="leases")
        finally:
            self._follower = None
            for task in self._asides:
                task.cancel()
            await self._calls.close()

    def shards(self, region: RegionId | None = None) -> Mapping[NodeId, Pool]:
        """That are there now and hold KV of our namespace; None: those of our region."""
        return self._follower.shards(region or self._place.region, self._namespace) if self._follower else {}

    async def match(
        self,
        keys: bytes,
        limit_tokens: int,
        *,
        joint: bool,
        tenant: str,
        holder: AttemptId,
        region: RegionId | None = None,
    ) -> Hit:
        """Look up and pin. `region` None: our own."""
        keys, region = _cacheable(keys, limit_tokens), region or self._place.region
        pool = self._choose(region, keys)
        if pool is None:
            return Hit(failed=bool(keys and self.shards(region)))
        lease = cache.Lease(
            namespace=self._namespace,
            keys=keys,
            tenant=tenant,
            limit_tokens=len(keys) // KEY_BYTES * HASH_UNIT_TOKENS,
            joint=joint,
            holder=f"{self._place.node}/{holder}",
            ttl_s=self._settings.lease_ttl_s,
        )
        # A look-up is over a little after a call that is never answered: it must be known which shard that was.
        deadline_s = LOOKUP_SHARE * self._settings.lookup_timeout_s
        try:
            async with asyncio.timeout(self._settings.lookup_timeout_s):
                answer = await self._calls.call(pool, "Lease", cache_translate.pack_lease(lease), deadline_s)
            found = cache_translate.unpack_leased(answer)
        except (PrfaasError, TimeoutError) as error:
            self._failed("look-up", error)
            return Hit(failed=True)
        if found.lease is None:
            return Hit(matched_tokens=found.matched_tokens)
        leased = self._held[found.lease] = Leased(pool.id, pool.region, found.lease)
        return Hit(found.kv_tokens, found.state_tokens, region, leased, found.matched_tokens)

    async def fetch(
        self, fetch: Fetch, attempt: AttemptId, destination: Destination, deadline_s: float, urgency: int = 2
    ) -> bool:
        """Have a shard send what `fetch` says to a reservation of ours, which it takes for `attempt`. True once all of
        it has arrived and been checked, and the lease has held (R17). A false one leaves the reservation to its
        owner."""
        leased, extent = fetch.leased, fetch.extent
        get = cache.Get(
            lease=leased.lease,
            first_tokens=extent.first,
            stop_tokens=extent.stop,
            state=bool(extent.states),
            attempt=attempt,
            destination=destination,
            deadline_s=deadline_s,
            urgency=urgency,
        )
        try:
            pool = self._pool(leased)
            request = cache_translate.pack_get(get)
            await self._calls.call(pool, "Get", request, deadline_s, at_once=False, attempt=attempt)
        except PrfaasError as error:
            self._failed("get", error)
            return False
        return True

    async def release(self, hit: Hit) -> bool:
        """Let go of what was pinned, whatever happens. Whether the lease held to this moment."""
        return hit.leased is None or await self._release(hit.leased)

    async def offer(
        self,
        put: AttemptId,
        keys: bytes,
        stop: int,
        states: tuple[int, ...] = (),
        *,
        tenant: str,
        unproven: tuple[int, ...] = (),
        unit_checksums: tuple[int, ...] = (),
        state_checksums: tuple[int, ...] = (),
        ttl_s: float,
    ) -> Offer | NoOffer:
        """Offer the KV up to `stop` and the states at these boundaries of it; what a shard then wants is the first that
        it lacks, and no more than a transfer moves. `keys` are those of the prompt. What is then not sent is to be
        abandoned."""
        keys = keys[: stop // HASH_UNIT_TOKENS * KEY_BYTES]
        if len(keys) > PROMPT_UNITS * KEY_BYTES:
            return NoOffer.REFUSED
        pool = self._choose(self._place.region, keys)
        if pool is None:
            return NoOffer.FAILED
        command = cache.Put(
            put=put,
            namespace=self._namespace,
            tenant=tenant,
            keys=keys,
            stop_tokens=stop,
            states=states,
            source_node=self._place.node,
            source_region=self._place.region,
            ttl_s=ttl_s,
            unproven=unproven,
            unit_checksums=unit_checksums,
            state_checksums=state_checksums,
        )
        deadline_s = self._settings.lookup_timeout_s
        try:
            answer = await self._calls.call(pool, "Put", cache_translate.pack_put(command), deadline_s)
            wanted = cache_translate.unpack_wanted(answer)
        except Overloaded as error:
            self._failed("put", error)
            return NoOffer.REFUSED
        except PrfaasError as error:
            self._failed("put", error)
            self._abandon_at(pool, put)
            return NoOffer.FAILED
        except asyncio.CancelledError:
            self._abandon_at(pool, put)
            raise
        if wanted.room is None:
            return NoOffer.KNOWN
        return Offer(
            put=put,
            shard=pool.id,
            region=pool.region,
            extent=Extent(wanted.first_tokens, wanted.stop_tokens, wanted.states),
            kv_address=wanted.room.kv_address,
            incarnation=wanted.room.incarnation,
            generation=wanted.room.generation,
            permit=wanted.room.permit,
        )

    async def published(self, offer: Offer, deadline_s: float) -> bool:
        """Whether what was sent for an offer is in the cache now."""
        request = cache_translate.pack_await(cache.Await(offer.put, deadline_s))
        try:
            pool = self.shards(offer.region).get(offer.shard)
            if pool is None:
                raise PeerUnavailable(offer.shard, "is not there any more")
            answer = await self._calls.call(pool, "Await", request, deadline_s, at_once=False, attempt=offer.put)
        except PrfaasError as error:
            self._failed("put", error)
            return False
        return bool(answer.published)

    def abandon(self, offer: Offer) -> None:
        """Nothing will be sent for it any more: others may put the same before its time is over. Without waiting, and
        whatever has become of it."""
        pool = self.shards(offer.region).get(offer.shard)
        if pool is not None:
            self._abandon_at(pool, offer.put)

    def _choose(self, region: RegionId, keys: bytes) -> Pool | None:
        """The shard that keeps this prompt, unless there is none or it is left alone."""
        shards = self.shards(region)
        if not shards or not keys:
            return None
        return self._calls.reachable(shards).get(shard_of(keys, tuple(shards)))

    # -- leases

    async def _renew_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.lease_ttl_s / RENEWALS)
            for start in range(0, len(held := list(self._held.values())), AT_A_TIME):
                await asyncio.gather(*(self._renew(each) for each in held[start : start + AT_A_TIME]))

    async def _renew(self, leased: Leased) -> None:
        """One that has ended is not renewed again; whoever reads under it will be told."""
        request = cache_translate.pack_renew(cache.Renew(leased.lease, self._settings.lease_ttl_s))
        try:
            answer = await self._calls.call(self._pool(leased), "Renew", request, self._settings.lookup_timeout_s)
        except PrfaasError as error:
            self._failed("renew", error)
            return
        if not answer.valid and self._held.pop(leased.lease, None) is not None:
            self.failures["expired"] += 1

    async def _release(self, leased: Leased) -> bool:
        self._held.pop(leased.lease, None)
        request = cache_translate.pack_release(cache.Release(leased.lease))
        try:
            answer = await self._calls.call(self._pool(leased), "Release", request, self._settings.lookup_timeout_s)
        except PrfaasError as error:
            self._failed("release", error)
            return False
        return bool(answer.valid)

    def _abandon_at(self, pool: Pool, put: AttemptId) -> None:
        self._aside(self._abandon(pool, put))

    async def _abandon(self, pool: Pool, put: AttemptId) -> None:
        request = cache_translate.pack_abandon(cache.Abandon(put))
        try:
            await self._calls.call(pool, "Abandon", request, self._settings.lookup_timeout_s)
        except PrfaasError as error:
            self._failed("abandon", error)

    def _aside(self, work: Coroutine[Any, Any, None]) -> None:
        self._asides.add(task := asyncio.create_task(work, name="beside the cache"))
        task.add_done_callback(self._asides.discard)

    def _pool(self, leased: Leased) -> Pool:
        pool = self.shards(leased.region).get(leased.shard)
        if pool is None:
            raise PeerUnavailable(leased.shard, "is not there any more")
        return pool

    def _failed(self, stage: str, error: PrfaasError | TimeoutError) -> None:
        self.failures[_cause(error)] += 1
        log.debug("no cache", stage=stage, error=str(error) or "too late")


def _cacheable(keys: bytes, limit_tokens: int) -> bytes:
    """The keys of what can be found within so many tokens."""
    return keys[: min(max(0, limit_tokens) // HASH_UNIT_TOKENS, PROMPT_UNITS) * KEY_BYTES]


def _cause(error: PrfaasError | TimeoutError) -> str:
    match error:
        case TransferFailed():
            return error.cause
        case Overloaded():
            return "refused"
        case TimeoutError() | DeadlineExceeded():
            return "deadline"
        case PeerUnavailable():
            return "unavailable"
        case NamespaceMismatch():
            return "namespace"
        case InvalidRequest():
            return "invalid"
        case _:
            return "other"
