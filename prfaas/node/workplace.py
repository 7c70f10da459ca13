"""What the stories of a worker's attempts work with, and how they take room in the pump and give it back.

Whatever the pump is asked for stands in the tenure first, so that closing it finds all of it.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from prfaas.cluster import NETWORK
from prfaas.engine.port import EngineInfo
from prfaas.errors import Overloaded, PeerUnavailable
from prfaas.kvcache.layout import Extent
from prfaas.node.admission import Admission
from prfaas.node.engine_client import CANCEL_DEADLINE_S, EngineClient
from prfaas.node.pump_client import PumpClient
from prfaas.node.tenure import Place, Tenure
from prfaas.observe.tracing import NO_TRACING, Tracing
from prfaas.request import AttemptId
from prfaas.transfer.pump import messages as pump_messages

T = TypeVar("T")
U = TypeVar("U")

#: The pump takes an abandoned span back by itself this long after the node should have released it. An engine that is
#: stuck may write to the span until the node has given it up, and that is when it does not confirm a cancellation.
PUMP_TTL_SLACK_S = CANCEL_DEADLINE_S + 30.0

#: The owning task group's create_task.
Spawn = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]


@dataclass(frozen=True, slots=True)
class Workplace:
    place: Place
    info: EngineInfo
    engine: EngineClient
    pump: PumpClient
    admission: Admission
    create_task: Spawn
    tracing: Tracing = NO_TRACING

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task in the node's group. Raises PeerUnavailable once engine or pump has died: the group takes no more."""
        try:
            task = self.create_task(work)
        except RuntimeError as error:
            work.close()
            raise PeerUnavailable(self.place.node, "it is going down") from error
        # A task that is cancelled before its first step never awaits the work.
        task.add_done_callback(lambda _: work.close())
        return task

    def check_network(self, network: str) -> None:
        """A router whose view is older than this life of the node finds another one. Raises Overloaded."""
        if network and f"{NETWORK}{network}" not in self.info.capabilities:
            raise Overloaded(f"network: this node has no {network}")

    async def take_span(
        self,
        tenure: Tenure,
        span: AttemptId,
        extent: Extent,
        for_s: float,
        *,
        receive: bool,
        source: str = "",
        source_region: str = "",
    ) -> pump_messages.Reserved:
        """Room for an extent, in the name `span`. Raises Overloaded."""
        tenure.in_pump.add(span)
        return await self.pump.reserve(
            span, extent, for_s + PUMP_TTL_SLACK_S, receive=receive, source=source, source_region=source_region
        )

    def let_go(self, tenure: Tenure, *spans: AttemptId) -> None:
        """Nothing of ours reads or writes these any more. What cannot be given back now ends with the node."""
        with contextlib.suppress(PeerUnavailable):
            self.spawn(self.give_back(tenure, *spans))

    async def give_back(self, tenure: Tenure, *spans: AttemptId) -> None:
        for span in spans:
            await self.pump.release(span)
            tenure.in_pump.discard(span)


async def both(first: Coroutine[Any, Any, T], second: Coroutine[Any, Any, U]) -> tuple[T, U]:
    """Both results. The first failure ends the other: a peer that is gone must not cost the rest of a prefill."""
    tasks = asyncio.ensure_future(first), asyncio.ensure_future(second)
    try:
        await asyncio.gather(*tasks)
        return tasks[0].result(), tasks[1].result()
    finally:
        for task in tasks:
            task.cancel()
