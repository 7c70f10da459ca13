"""A sequence in an engine process: its cache, the snapshots that were taken of it, and how long it stays at its end."""

from dataclasses import dataclass, field

import structlog

from prfaas.engine.port import Cache, Engine
from prfaas.engine.snapshot import Snapshot, take_snapshot

#: Sequences that wait for their export. Each holds the memory of a whole cache; what comes too late is computed again.
MAX_LINGERING = 64

log = structlog.get_logger()


@dataclass(slots=True)
class Sequence:
    """`moving` is the one snapshot that the next one takes the place of (R6); the others stay."""

    cache: Cache
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    moving: int | None = None

    @property
    def boundaries(self) -> tuple[int, ...]:
        return tuple(sorted(self.snapshots))

    def keep_snapshot(self, engine: Engine) -> None:
        """Of the states where the sequence ends now."""
        self.snapshots[self.cache.tokens] = take_snapshot(engine, self.cache)

    def move_snapshot(self, engine: Engine) -> None:
        """The same, instead of the one before."""
        tokens = self.cache.tokens
        if tokens in self.snapshots:
            return
        self.keep_snapshot(engine)
        if self.moving is not None:
            del self.snapshots[self.moving]
        self.moving = tokens


class Lingering:
    """Sequences that ended and are still to be exported; the node cancels each. Of too many the oldest goes."""

    def __init__(self) -> None:
        self._sequences: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, attempt: str) -> bool:
        return attempt in self._sequences

    @property
    def attempts(self) -> list[str]:
        return list(self._sequences)

    def add(self, attempt: str, sequence: Sequence) -> None:
        if len(self._sequences) == MAX_LINGERING:
            oldest = next(iter(self._sequences))
            log.warning("a sequence that lingers is dropped", attempt=oldest, limit=MAX_LINGERING)
            self.forget(oldest)
        self._sequences[attempt] = sequence

    def find(self, attempt: str) -> Sequence | None:
        return self._sequences.get(attempt)

    def forget(self, attempt: str) -> None:
        self._sequences.pop(attempt, None)
