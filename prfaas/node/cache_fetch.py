"""How a worker looks up prompts in the cache pool and brings what it finds into spans of its own.

None of it can fail an attempt by itself: what is not found, refused or too slow is as if the cache did not have it.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from prfaas.cluster import RegionId, address_for
from prfaas.config import CacheConfig
from prfaas.errors import Overloaded, PeerUnavailable, PrfaasError
from prfaas.kvcache.hashing import unit_keys
from prfaas.kvcache.layout import Window
from prfaas.node.cache_books import CacheBooks
from prfaas.node.cache_plan import whole_units
from prfaas.node.pool_client import Fetch, Hit, PoolClient
from prfaas.node.tenure import Borrowed, Tenant, Tenure
from prfaas.node.workplace import Workplace
from prfaas.request import TOKEN_BYTES, AttemptId, Match, Permit
from prfaas.rpc.commands import Destination

#: Keys of longer prompts are computed beside the event loop: these take about half a millisecond.
LONG_PROMPT_BYTES = 32_768 * TOKEN_BYTES

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Found:
    """`match` is what the own region's pool has of the prompt; `hit`, which is pinned, what to go on from."""

    hit: Hit
    match: Match


NOTHING = Found(Hit(), Match())


@dataclass(frozen=True, slots=True)
class _Incoming:
    fetch: Fetch
    span: AttemptId
    window: Window
    destination: Destination


