"""What a vLLM server has to do and has done, as a node's Load: counted by what the node asked for and what came back.

vLLM steps many sequences together and tells of each by itself. Here every event of a stream is a step of one sequence,
as long as the time since the event before, so that seconds by steps are the time per token.
"""

import time
from dataclasses import dataclass

from prfaas.engine.messages import Load


@dataclass(slots=True)
class _Prefilling:
    done: int
    stop: int
    at_s: float


class Work:
    """`now` is a monotonic clock in seconds."""

    def __init__(self) -> None:
        self._prefills: dict[str, _Prefilling] = {}
        self._decodes: dict[str, float | None] = {}
        self._prefilled, self._forwarded, self._steps = 0, 0, 0
        self._prefill_s, self._decode_s = 0.0, 0.0

    def prefill(self, attempt: str, start: int, stop: int) -> None:
        self._prefills[attempt] = _Prefilling(start, stop, time.monotonic())

    def prefilled_to(self, attempt: str, stop: int) -> None:
        each = self._prefills.get(attempt)
        if each is None or stop <= each.done:
            return
        now = time.monotonic()
        self._prefilled += stop - each.done
        self._prefill_s += now - each.at_s
        each.done, each.at_s = stop, now

    def decode(self, attempt: str) -> None:
        self._decodes[attempt] = None

    def drawn(self, attempt: str, tokens: int) -> None:
        now, before = time.monotonic(), self._decodes.get(attempt)
        self._decodes[attempt] = now
        self._forwarded += tokens
        self._steps += 1
        if before is not None:
            self._decode_s += now - before

    def recomputed(self, tokens: int) -> None:
        """Of a prompt; the last of them came with the first token that was drawn."""
        self._forwarded += max(0, tokens - 1)

    def forget(self, attempt: str) -> None:
        self._prefills.pop(attempt, None)
        self._decodes.pop(attempt, None)

    def load(self, kept: int) -> Load:
        """`kept` sequences wait for their decode."""
        begun = sum(at_s is not None for at_s in self._decodes.values())
        return Load(
            queued_prefill_tokens=sum(each.stop - each.done for each in self._prefills.values()),
            queued_sequences=len(self._decodes) - begun,
            active_sequences=begun,
            kept_sequences=kept,
            prefill_tokens_total=self._prefilled,
            decode_forwarded_tokens_total=self._forwarded,
            prefill_busy_s_total=self._prefill_s,
            decode_busy_s_total=self._decode_s,
            decode_steps_total=self._steps,
            decode_step_sequences_total=self._steps,
            decode_step_s_total=self._decode_s,
        )
