"""What breakers are around, and what a failed prefill counts against.

An engine that fails is the source's own fault. A transfer that breaks counts against the pair and the link. One that is
lost, late or slow may be the fault of all three. Nobody is to blame for a refusal, for a cache that lost something, or
for a decode node that died.
"""

from collections.abc import Mapping
from enum import Enum

from prfaas.cluster import NodeId
from prfaas.errors import (
    CACHE_LOST,
    DeadlineExceeded,
    EngineFailed,
    NamespaceMismatch,
    PeerUnavailable,
    PrfaasError,
    TransferFailed,
)


class Guard(Enum):
    """What a breaker is around."""

    SOURCE = "source"
    PAIR = "pair"
    LINK = "link"


class Blame(Enum):
    """Whose failure an attempt was: the source's, the pair's, that of the way between the two, or nobody knows."""

    SOURCE = "source"
    PAIR = "pair"
    WAY = "way"
    UNKNOWN = "unknown"


BLAMED: Mapping[Blame, tuple[Guard, ...]] = {
    Blame.SOURCE: (Guard.SOURCE,),
    Blame.PAIR: (Guard.PAIR,),
    Blame.WAY: (Guard.PAIR, Guard.LINK),
    Blame.UNKNOWN: (Guard.SOURCE, Guard.PAIR, Guard.LINK),
}


def blame(error: PrfaasError, decode: NodeId) -> Blame | None:
    """Whose failure the end of a prefill for this decode node was; None: no source's and no link's."""
    match error:
        case TransferFailed(cause=cause):
            return None if cause == CACHE_LOST else Blame.WAY
        case EngineFailed():
            return Blame.SOURCE
        case NamespaceMismatch():
            return Blame.PAIR
        case PeerUnavailable(peer=peer):
            return None if peer == decode else Blame.UNKNOWN
        case DeadlineExceeded():
            return Blame.UNKNOWN
        case _:
            return None