class PrefixSource:
    """The pools as this worker reads them."""

    def __init__(self, workplace: Workplace, pool: PoolClient, settings: CacheConfig, books: CacheBooks) -> None:
        self._workplace, self._pool, self._settings, self._books = workplace, pool, settings, books
        #: A model without states can go on wherever its KV ends.
        self._stateful = workplace.info.layout.state_bytes > 0

    async def for_prefill(self, tenure: Tenure, tenant: Tenant, pull_region: RegionId | None) -> Found:
        """Where the prefill of a prompt can resume, and where the prompt leaves those that the cache knows (R6). With
        `pull_region` whichever pool reaches farther counts, that one or our own."""
        limit = tenure.handoff_tokens
        if not whole_units(limit):
            return NOTHING
        keys = await keys_of(tenure.prompt, self._workplace.info.namespace, tenant.salt)
        looked = partial(self._match, keys, limit, tenure, tenant, joint=self._stateful)
        own, far = await self._all(looked(), looked(region=pull_region) if pull_region else _nothing())
        match = Match(joint=own.kv_tokens, kv=max(own.kv_tokens, own.matched_tokens))
        if own.failed:
            self._books.not_looked_up()
        else:
            self._books.looked_up(limit, match)
        used, unused = (far, own) if far.kv_tokens > own.kv_tokens else (own, far)
        self.release(unused)
        if pull_region:
            self._books.pulls["failed" if far.failed else "longer" if used is far else "no_longer"] += 1
        return Found(used, match)

    async def for_decode(self, tenure: Tenure, tenant: Tenant, limit_tokens: int) -> Hit:
        """How much of a prompt's KV need not be sent here: its states come with the rest (M2)."""
        keys = await keys_of(tenure.prompt, self._workplace.info.namespace, tenant.salt)
        return await self._match(keys, limit_tokens, tenure, tenant, joint=False)

    async def borrow(self, tenure: Tenure, hit: Hit, *, resume: bool) -> Borrowed | None:
        """Begin to bring what was found; to `resume` from it, the states at its end as well. None: there is nothing, or
        no room for it here. Lets go of the hit at the end."""
        if not hit.kv_tokens:
            return None
        incoming: list[_Incoming] = []
        for_s = self._settings.get_timeout_s + self._settings.get_timeout_s_per_token * hit.kv_tokens
        try:
            for fetch in hit.fetches(0, hit.kv_tokens, resume and self._stateful):
                incoming.append(await self._room(tenure, fetch, for_s))
            arrival = self._workplace.spawn(self._arrival(hit, incoming, for_s, resume=resume))
        except Overloaded:
            self._books.gets["failed"] += 1
            self._workplace.let_go(tenure, *(each.span for each in incoming))
            self.release(hit)
            return None
        except BaseException:
            self.release(hit)
            raise
        # Not within it: it may be cancelled before its first step.
        arrival.add_done_callback(lambda _: self.release(hit))
        tenure.aside.add(arrival)
        return Borrowed(
            tokens=hit.kv_tokens,
            windows=tuple(each.window for each in incoming),
            spans=tuple(each.span for each in incoming),
            arrival=arrival,
            pulled_bytes=self._nbytes(incoming) if hit.region != self._workplace.place.region else 0,
        )

    def release(self, hit: Hit) -> None:
        """Without waiting. A lease that nobody releases ends by itself."""
        if hit.leased:
            with contextlib.suppress(PeerUnavailable):
                self._workplace.spawn(self._pool.release(hit))

    async def _all(self, *matches: Coroutine[Any, Any, Hit]) -> list[Hit]:
        """All of them. Where that is cut off, nothing stays pinned."""
        tasks = [asyncio.ensure_future(match) for match in matches]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.add_done_callback(self._undo)
                task.cancel()
            raise

    def _undo(self, match: asyncio.Task[Hit]) -> None:
        if not match.cancelled() and match.exception() is None:
            self.release(match.result())

    async def _match(
        self,
        keys: bytes,
        limit_tokens: int,
        tenure: Tenure,
        tenant: Tenant,
        *,
        joint: bool,
        region: RegionId | None = None,
    ) -> Hit:
        return await self._pool.match(
            keys, limit_tokens, joint=joint, tenant=tenant.name, holder=tenure.attempt, region=region
        )

    async def _room(self, tenure: Tenure, fetch: Fetch, for_s: float) -> _Incoming:
        place, extent, span = self._workplace.place, fetch.extent, new_name()
        reserved = await self._workplace.take_span(
            tenure, span, extent, for_s, receive=True, source=fetch.source, source_region=fetch.leased.region
        )
        destination = Destination(
            node=place.node,
            incarnation=place.incarnation,
            kv_address=address_for(place.kv_addresses, fetch.leased.region),
            generation=reserved.generation,
            region=place.region,
            permit=Permit(ticket=reserved.ticket, key_out=reserved.key_out, key_back=reserved.key_back),
        )
        window = Window(extent.first, extent.stop, reserved.span, state=bool(extent.states))
        return _Incoming(fetch, span, window, destination)

    async def _arrival(self, hit: Hit, incoming: Sequence[_Incoming], for_s: float, *, resume: bool) -> bool:
        loop, pulled = asyncio.get_running_loop(), hit.region != self._workplace.place.region
        begun_s = loop.time()
        if not await self._in_time(hit, incoming, for_s):
            self._books.pulls["failed"] += pulled
            return False
        self._books.brought(hit.kv_tokens, resume=resume)
        self._books.get_s.append(loop.time() - begun_s)
        self._books.get_bytes[hit.region] += self._nbytes(incoming)
        self._books.pulled_bytes += pulled * self._nbytes(incoming)
        return True

    async def _in_time(self, hit: Hit, incoming: Sequence[_Incoming], for_s: float) -> bool:
        try:
            async with asyncio.timeout(for_s):
                return all(await asyncio.gather(*(self._arrived(each, for_s) for each in incoming)))
        except TimeoutError:
            log.info("cached prefix is late", region=hit.region, tokens=hit.kv_tokens)
            self._books.gets["failed"] += 1
            return False

    async def _arrived(self, each: _Incoming, for_s: float) -> bool:
        """The shard has sent all of it under a lease that held, and our pump has checked it."""
        try:
            held = await self._pool.fetch(each.fetch, each.span, each.destination, for_s)
            if held:
                await self._workplace.pump.moved(each.span)
        except PrfaasError as error:
            log.info("cached prefix was lost", shard=each.fetch.source, error=str(error))
            held = False
        self._books.gets["done" if held else "failed"] += 1
        return held

    def _nbytes(self, incoming: Sequence[_Incoming]) -> int:
        return sum(self._workplace.info.layout.extent_bytes(each.fetch.extent) for each in incoming)


async def keys_of(tokens: bytes, namespace: str, salt: bytes) -> bytes:
    """The keys of all whole units."""
    if len(tokens) > LONG_PROMPT_BYTES:
        return await asyncio.to_thread(unit_keys, tokens, namespace, salt)
    return unit_keys(tokens, namespace, salt)


def new_name() -> AttemptId:
    """For a transfer between us and a shard."""
    return AttemptId(secrets.token_hex(16))


async def _nothing() -> Hit:
    return Hit()
