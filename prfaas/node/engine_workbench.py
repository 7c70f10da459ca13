"""What all work of an engine process, prefill, decode and export, has in its hands."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from prfaas.engine.messages import Event, Failed
from prfaas.engine.port import Cache, Engine
from prfaas.kvcache.layout import Extent, KvLayout, Part, Window
from prfaas.request import TOKEN_BYTES

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Workbench:
    """`now` is a monotonic clock in seconds. `emit` must not call back into the work."""

    engine: Engine
    pool: memoryview
    emit: Callable[[Event], None]
    now: Callable[[], float]

    @property
    def layout(self) -> KvLayout:
        return self.engine.info.layout

    def memory(self, part: Part) -> memoryview:
        return self.pool[part.offset : part.offset + part.nbytes]

    def states_at(self, boundary: int) -> tuple[int, ...]:
        """The boundary, where the model has states and the sequence is not empty."""
        return (boundary,) if boundary and self.layout.state_bytes else ()

    def restore(self, held: Sequence[Window], tokens: int) -> Cache:
        """A sequence of the first `tokens` tokens that these windows hold, window by window."""
        ends = tuple(sorted({min(window.stop, tokens) for window in held} - {0}))
        parts = self.layout.extent_parts(Extent(0, tokens, self.states_at(tokens)), ends, held)
        return self.engine.restore(tokens, ((part, self.memory(part)) for part in parts))

    def succeeds(self, work: Callable[[], None], *attempts: str) -> bool:
        """Do `work`. When it raises, these attempts have failed: they are told, and the caller forgets them."""
        try:
            work()
        except Exception as error:
            log.exception("engine_failed", attempts=attempts)
            for attempt in attempts:
                self.emit(Failed(attempt, f"{type(error).__name__}: {error}"))
            return False
        return True


def tokens_between(prompt: bytes, start: int, stop: int) -> bytes:
    """Tokens `start:stop` of a packed prompt."""
    return prompt[start * TOKEN_BYTES : stop * TOKEN_BYTES]
