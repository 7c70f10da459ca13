"""Transfers into a shard: room is granted, what comes is published by the machine, and who asks is told (R22).

Memory that is filled goes back to the machine only after the pump has let go of it (R16).
"""

import asyncio
from collections import OrderedDict
from time import monotonic
from typing import Any

from prfaas.errors import DeadlineExceeded, InvalidRequest, Overloaded
from prfaas.kvcache import objects
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS, KEY_BYTES
from prfaas.kvcache.layout import Extent
from prfaas.kvcache.objects import Kind, ObjectKey
from prfaas.node.pool_dock import LONGEST_GET_S, PUMP_SLACK_S, Dock, settle
from prfaas.request import AttemptId, Permit
from prfaas.rpc.cache import Abandon, Await, Put, Wanted
from prfaas.rpc.commands import Reserved

#: At a time. More are refused at once.
MAX_PUTS = 1024
#: Puts whose end is remembered for who asks.
REMEMBERED_PUTS = 4096


class Incoming:
    def __init__(self, dock: Dock) -> None:
        self._dock = dock
        self._receiving: dict[AttemptId, asyncio.Future[objects.Dropped]] = {}
        self._published: OrderedDict[AttemptId, asyncio.Future[bool]] = OrderedDict()

    def __contains__(self, put: AttemptId) -> bool:
        return put in self._receiving

    async def put(self, asked: Put) -> Wanted:
        """Raises Overloaded, InvalidRequest."""
        put = asked.put
        if put in self._receiving:
            raise InvalidRequest("is under way", param="put")
        if len(self._receiving) >= MAX_PUTS:
            raise Overloaded("transfers in")
        ttl_s = min(asked.ttl_s, self._dock.terms.put_ttl_s)
        granted = self._dock.machine.put(
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
                self._dock.obey()
                self._dock.counts.puts[granted.value] += 1
                raise Overloaded(granted.value)
            case objects.Refused():
                self._dock.obey()
                raise InvalidRequest(granted.value, param="put")
        if not granted:
            self._dock.obey()
            self._dock.counts.puts["known"] += 1
            return Wanted()
        self._receiving[put] = asyncio.get_running_loop().create_future()
        self._remember(put)
        self._dock.obey()
        room: asyncio.Future[Reserved] = asyncio.get_running_loop().create_future()
        self._dock.spawn(self._receive(asked, granted, ttl_s, room))
        try:
            return Wanted(granted.first_tokens, granted.stop_tokens, granted.states, await room)
        except asyncio.CancelledError:
            # Who asked does not wait any more, and will send nothing.
            self.abandon(Abandon(put))
            raise

    def abandon(self, asked: Abandon) -> None:
        """Nothing will come for this put: others may put the same at once. Idempotent; of a put that has come, or that
        nobody knows, nothing changes."""
        if asked.put in self._receiving:
            self._dock.machine.lost(objects.PutId(asked.put), objects.Dropped.ABANDONED)
            self._dock.obey()

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

    def published(self, put: objects.PutId) -> None:
        self._dock.counts.puts["published"] += 1
        settle(self._published.get(AttemptId(put)), True)

    def discarded(self, put: objects.PutId, cause: objects.Dropped) -> None:
        self._dock.counts.puts["lost" if cause is objects.Dropped.HOLE else cause.value] += 1
        settle(self._published.get(AttemptId(put)), False)
        settle(self._receiving.get(AttemptId(put)), cause)

    async def _receive(
        self, asked: Put, granted: objects.Granted, ttl_s: float, room: asyncio.Future[Reserved]
    ) -> None:
        put, discarded = asked.put, self._receiving[asked.put]
        try:
            moved = await self._take_in(asked, granted, ttl_s, room)
            if moved and not discarded.done():
                self._dock.machine.received(objects.PutId(put))
            elif not discarded.done():
                self._dock.machine.lost(objects.PutId(put))
            self._dock.obey()
        finally:
            if not room.done():
                room.cancel()
            await self._dock.let_go(put)
            self._dock.machine.released(objects.PutId(put))
            self._dock.obey()
            del self._receiving[put]

    async def _take_in(
        self, asked: Put, granted: objects.Granted, ttl_s: float, room: asyncio.Future[Reserved]
    ) -> bool:
        """Whether all of it has come, before the machine has given it up."""
        put, discarded = asked.put, self._receiving[asked.put]
        extent = Extent(granted.first_tokens, granted.stop_tokens, granted.states)
        try:
            reserved = await self._dock.pump.bring(
                put,
                extent,
                granted.windows,
                ttl_s + PUMP_SLACK_S,
                receive=True,
                source=asked.source_node,
                source_region=asked.source_region,
            )
        except (InvalidRequest, Overloaded) as error:
            settle(room, error)
            return False
        address = self._dock.terms.kv_addresses.get(asked.source_region) or self._dock.terms.kv_addresses[""]
        permit = Permit(ticket=reserved.ticket, key_out=reserved.key_out, key_back=reserved.key_back)
        place = Reserved(
            kv_address=address, generation=reserved.generation, incarnation=self._dock.terms.incarnation, permit=permit
        )
        settle(room, place)
        moved = asyncio.ensure_future(self._dock.pump.moved(put))
        try:
            either: tuple[asyncio.Future[Any], ...] = (moved, discarded)
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if moved.done() and moved.exception() is None:
                self._dock.counts.received_bytes += moved.result().payload_bytes
                return True
            return False
        finally:
            moved.cancel()

    def _remember(self, put: AttemptId) -> None:
        self._published[put] = asyncio.get_running_loop().create_future()
        while len(self._published) > REMEMBERED_PUTS:
            _, forgotten = self._published.popitem(last=False)
            settle(forgotten, False)


def _checksums(asked: Put) -> dict[ObjectKey, int]:
    def unit(tokens: int) -> bytes:
        return asked.keys[tokens // HASH_UNIT_TOKENS * KEY_BYTES - KEY_BYTES : tokens // HASH_UNIT_TOKENS * KEY_BYTES]

    of_units = {
        ObjectKey(Kind.KV, unit((number + 1) * HASH_UNIT_TOKENS)): checksum
        for number, checksum in enumerate(asked.unit_checksums)
    }
    of_states = zip(asked.states, asked.state_checksums, strict=False)
    return of_units | {ObjectKey(Kind.STATE, unit(tokens)): checksum for tokens, checksum in of_states}
