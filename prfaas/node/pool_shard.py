"""A shard at work: its machine, its pump and the tier below brought together, a task per transfer.

Whatever the machine orders is carried out here, and what becomes of it is told to the machine. Memory that a transfer
uses goes back to the machine only after the pump has let go of it (R16), and a transfer out counts only if its lease
held to the end (R17). Everything runs on one event loop; `spawn` is the owning task group's create_task.
"""

import asyncio
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, assert_never

import structlog

from prfaas.cluster import Incarnation, Namespace, NodeId
from prfaas.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NamespaceMismatch,
    Overloaded,
    PeerUnavailable,
    TransferFailed,
)
from prfaas.kvcache import objects
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS, KEY_BYTES
from prfaas.kvcache.layout import KvLayout, Window
from prfaas.kvcache.objects import Kind, ObjectKey
from prfaas.kvcache.prefix import Change
from prfaas.kvcache.segments import SEGMENT_UNITS, unit_ends
from prfaas.kvcache.shard import Shard
from prfaas.node.pool_feed import Feed
from prfaas.node.pool_tier import Tier
from prfaas.node.pool_transfers import extent_at, part_count, windows_at
from prfaas.node.pump_client import PumpClient
from prfaas.request import AttemptId, Permit
from prfaas.rpc.cache import Await, Get, Got, Lease, Leased, LeaseId, Put, Release, Renew, Wanted
from prfaas.rpc.commands import Reserved
from prfaas.transfer.pump.messages import Send

