"""Whether an engine that has work gets on with it: one that goes on speaking may still do nothing.

It reports its load about four times a second. What counts as getting on is any token forwarded or step made; nobody
asks for more, because which of its work comes first is the engine's business.
"""

from prfaas.engine.messages import Load


class Labour:
    """`beats` is told each report and says whether it is a sign of life: work was done, or there is none."""

    def __init__(self) -> None:
        self._done: tuple[int, int, int] | None = None

    def beats(self, load: Load) -> bool:
        done = (load.prefill_tokens_total, load.decode_forwarded_tokens_total, load.decode_steps_total)
        moved, self._done = done != self._done, done
        return moved or not (load.queued_prefill_tokens or load.queued_sequences or load.active_sequences)
