"""What both halves of an engine's work, prefill and decode, have in their hands."""

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from prfaas.engine.messages import Event, Failed
from prfaas.engine.port import Engine
from prfaas.kvcache.layout import Part
from prfaas.request import TOKEN_BYTES

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Workbench:
    """`now` is a monotonic clock in seconds. `emit` must not call back into the work."""

    engine: Engine
    pool: memoryview
    emit: Callable[[Event], None]
    now: Callable[[], float]

    def memory(self, span: int, part: Part) -> memoryview:
        return self.pool[span + part.offset : span + part.offset + part.nbytes]

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
