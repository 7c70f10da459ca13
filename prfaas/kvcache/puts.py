"""What somebody puts into a shard, from the grant until the pump has let go of it (R16, R22)."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from enum import Enum

from prfaas.kvcache.memory import Place, Resident, Writer
from prfaas.kvcache.objects import Kind, ObjectKey
from prfaas.kvcache.placement import TRANSFER_UNITS
from prfaas.kvcache.radix import first_units, units


class Phase(Enum):
    """SEALED: whole, and waits for what it stands on. OVER: published or discarded, and waits for the pump."""

    FILLING = "filling"
    SEALED = "sealed"
    OVER = "over"


NEXT = {Phase.FILLING: {Phase.SEALED, Phase.OVER}, Phase.SEALED: {Phase.OVER}, Phase.OVER: set[Phase]()}


@dataclass(frozen=True, slots=True)
class Stretch:
    """Units `first:stop` of KV and the states at these boundaries, in units."""

    first: int
    stop: int
    states: tuple[int, ...] = ()

    def places(self, keys: bytes) -> tuple[Place, ...]:
        keys = first_units(keys, self.stop)
        kv = (Place(Kind.KV, keys, boundary) for boundary in range(self.first + 1, self.stop + 1))
        return (*kv, *(Place(Kind.STATE, keys, boundary) for boundary in self.states))


@dataclass(slots=True, eq=False)
class Put:
    """`base` is pinned: the KV that was published below when it was granted. `unproven` in tokens."""

    holder: str
    keys: bytes
    stretch: Stretch
    unproven: frozenset[int]
    base: tuple[ObjectKey, ...]
    expires_at: float
    residents: tuple[Resident, ...] = ()
    writer: Writer = field(default_factory=Writer)
    phase: Phase = Phase.FILLING

    def move(self, phase: Phase) -> None:
        assert phase in NEXT[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase


def missing(keys: bytes, states: Sequence[int], held_units: int, filling: Container[ObjectKey]) -> Stretch | None:
    """The first stretch of a prompt that nobody has or puts, as much as one transfer moves. KV is published up to
    `held_units`, `states` are the boundaries at which one is wanted and not published, rising."""
    first = held_units
    while first < units(keys) and Place(Kind.KV, keys, first + 1).key in filling:
        first += 1
    stop = first
    while stop < min(units(keys), first + TRANSFER_UNITS) and Place(Kind.KV, keys, stop + 1).key not in filling:
        stop += 1
    lacking = [at for at in states if at <= stop and Place(Kind.STATE, keys, at).key not in filling]
    if stop > first:
        return Stretch(first, stop, tuple(at for at in lacking if at >= first))
    return Stretch(lacking[-1], lacking[-1], (lacking[-1],)) if lacking else None
