"""What failed one request so far, and what that forbids its next attempt."""

from dataclasses import dataclass, field, replace
from enum import Enum

from prfaas.cluster import NodeId
from prfaas.errors import (
    CACHE_LOST,
    KV_ROOM,
    NamespaceMismatch,
    Overloaded,
    PrefillOverdue,
    PrfaasError,
    TransferFailed,
)
from prfaas.flows.story import Ending
from prfaas.request import Route


class OnPrefillFailure(Enum):
    """RETRY on another prefill node and at last on the decode node itself; LOCAL: there at once; FAIL: not at all."""

    RETRY = "retry"
    LOCAL = "local"
    FAIL = "fail"


@dataclass(slots=True)
class Failures:
    """What went wrong so far, in order, and whom to avoid for it, until `limit` attempts have failed. `moving`: after
    the first token. The first cause is then the loss of the node that decoded, which counts elsewhere; some nodes are
    `unfit` from the beginning; and those that gave no room, `full` or not there, have failed nobody."""

    limit: int
    causes: list[PrfaasError] = field(default_factory=list)
    avoid: frozenset[NodeId] = frozenset()
    moving: bool = False
    unfit: frozenset[NodeId] = frozenset()
    full: frozenset[NodeId] = frozenset()
    counted: int = 0
    of_prefill: bool = False
    #: The decode node has no room for KV on its way; a prefill on the node itself needs none.
    of_room: bool = False
    #: There is just the time left for a prefill on the decode node.
    of_time: bool = False
    use_cache: bool = True

    def add(self, error: PrfaasError, stage: Ending, route: Route, reserved: bool) -> None:
        # A pair of nodes whose namespaces differ is found out by the decode node, but it is the prefill node that is
        # exchanged: others have to fit the decode node as well.
        prefill = stage is Ending.PREFILL_LOST or isinstance(error, NamespaceMismatch)
        self.causes.append(error)
        full = self.moving and (isinstance(error, Overloaded) or not reserved)
        self.counted += not full
        # What was overdue is followed by what was predicted to be in time with the cache.
        self.use_cache &= isinstance(error, (Overloaded, NamespaceMismatch, PrefillOverdue))
        self.of_time |= isinstance(error, PrefillOverdue)
        if isinstance(error, Overloaded) and error.resource == KV_ROOM and route.moves_kv:
            self.of_room = True
            return
        if isinstance(error, TransferFailed) and error.cause == CACHE_LOST:
            return  # neither node's fault: the same two can serve it without the cache
        self.of_prefill |= prefill
        if full:
            self.full |= {route.prefill if prefill else route.decode}
        else:
            self.avoid |= {route.prefill if prefill else route.decode}

    @property
    def shunned(self) -> frozenset[NodeId]:
        return self.avoid | self.unfit | self.full

    def exhaust(self, on: OnPrefillFailure) -> bool:
        unwanted = self.of_prefill and on is OnPrefillFailure.FAIL
        return unwanted or self.counted >= self.limit

    def another_round(self, unfit: frozenset[NodeId]) -> "Failures":
        """Those are asked again that had no room."""
        return replace(self, unfit=unfit, full=frozenset(), of_room=False)

    def stay(self, on: OnPrefillFailure) -> bool:
        """Once a prefill has failed, the last attempt depends on nothing but the decode node."""
        last = self.counted + 1 == self.limit
        return self.of_room or self.of_time or (self.of_prefill and (last or on is OnPrefillFailure.LOCAL))
