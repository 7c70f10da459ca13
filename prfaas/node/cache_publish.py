"""How a worker gives the cache pool what it has computed: in the background, a bounded number of sequences at once.

A sequence stays in the engine until its harvest is in, or has been given up. Nobody waits for that: where engine, pump
or pool have no room, what was computed is not kept.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import structlog

from prfaas.config import CacheConfig
from prfaas.errors import Overloaded, PrfaasError
from prfaas.kvcache.layout import Window
from prfaas.kvcache.placement import unit_ends
from prfaas.kvcache.states import Checkpoint
from prfaas.node.cache_books import CacheBooks
from prfaas.node.cache_fetch import keys_of, new_name
from prfaas.node.cache_plan import Piece, pieces
from prfaas.node.pool_client import NoOffer, Offer, PoolClient
from prfaas.node.pool_transfers import part_count
from prfaas.node.tenure import Tenant, Tenure
from prfaas.node.workplace import Workplace
from prfaas.request import AttemptId
from prfaas.transfer.outgoing import Urgency
from prfaas.transfer.pump.messages import Send

#: What comes after a piece that ended so has nothing to stand on.
UNUSABLE = frozenset({NoOffer.REFUSED.value, NoOffer.FAILED.value})

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Harvest:
    """What a sequence of these tokens leaves for the cache: rows up to `kv_tokens`, of which the pool had the first
    `known_tokens`, and `states`."""

    tenant: Tenant
    tokens: bytes
    kv_tokens: int
    states: tuple[Checkpoint, ...]
    known_tokens: int = 0


class Publisher:
    """`max_puts` sequences at once; those beyond are let go. A prompt and its answer are one sequence."""

    def __init__(self, workplace: Workplace, pool: PoolClient, settings: CacheConfig, books: CacheBooks) -> None:
        self._workplace, self._pool, self._settings, self._books = workplace, pool, settings, books
        self._running: dict[asyncio.Task[None], AttemptId] = {}

    @property
    def running(self) -> int:
        return len(set(self._running.values()))

    def start(self, tenure: Tenure, harvest: Harvest) -> asyncio.Task[None] | None:
        """Until all of it is in the cache or given up; None: there are too many. It begins when what goes on beside the
        tenure has ended, so that a prompt is there before its answer. Its spans are in the tenure until they are given
        back."""
        if tenure.attempt not in self._running.values() and self.running >= self._settings.max_puts:
            self._give_up(tenure, "dropped", "too many are on their way")
            return None
        task = self._workplace.spawn(self._publish(tenure, harvest, frozenset(tenure.aside)))
        self._running[task] = tenure.attempt
        task.add_done_callback(self._running.pop)
        return task

    async def _publish(self, tenure: Tenure, harvest: Harvest, before: frozenset[asyncio.Task[Any]]) -> None:
        try:
            if before:
                await asyncio.wait(before)
            async with asyncio.timeout(self._settings.put_timeout_s):
                keys = await keys_of(harvest.tokens, self._workplace.info.namespace, harvest.tenant.salt)
                for piece in pieces(harvest.kv_tokens, harvest.states, harvest.known_tokens):
                    outcome = await self._put(tenure, keys, piece, harvest.tenant)
                    self._books.puts[outcome] += 1
                    if outcome in UNUSABLE:
                        break
        except TimeoutError:
            self._give_up(tenure, "failed", "too late")
        except Overloaded as error:
            self._give_up(tenure, "dropped", str(error))
        except PrfaasError as error:
            self._give_up(tenure, "failed", str(error))
        except asyncio.CancelledError:
            self._give_up(tenure, "dropped", "cut off")
            raise

    def _give_up(self, tenure: Tenure, outcome: str, why: str) -> None:
        log.info("not all of it is kept in the cache", attempt=tenure.attempt, why=why)
        self._books.puts[outcome] += 1

    async def _put(self, tenure: Tenure, keys: bytes, piece: Piece, tenant: Tenant) -> str:
        """How it ended."""
        states = (piece.stop,) if piece.state else ()
        put, ttl_s = new_name(), self._settings.put_timeout_s
        offer = await self._pool.offer(
            put,
            keys,
            piece.stop,
            states,
            tenant=tenant.name,
            unproven=() if piece.proven else states,
            ttl_s=ttl_s,
        )
        if isinstance(offer, NoOffer):
            return offer.value
        try:
            published = await self._sent(tenure, offer, ttl_s)
        except BaseException:
            # Others may have it, and must not be told until its time is over that somebody is sending it.
            self._pool.abandon(offer)
            raise
        return "published" if published else "failed"

    async def _sent(self, tenure: Tenure, offer: Offer, ttl_s: float) -> bool:
        """Whether it is in the cache now."""
        extent = offer.extent
        span = await self._workplace.take_span(tenure, offer.put, extent, ttl_s, receive=False)
        # Until the engine has answered it may write there: who is cut off here leaves the span to the tenure's end.
        window = Window(extent.first, extent.stop, span.span, state=bool(extent.states))
        await self._workplace.engine.export(tenure.attempt, (window,))
        try:
            await self._push(offer)
            return await self._pool.published(offer, ttl_s)
        finally:
            self._workplace.let_go(tenure, offer.put)

    async def _push(self, offer: Offer) -> None:
        pump, layout, extent = self._workplace.pump, self._workplace.info.layout, offer.extent
        pump.send(
            Send(
                attempt=offer.put,
                address=offer.kv_address,
                peer_incarnation=offer.incarnation,
                generation=offer.generation,
                chunk_ends=unit_ends(extent.first, extent.stop),
                region=offer.region,
                ticket=offer.permit.ticket,
                key_out=offer.permit.key_out,
                key_back=offer.permit.key_back,
                urgency=Urgency.BACKGROUND,
            )
        )
        pump.parts_ready(offer.put, range(part_count(layout, extent)))
        await pump.moved(offer.put)
        self._books.put_bytes += layout.extent_bytes(extent)
