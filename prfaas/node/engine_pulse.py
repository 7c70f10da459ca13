"""Whether an engine that has work gets on with it: one that goes on speaking may still do nothing.

It reports its load about four times a second. What counts as getting on is any token forwarded or step made; nobody
asks for more, because which of its work comes first is the engine's business. Of an engine that drives a server the
server's own work counts as well: it may be at requests of others, or at a prompt of which nobody hears before its end.
"""

from prfaas.engine.messages import Load


class Labour:
    """`beats` is told each report and says whether it is a sign of life: work was done, or there is none."""

    def __init__(self) -> None:
        self._done: tuple[float, ...] | None = None

    def beats(self, load: Load) -> bool:
        ours = (load.prefill_tokens_total, load.decode_forwarded_tokens_total, load.decode_steps_total)
        done: tuple[float, ...] = ours
        if (server := load.server) is not None:
            done += (server.prompt_tokens_total, server.generated_tokens_total, server.kv_usage_ratio)
        moved, self._done = done != self._done, done
        return moved or not (load.queued_prefill_tokens or load.queued_sequences or load.active_sequences)
