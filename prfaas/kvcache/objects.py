"""What a cache-pool shard keeps, and what it asks of the process around it.

An object is immutable: the KV of one hash unit in all layers, or all states at one boundary. The key of the unit that
ends there names it, with everything before it, in every pool.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NewType

from prfaas.kvcache.layout import Window
from prfaas.kvcache.prefix import Change

LeaseId = NewType("LeaseId", str)
PutId = NewType("PutId", str)
GetId = NewType("GetId", str)
#: One reading from or writing to the lower tier. Never used twice by a shard.
OpId = NewType("OpId", int)


class Kind(Enum):
    KV = "k"
    STATE = "s"


class ObjectKey(NamedTuple):
    """`unit` is the 16-byte key of the hash unit that ends at the object's boundary."""

    kind: Kind
    unit: bytes


@dataclass(frozen=True, slots=True)
class Load:
    """Read an object from the lower tier into `window`, and answer `loaded(op, ok)`."""

    op: OpId
    key: ObjectKey
    window: Window


@dataclass(frozen=True, slots=True)
class Spill:
    """Write an object through to the lower tier, and answer `spilled(op, ok)`. `path` are the unit keys of the prompt
    up to the object's boundary: they go into its header, for `recovered`. Its memory stays until the answer."""

    op: OpId
    key: ObjectKey
    path: bytes
    window: Window


@dataclass(frozen=True, slots=True)
class Drop:
    """Delete an object from the lower tier; nobody waits for it. Of one key all commands are carried out in order."""

    key: ObjectKey


@dataclass(frozen=True, slots=True)
class Serve:
    """What `get` asked for is in memory, in `windows`, which stay as they are until `got`."""

    get: GetId
    windows: tuple[Window, ...]


class Missed(Enum):
    """Why a `get` has nothing to send."""

    EXPIRED = "expired"
    OUTSIDE = "outside"
    NO_ROOM = "no_room"
    QUOTA = "quota"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Miss:
    """A `get` comes to nothing; it is over, and `got` is not called."""

    get: GetId
    cause: Missed


@dataclass(frozen=True, slots=True)
class Published:
    """All of a put is in the index."""

    put: PutId


class Dropped(Enum):
    """Why nothing of a put is published. HOLE: the KV below it is not there any more."""

    LOST = "lost"
    EXPIRED = "expired"
    ABANDONED = "abandoned"
    HOLE = "hole"


@dataclass(frozen=True, slots=True)
class Discarded:
    """Nothing of a put is or will be published. Unless the pump has done so by itself, it is to let go of the put's
    windows, and `released` to be called then."""

    put: PutId
    cause: Dropped


@dataclass(frozen=True, slots=True)
class Alarm:
    """R14: somebody has other content for a key. The old one was kept."""

    key: ObjectKey
    tenant: str
    kept: int
    refused: int


#: What `Shard.take` hands out, in order. Changes are index events, to be numbered and sent to all who watch.
Command = Change | Load | Spill | Drop | Serve | Miss | Published | Discarded | Alarm


@dataclass(frozen=True, slots=True)
class Leased:
    """What a lease has found and pinned; no KV: then there is no lease. With `joint`, `state_tokens == kv_tokens`, and
    there is a state. `matched_tokens`: how far KV reaches, pinned or not, in whole units."""

    kv_tokens: int
    state_tokens: int
    matched_tokens: int

    def __bool__(self) -> bool:
        return self.kv_tokens > 0


@dataclass(frozen=True, slots=True)
class Granted:
    """What of a put is missing and may come: rows `first_tokens:stop_tokens` and these states. If that is nothing, the
    put does not exist. One window for each unit and each state, positions counted from the start of the prompt."""

    first_tokens: int
    stop_tokens: int
    states: tuple[int, ...] = ()
    windows: tuple[Window, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.windows)


class Refused(Enum):
    """Why a put was refused whole."""

    QUOTA = "quota"
    NO_ROOM = "no_room"
    KNOWN = "known"


@dataclass(frozen=True, slots=True)
class Stored:
    """An object that the lower tier still has after a restart; fields as in `Spill`."""

    key: ObjectKey
    path: bytes
    checksum: int | None = None
