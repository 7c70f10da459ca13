"""What transfers of both directions need of their shard: its terms, its machine, its pump."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from prfaas.cluster import Incarnation, Namespace, NodeId
from prfaas.kvcache.layout import KvLayout
from prfaas.kvcache.shard import Shard
from prfaas.node.pump_client import PumpClient
from prfaas.request import AttemptId

#: Whatever a caller asks for.
LONGEST_GET_S = 600.0
#: The pump gives a transfer up by itself this long after the shard should have.
PUMP_SLACK_S = 30.0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Dock:
    """`pump_events` is the task that delivers what the pump says, and ends with it. `obey` carries out what the machine
    orders, after each call to it."""

    terms: Terms
    machine: Shard
    pump: PumpClient
    pump_events: asyncio.Task[None]
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    obey: Callable[[], None]
    counts: Counts

    async def let_go(self, attempt: AttemptId) -> None:
        """Until the pump touches nothing of it any more. One that is gone does not, nor does anybody use its memory."""
        released = asyncio.ensure_future(self.pump.release(attempt))
        either: tuple[asyncio.Future[None], ...] = (released, self.pump_events)
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if released.done():
            released.result()
        released.cancel()


def settle(future: "asyncio.Future[Any] | None", outcome: Any) -> None:
    """Its result or its failure, unless it is done. A failure that nobody waits for is no news."""
    if future is None or future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
        future.exception()
    else:
        future.set_result(outcome)
