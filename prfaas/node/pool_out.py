"""Transfers out of a shard: what is asked for under a lease is sent, and counts only if that held to the end (R17).

Memory that is sent goes back to the machine only after the pump has let go of it (R16).
"""

import asyncio
import secrets
from collections.abc import Callable
from time import monotonic
from typing import assert_never

from prfaas.errors import DeadlineExceeded, InvalidRequest, Overloaded, TransferFailed
from prfaas.kvcache import objects
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS
from prfaas.kvcache.layout import Extent, Window
from prfaas.kvcache.placement import unit_ends
from prfaas.node.pool_dock import LONGEST_GET_S, PUMP_SLACK_S, Dock, settle
from prfaas.node.pool_transfers import part_count
from prfaas.request import AttemptId
from prfaas.rpc.cache import Get, Got
from prfaas.transfer.pump.messages import Send

#: At a time. More are refused at once.
MAX_GETS = 1024


class Outgoing:
    """`got` is told how long each transfer took."""

    def __init__(self, dock: Dock, got: Callable[[float], None]) -> None:
        self._dock, self._got = dock, got
        self._serving: dict[objects.GetId, asyncio.Future[tuple[Window, ...]]] = {}
        self._sending: set[AttemptId] = set()
        #: Nothing is being sent.
        self.idle = asyncio.Event()
        self.idle.set()

    def __contains__(self, attempt: AttemptId) -> bool:
        return attempt in self._sending

    def __len__(self) -> int:
        return len(self._sending)

    async def get(self, asked: Get) -> Got:
        """Raises TransferFailed, Overloaded, DeadlineExceeded, InvalidRequest. However the caller leaves, what is being
        sent is ended in order."""
        if not 0 <= asked.first_tokens <= asked.stop_tokens or (
            asked.first_tokens == asked.stop_tokens and not asked.state
        ):
            raise InvalidRequest("nothing is asked for", param="stop_tokens")
        if asked.first_tokens % HASH_UNIT_TOKENS or asked.stop_tokens % HASH_UNIT_TOKENS:
            raise InvalidRequest("ends in the middle of a unit", param="stop_tokens")
        if asked.attempt in self._sending:
            raise InvalidRequest("is under way", param="attempt")
        if len(self._sending) >= MAX_GETS:
            raise Overloaded("transfers out")
        self._sending.add(asked.attempt)
        self.idle.clear()
        answer: asyncio.Future[Got] = asyncio.get_running_loop().create_future()
        task = self._dock.spawn(self._answer_get(asked, answer))
        try:
            return await answer
        finally:
            if not answer.done() or answer.cancelled():
                task.cancel()

    def served(self, get: objects.GetId, windows: tuple[Window, ...]) -> None:
        """The machine has all of it in memory."""
        settle(self._serving.pop(get), windows)

    def missed(self, get: objects.GetId, cause: objects.Missed) -> None:
        settle(self._serving.pop(get), _missed(get, cause))

    async def _answer_get(self, asked: Get, answer: asyncio.Future[Got]) -> None:
        deadline_s, outcome, begun = min(asked.deadline_s, LONGEST_GET_S), "lost", monotonic()
        try:
            async with asyncio.timeout(deadline_s):
                got = await self._send(asked)
            outcome = "sent"
            self._got(monotonic() - begun)
            settle(answer, got)
        except TimeoutError:
            settle(answer, DeadlineExceeded("get", deadline_s))
        except TransferFailed as error:
            outcome = error.cause if error.cause in ("expired", "damaged") else "lost"
            settle(answer, error)
        except Overloaded as error:
            outcome = "no_room"
            settle(answer, error)
        except InvalidRequest as error:
            settle(answer, error)
        finally:
            if not answer.done():
                answer.cancel()
            self._sending.discard(asked.attempt)
            self._dock.counts.gets[outcome] += 1
            if not self._sending:
                self.idle.set()

    async def _send(self, asked: Get) -> Got:
        get = objects.GetId(secrets.token_hex(16))
        ready: asyncio.Future[tuple[Window, ...]] = asyncio.get_running_loop().create_future()
        self._serving[get] = ready
        try:
            self._dock.machine.get(
                get,
                objects.LeaseId(asked.lease),
                asked.first_tokens,
                asked.stop_tokens,
                asked.state,
                monotonic(),
            )
            self._dock.obey()
            windows = await asyncio.shield(ready)
        except asyncio.CancelledError:
            # Whenever it is served, or if it just was, it is over.
            ready.add_done_callback(lambda done: self._unserved(get, done))
            raise
        try:
            sent_bytes = await self._push(asked, windows)
        finally:
            # Until this nothing of the memory could be given to others.
            await self._dock.let_go(asked.attempt)
            held = self._dock.machine.got(get, monotonic())
            self._dock.obey()
        if not held:
            raise TransferFailed(asked.attempt, "expired", "its lease ended before it had arrived")
        return Got(sent_bytes)

    async def _push(self, asked: Get, windows: tuple[Window, ...]) -> int:
        to = asked.destination
        states = (asked.stop_tokens,) if asked.state else ()
        extent = Extent(asked.first_tokens, asked.stop_tokens, states)
        ttl_s = min(asked.deadline_s, LONGEST_GET_S) + PUMP_SLACK_S
        await self._dock.pump.bring(asked.attempt, extent, windows, ttl_s, receive=False)
        self._dock.pump.send(
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
        self._dock.pump.parts_ready(asked.attempt, range(part_count(self._dock.terms.layout, extent)))
        return (await self._dock.pump.moved(asked.attempt)).payload_bytes

    def _unserved(self, get: objects.GetId, done: asyncio.Future[tuple[Window, ...]]) -> None:
        if not done.cancelled() and done.exception() is None:
            self._dock.machine.got(get, monotonic())
            self._dock.obey()


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
