"""What a worker asks of the cache pool's shards, in its own region and for pulls in others.

Everything here is best effort and has a deadline: whatever goes wrong is counted by its cause and means that there is
no cache, never that a request fails. A shard that failed is left alone for a while. Lengths are tokens from the start
of the prompt throughout; shards are told theirs from the start of the segment.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
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
from prfaas.kvcache.segments import SEGMENT_TOKENS, segments, shard_of
from prfaas.membership.follow_pools import PoolsFollower
from prfaas.membership.store import Store
from prfaas.node.pool_calls import ShardCalls
from prfaas.node.pool_transfers import extent_at
from prfaas.node.tenure import Place
from prfaas.request import AttemptId, Permit
from prfaas.rpc import cache, cache_translate
from prfaas.rpc.cache import LeaseId
from prfaas.rpc.commands import NO_REGION, Destination
from prfaas.rpc.identity import Identity

#: Segments of one prompt that are asked for at a time, after the first.
AT_A_TIME = 16
#: Of the time of a look-up, what one call of it may take.
LOOKUP_SHARE = 0.8
#: A lease is renewed so many times in its life.
RENEWALS = 3

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Leased:
    """What one shard has pinned of a prompt: the KV `position:kv_tokens` of a segment, and with `state_tokens` the
    state there."""

    shard: NodeId
    region: RegionId
    lease: LeaseId
    position: int
    kv_tokens: int
    state_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Hit:
    """A cached prefix, pinned until it is released: KV up to `kv_tokens` without a hole; of a joint match also the
    state at `state_tokens`, which is then the same. A hit of nothing needs no release."""

    kv_tokens: int = 0
    state_tokens: int = 0
    region: RegionId = NO_REGION
    leased: tuple[Leased, ...] = ()

    def fetches(self, first: int, stop: int, state: bool) -> "tuple[Fetch, ...]":
        """What has to be brought, a transfer per segment, for the KV `first:stop` and the state at the stop. Both are
        multiples of 64, and a state is where the hit has one."""
        return tuple(
            Fetch(each, Extent(begin, end, (stop,) if state and end == stop else ()))
            for each in self.leased
            for begin, end in [(max(first, each.position), min(stop, each.kv_tokens))]
            if begin < end or (state and begin == end == stop)
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
    unit (`prfaas.kvcache.segments.unit_ends`), as the attempt `put`."""

    put: AttemptId
    shard: NodeId
    region: RegionId
    extent: Extent
    kv_address: str
    incarnation: Incarnation
    generation: int
    permit: Permit


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
        """Look up and pin. `region` None: our own. Without any luck, Hit()."""
        keys = keys[: max(0, limit_tokens) // HASH_UNIT_TOKENS * KEY_BYTES]
        lookup = _Lookup(self, region or self._place.region, tenant, holder)
        kept: Sequence[Leased] = ()
        try:
            async with asyncio.timeout(self._settings.lookup_timeout_s):
                kept = await (lookup.joint(keys) if joint else lookup.kv(keys))
        except (PrfaasError, TimeoutError) as error:
            self._failed("look-up", error)
        finally:
            used = {each.lease for each in kept}
            self._let_go([each for each in lookup.pinned if each.lease not in used])
        if not kept:
            return Hit()
        return Hit(kept[-1].kv_tokens, kept[-1].state_tokens, lookup.region, tuple(kept))

    async def fetch(
        self, fetch: Fetch, attempt: AttemptId, destination: Destination, deadline_s: float, urgency: int = 2
    ) -> bool:
        """Have a shard send what `fetch` says to a reservation of ours, which it takes for `attempt`. True once all of
        it has arrived and been checked, and the lease has held (R17). A false one leaves the reservation to its
        owner."""
        leased, extent = fetch.leased, fetch.extent
        get = cache.Get(
            lease=leased.lease,
            first_tokens=extent.first - leased.position,
            stop_tokens=extent.stop - leased.position,
            state=bool(extent.states),
            attempt=attempt,
            destination=destination,
            position_tokens=leased.position,
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
        """Let go of what was pinned, all of it, whatever happens. Whether all leases held to this moment."""
        return all(await asyncio.gather(*(self._release(each) for each in hit.leased)))

    async def offer(
        self,
        put: AttemptId,
        keys: bytes,
        position: int,
        stop: int,
        states: tuple[int, ...] = (),
        *,
        tenant: str,
        unproven: tuple[int, ...] = (),
        unit_checksums: tuple[int, ...] = (),
        state_checksums: tuple[int, ...] = (),
        ttl_s: float,
    ) -> Offer | None:
        """Offer the KV `position:stop` of one segment, and the states at these boundaries of it. None: the pool has all
        of it, or no room, or no shard is there. `keys` are those of the prompt."""
        segment = keys[position // HASH_UNIT_TOKENS * KEY_BYTES : stop // HASH_UNIT_TOKENS * KEY_BYTES]
        pool = self.choose(self._place.region, segment)
        if pool is None:
            return None
        command = cache.Put(
            put=put,
            namespace=self._namespace,
            tenant=tenant,
            keys=segment,
            stop_tokens=stop - position,
            states=tuple(state - position for state in states),
            position_tokens=position,
            source_node=self._place.node,
            source_region=self._place.region,
            ttl_s=ttl_s,
            unproven=tuple(state - position for state in unproven),
            unit_checksums=unit_checksums,
            state_checksums=state_checksums,
        )
        deadline_s = self._settings.lookup_timeout_s
        try:
            answer = await self._calls.call(pool, "Put", cache_translate.pack_put(command), deadline_s)
            wanted = cache_translate.unpack_wanted(answer)
        except PrfaasError as error:
            self._failed("put", error)
            return None
        if wanted.room is None:
            return None
        return Offer(
            put=put,
            shard=pool.id,
            region=pool.region,
            extent=extent_at(position, wanted.first_tokens, wanted.stop_tokens, wanted.states),
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

    # -- what a look-up needs

    def choose(self, region: RegionId, segment: bytes) -> Pool | None:
        """The shard that keeps this segment, unless there is none or it is left alone."""
        shards = self.shards(region)
        if not shards or not segment:
            return None
        return self._calls.reachable(shards).get(shard_of(segment, tuple(shards)))

    async def pin(self, pool: Pool, position: int, lease: cache.Lease) -> Leased | None:
        """One segment at one shard. Raises PrfaasError."""
        # A look-up is over a little after a call that is never answered: it must be known which shard that was.
        deadline_s = LOOKUP_SHARE * self._settings.lookup_timeout_s
        answer = await self._calls.call(pool, "Lease", cache_translate.pack_lease(lease), deadline_s)
        found = cache_translate.unpack_leased(answer)
        if found.lease is None:
            return None
        leased = Leased(
            shard=pool.id,
            region=pool.region,
            lease=found.lease,
            position=position,
            kv_tokens=position + found.kv_tokens,
            state_tokens=position + found.state_tokens if found.state_tokens else 0,
        )
        self._held[leased.lease] = leased
        return leased

    def asked(self, keys: bytes, limit_tokens: int, tenant: str, holder: AttemptId, joint: bool) -> cache.Lease:
        return cache.Lease(
            namespace=self._namespace,
            keys=keys,
            tenant=tenant,
            limit_tokens=limit_tokens,
            joint=joint,
            holder=f"{self._place.node}/{holder}",
            ttl_s=self._settings.lease_ttl_s,
        )

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

    def _let_go(self, pinned: Sequence[Leased]) -> None:
        """Without waiting."""
        if pinned:
            self._aside(self._release_all(pinned))

    async def _release_all(self, pinned: Sequence[Leased]) -> None:
        await asyncio.gather(*(self._release(each) for each in pinned))

    def _aside(self, work: Coroutine[Any, Any, None]) -> None:
        self._asides.add(task := asyncio.create_task(work, name="cache leases"))
        task.add_done_callback(self._asides.discard)

    def _pool(self, leased: Leased) -> Pool:
        pool = self.shards(leased.region).get(leased.shard)
        if pool is None:
            raise PeerUnavailable(leased.shard, "is not there any more")
        return pool

    def _failed(self, stage: str, error: PrfaasError | TimeoutError) -> None:
        self.failures[_cause(error)] += 1
        log.debug("no cache", stage=stage, error=str(error) or "too late")


class _Lookup:
    """One look-up. `pinned` is all that it has leased so far, of which it returns what it is for."""

    def __init__(self, client: PoolClient, region: RegionId, tenant: str, holder: AttemptId) -> None:
        self._client, self._tenant, self._holder = client, tenant, holder
        self.region = region
        self.pinned: list[Leased] = []

    async def kv(self, keys: bytes) -> list[Leased]:
        """KV without a hole from the start on, as far as it goes. The first segment decides whether others are asked
        for at all."""
        parts, chain = list(segments(keys)), list[Leased]()
        at = 0
        while at < len(parts):
            some = parts[at : at + (AT_A_TIME if at else 1)]
            for position, leased in await self._pin(some, joint=False):
                if leased is None:
                    return chain
                chain.append(leased)
                if leased.kv_tokens < position + SEGMENT_TOKENS:
                    return chain
            at += len(some)
        return chain

    async def joint(self, keys: bytes) -> list[Leased]:
        """The same, up to the last state within it."""
        parts = list(segments(keys))
        chain = await self.kv(keys) if len(parts) > 1 else []
        while parts:
            index = max(0, len(chain) - 1)
            [(_, last)] = await self._pin(parts[index : index + 1], joint=True)
            if last is not None and last.state_tokens:
                return [*chain[:index], replace(last, kv_tokens=last.state_tokens)]
            if index == 0:
                return []
            # A state at the end of the segment before is that one's.
            chain.pop()
        return []

    async def _pin(self, parts: Sequence[tuple[int, bytes]], *, joint: bool) -> list[tuple[int, Leased | None]]:
        found = await asyncio.gather(*(self._pin_one(position, keys, joint) for position, keys in parts))
        return [(position, leased) for (position, _), leased in zip(parts, found, strict=True)]

    async def _pin_one(self, position: int, keys: bytes, joint: bool) -> Leased | None:
        pool = self._client.choose(self.region, keys)
        if pool is None:
            return None
        limit = len(keys) // KEY_BYTES * HASH_UNIT_TOKENS
        leased = await self._client.pin(
            pool, position, self._client.asked(keys, limit, self._tenant, self._holder, joint)
        )
        if leased is not None:
            self.pinned.append(leased)
        return leased


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