TICK_S = 0.1
#: Each pins what it found; a holder that forgets them has them for their time.
MAX_LEASES = 1 << 16
#: Transfers at a time, in and out. More are refused at once.
MAX_GETS, MAX_PUTS = 1024, 1024
#: Whatever a caller asks for.
LONGEST_GET_S = 600.0
#: The pump gives a transfer up by itself this long after the shard should have.
PUMP_SLACK_S = 30.0
#: Puts whose end is remembered for who asks.
REMEMBERED_PUTS = 4096

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Who this shard is, and the most it grants."""

    shard: NodeId
    region: str
    incarnation: Incarnation
    namespace: Namespace
    layout: KvLayout
    kv_addresses: Mapping[str, str]
    lease_ttl_s: float
    put_ttl_s: float


@dataclass(slots=True)
class Counts:
    """What became of what was asked, by outcome."""

    lookups: Counter[str] = field(default_factory=Counter)
    gets: Counter[str] = field(default_factory=Counter)
    puts: Counter[str] = field(default_factory=Counter)
    #: Leases that were given back in time.
    released: int = 0
    received_bytes: int = 0


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
        self._pump, self._pump_events, self._create_task, self._got = pump, pump_events, spawn, got
        self._tasks: set[asyncio.Task[None]] = set()
        self.feed = Feed(terms.incarnation, terms.namespace, shard.snapshot)
        self.counts = Counts()
        self.draining = False
        self.tier: Tier | None = None
        self._serving: dict[objects.GetId, asyncio.Future[tuple[Window, ...]]] = {}
        self._sending: set[AttemptId] = set()
        self._receiving: dict[AttemptId, asyncio.Future[objects.Dropped]] = {}
        self._published: OrderedDict[AttemptId, asyncio.Future[bool]] = OrderedDict()
        #: Nothing is being sent.
        self._idle = asyncio.Event()
        self._idle.set()

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
        self.counts.lookups["miss" if found is None else "hit"] += 1
        if found is None:
            return Leased()
        return Leased(LeaseId(lease), found.kv_tokens, found.state_tokens)

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

    # -- out

    async def get(self, asked: Get) -> Got:
        """Raises TransferFailed, Overloaded, DeadlineExceeded, InvalidRequest. However the caller leaves, what is being
        sent is ended in order."""
        if not 0 <= asked.first_tokens <= asked.stop_tokens or (
            asked.first_tokens == asked.stop_tokens and not asked.state
        ):
            raise InvalidRequest("nothing is asked for", param="stop_tokens")
        if asked.first_tokens % HASH_UNIT_TOKENS or asked.stop_tokens % HASH_UNIT_TOKENS:
            raise InvalidRequest("ends in the middle of a unit", param="stop_tokens")
        if asked.attempt in self._sending or asked.attempt in self._receiving:
            raise InvalidRequest("is under way", param="attempt")
        if len(self._sending) >= MAX_GETS:
            raise Overloaded("transfers out")
        self._sending.add(asked.attempt)
        self._idle.clear()
        answer: asyncio.Future[Got] = asyncio.get_running_loop().create_future()
        task = self.spawn(self._answer_get(asked, answer))
        try:
            return await answer
        finally:
            if not answer.done() or answer.cancelled():
                task.cancel()

    async def _answer_get(self, asked: Get, answer: asyncio.Future[Got]) -> None:
        deadline_s, outcome, begun = min(asked.deadline_s, LONGEST_GET_S), "lost", monotonic()
        try:
            async with asyncio.timeout(deadline_s):
                got = await self._send(asked)
            outcome = "sent"
            self._got(monotonic() - begun)
            _settle(answer, got)
        except TimeoutError:
            _settle(answer, DeadlineExceeded("get", deadline_s))
        except TransferFailed as error:
            outcome = error.cause if error.cause in ("expired", "damaged") else "lost"
            _settle(answer, error)
        except Overloaded as error:
            outcome = "no_room"
            _settle(answer, error)
        except InvalidRequest as error:
            _settle(answer, error)
        finally:
            if not answer.done():
                answer.cancel()
            self._sending.discard(asked.attempt)
            self.counts.gets[outcome] += 1
            if not self._sending:
                self._idle.set()

    async def _send(self, asked: Get) -> Got:
        get = objects.GetId(secrets.token_hex(16))
        ready: asyncio.Future[tuple[Window, ...]] = asyncio.get_running_loop().create_future()
        self._serving[get] = ready
        try:
            self.shard.get(
                get,
                objects.LeaseId(asked.lease),
                asked.first_tokens,
                asked.stop_tokens,
                asked.state,
                monotonic(),
            )
            self._obey()
            windows = await asyncio.shield(ready)
        except asyncio.CancelledError:
            # Whenever it is served, or if it just was, it is over.
            ready.add_done_callback(lambda done: self._unserved(get, done))
            raise
        try:
            sent_bytes = await self._push(asked, windows)
        finally:
            # Until this nothing of the memory could be given to others.
            await self._let_go(asked.attempt)
            held = self.shard.got(get, monotonic())
            self._obey()
        if not held:
            raise TransferFailed(asked.attempt, "expired", "its lease ended before it had arrived")
        return Got(sent_bytes)

    async def _push(self, asked: Get, windows: tuple[Window, ...]) -> int:
        to, position = asked.destination, asked.position_tokens
        states = (asked.stop_tokens,) if asked.state else ()
        extent = extent_at(position, asked.first_tokens, asked.stop_tokens, states)
        ttl_s = min(asked.deadline_s, LONGEST_GET_S) + PUMP_SLACK_S
        await self._pump.bring(asked.attempt, extent, windows_at(position, windows), ttl_s, receive=False)
        self._pump.send(
            Send(
                attempt=asked.attempt,
                address=to.kv_address,
                peer_incarnation=to.incarnation,
                generation=to.generation,
                chunk_ends=unit_ends(extent.first, extent.stop),
                extent=extent,
                region=to.region,
                ticket=to.permit.ticket,
                key_out=to.permit.key_out,
                key_back=to.permit.key_back,
                urgency=asked.urgency,
            )
        )
        self._pump.parts_ready(asked.attempt, range(part_count(self.terms.layout, extent)))
        return (await self._pump.moved(asked.attempt)).payload_bytes

    def _unserved(self, get: objects.GetId, done: asyncio.Future[tuple[Window, ...]]) -> None:
        if not done.cancelled() and done.exception() is None:
            self.shard.got(get, monotonic())
            self._obey()

    # -- in

    async def put(self, asked: Put) -> Wanted:
        """Raises Overloaded, NamespaceMismatch, InvalidRequest."""
        self._check(asked.namespace, asked.keys)
        put = asked.put
        if put in self._receiving or put in self._sending:
            raise InvalidRequest("is under way", param="put")
        if len(self._receiving) >= MAX_PUTS:
            raise Overloaded("transfers in")
        ttl_s = min(asked.ttl_s, self.terms.put_ttl_s)
        granted = self.shard.put(
            objects.PutId(put),
            asked.source_node,
            asked.tenant,
            asked.keys,
            asked.stop_tokens,
            asked.states,
            _checksums(asked),
            monotonic(),
            ttl_s,
            asked.unproven,
        )
        match granted:
            case objects.Refused.NO_ROOM | objects.Refused.QUOTA:
                self._obey()
                self.counts.puts[granted.value] += 1
                raise Overloaded(granted.value)
            case objects.Refused():
                self._obey()
                raise InvalidRequest(granted.value, param="put")
        if not granted:
            self._obey()
            self.counts.puts["known"] += 1
            return Wanted()
        self._receiving[put] = asyncio.get_running_loop().create_future()
        self._remember(put)
        self._obey()
        room: asyncio.Future[Reserved] = asyncio.get_running_loop().create_future()
        self.spawn(self._receive(asked, granted, ttl_s, room))
        return Wanted(granted.first_tokens, granted.stop_tokens, granted.states, await room)

    async def awaited(self, asked: Await) -> bool:
        """Whether the put has been published. Raises DeadlineExceeded; of a put that nobody knows: no."""
        published = self._published.get(asked.put)
        if published is None:
            return False
        deadline_s = min(asked.deadline_s, LONGEST_GET_S)
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.shield(published)
        except TimeoutError:
            raise DeadlineExceeded("put", deadline_s) from None

    async def _receive(
        self, asked: Put, granted: objects.Granted, ttl_s: float, room: asyncio.Future[Reserved]
    ) -> None:
        put, discarded = asked.put, self._receiving[asked.put]
        try:
            moved = await self._take_in(asked, granted, ttl_s, room)
            if moved and not discarded.done():
                self.shard.received(objects.PutId(put))
            elif not discarded.done():
                self.shard.lost(objects.PutId(put))
            self._obey()
        finally:
            if not room.done():
                room.cancel()
            await self._let_go(put)
            self.shard.released(objects.PutId(put))
            self._obey()
            del self._receiving[put]

    async def _take_in(
        self, asked: Put, granted: objects.Granted, ttl_s: float, room: asyncio.Future[Reserved]
    ) -> bool:
        """Whether all of it has come, before the machine has given it up."""
        put, discarded = asked.put, self._receiving[asked.put]
        extent = extent_at(asked.position_tokens, granted.first_tokens, granted.stop_tokens, granted.states)
        try:
            reserved = await self._pump.bring(
                put,
                extent,
                windows_at(asked.position_tokens, granted.windows),
                ttl_s + PUMP_SLACK_S,
                receive=True,
                source=asked.source_node,
                source_region=asked.source_region,
            )
        except (InvalidRequest, Overloaded) as error:
            _settle(room, error)
            return False
        address = self.terms.kv_addresses.get(asked.source_region) or self.terms.kv_addresses[""]
        permit = Permit(ticket=reserved.ticket, key_out=reserved.key_out, key_back=reserved.key_back)
        place = Reserved(
            kv_address=address, generation=reserved.generation, incarnation=self.terms.incarnation, permit=permit
        )
        _settle(room, place)
        moved = asyncio.ensure_future(self._pump.moved(put))
        try:
            either: tuple[asyncio.Future[Any], ...] = (moved, discarded)
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if moved.done() and moved.exception() is None:
                self.counts.received_bytes += moved.result().payload_bytes
                return True
            return False
        finally:
            moved.cancel()

    async def _let_go(self, attempt: AttemptId) -> None:
        """Until the pump touches nothing of it any more. One that is gone does not, nor does anybody use its memory."""
        released = asyncio.ensure_future(self._pump.release(attempt))
        either: tuple[asyncio.Future[None], ...] = (released, self._pump_events)
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if released.done():
            released.result()
        released.cancel()

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
                await self._idle.wait()
                if self.tier is not None:
                    await self.tier.idle.wait()
        except TimeoutError:
            log.warning("drain cut off what was under way", gets=len(self._sending))
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
                _settle(self._serving.pop(get), windows)
            case objects.Miss(get=get, cause=cause):
                _settle(self._serving.pop(get), _missed(get, cause))
            case objects.Published(put=put):
                self.counts.puts["published"] += 1
                self._settle_put(AttemptId(put), True)
            case objects.Discarded(put=put, cause=cause):
                self.counts.puts["expired" if cause is objects.Dropped.EXPIRED else "lost"] += 1
                self._settle_put(AttemptId(put), False)
                _settle(self._receiving.get(AttemptId(put)), cause)
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

    def _settle_put(self, put: AttemptId, published: bool) -> None:
        _settle(self._published.get(put), published)

    def _remember(self, put: AttemptId) -> None:
        self._published[put] = asyncio.get_running_loop().create_future()
        while len(self._published) > REMEMBERED_PUTS:
            _, forgotten = self._published.popitem(last=False)
            _settle(forgotten, False)

    def _check(self, namespace: Namespace, keys: bytes) -> None:
        if self.draining:
            raise PeerUnavailable(self.terms.shard, "is draining")
        if namespace != self.terms.namespace:
            raise NamespaceMismatch(self.terms.namespace, namespace)
        if not keys or len(keys) % KEY_BYTES or len(keys) > SEGMENT_UNITS * KEY_BYTES:
            raise InvalidRequest("are not those of one segment", param="keys")


def _settle(future: "asyncio.Future[Any] | None", outcome: Any) -> None:
    """Its result or its failure, unless it is done. A failure that nobody waits for is no news."""
    if future is None or future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
        future.exception()
    else:
        future.set_result(outcome)


def _missed(get: objects.GetId, cause: objects.Missed) -> Exception:
    match cause:
        case objects.Missed.NO_ROOM | objects.Missed.QUOTA:
            return Overloaded(cause.value)
        case objects.Missed.OUTSIDE:
            return InvalidRequest("is not within what was leased", param="stop_tokens")
        case objects.Missed.EXPIRED | objects.Missed.DAMAGED:
            return TransferFailed(get, cause.value)
        case _:
            assert_never(cause)


def _checksums(asked: Put) -> dict[ObjectKey, int]:
    def unit(tokens: int) -> bytes:
        return asked.keys[tokens // HASH_UNIT_TOKENS * KEY_BYTES - KEY_BYTES : tokens // HASH_UNIT_TOKENS * KEY_BYTES]

    of_units = {
        ObjectKey(Kind.KV, unit((number + 1) * HASH_UNIT_TOKENS)): checksum
        for number, checksum in enumerate(asked.unit_checksums)
    }
    of_states = zip(asked.states, asked.state_checksums, strict=False)
    return of_units | {ObjectKey(Kind.STATE, unit(tokens)): checksum for tokens, checksum in of_states}
