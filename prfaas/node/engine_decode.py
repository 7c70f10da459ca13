"""Decodes of an engine process: waiting, then active, all active sequences advanced together by one step.

What the hand-off left out of a prompt is recomputed first: all but the last token in chunks, then the last by the first
step. Every prompt token that is forwarded here counts as recomputed, at the moment it is forwarded.

A token of `stop_token_ids` ends its sequence unseen: it is neither sent nor counted in `output_tokens`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from prfaas.engine.messages import Decode, Finished, PoolRead, Tokens
from prfaas.engine.port import Cache, StepInput, StepOutput
from prfaas.kvcache.layout import chunk_ends
from prfaas.node.engine_workbench import Workbench, tokens_between
from prfaas.request import TOKEN_BYTES, FinishReason, Sampling


@dataclass(slots=True)
class Decoding:
    """One Decode. `cache` is None until it is restored; `ends` are those of the chunks to recompute; `token_id` is fed
    next."""

    command: Decode
    arrived_s: float
    cache: Cache | None
    ends: Iterator[int]
    token_id: int
    sampling: Sampling
    started_s: float = 0.0
    recomputed_tokens: int = 0
    output_tokens: int = 0

    @property
    def missing_tokens(self) -> int:
        """Prompt tokens that must be forwarded before the last one."""
        held = self.command.tokens if self.cache is None else self.cache.tokens
        return max(0, len(self.command.prompt) // TOKEN_BYTES - 1 - held)

    @property
    def sequence(self) -> Cache:
        assert self.cache is not None
        return self.cache


class DecodeBatch:
    """At most `max_batch` sequences are active; the others wait, first come, first served. Where it is lowered, those
    that are active stay so."""

    def __init__(self, bench: Workbench, max_batch: int) -> None:
        self._bench, self._max_batch = bench, max_batch
        #: More than `max_batch` only while sequences end that were active before it was lowered.
        self._room = max_batch
        self._waiting: dict[str, Decoding] = {}
        self._active: dict[str, Decoding] = {}
        self.forwarded_tokens = 0
        self.busy_s = 0.0
        self.steps, self.stepped_sequences, self.stepped_s = 0, 0, 0.0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._active)

    def __contains__(self, attempt: str) -> bool:
        return attempt in self._waiting or attempt in self._active

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def active(self) -> int:
        return len(self._active)

    @property
    def ready(self) -> bool:
        """Some sequence can be advanced."""
        return any(not each.missing_tokens for each in self._active.values())

    @property
    def recomputing(self) -> bool:
        """Some active sequence lacks part of its prompt."""
        return any(each.missing_tokens for each in self._active.values())

    @property
    def missing_tokens(self) -> int:
        return sum(each.missing_tokens for each in (*self._waiting.values(), *self._active.values()))

    @property
    def attempts(self) -> list[str]:
        return [*self._waiting, *self._active]

    def add(self, command: Decode, kept: Cache | None, arrived_s: float) -> None:
        last = len(command.prompt) // TOKEN_BYTES - 1
        chunk_tokens = self._bench.engine.info.chunk_tokens
        self._waiting[command.attempt] = Decoding(
            command,
            arrived_s,
            kept,
            ends=(end for end in chunk_ends(last, chunk_tokens) if end > command.tokens),
            token_id=int.from_bytes(tokens_between(command.prompt, last, last + 1), "little"),
            sampling=Sampling(
                max_tokens=command.max_tokens,
                temperature=command.temperature,
                top_p=command.top_p,
                seed=command.seed,
                stop_token_ids=command.stop_token_ids,
            ),
        )

    def limit(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._room = max(max_batch, len(self._active))

    def forget(self, attempt: str) -> None:
        self._waiting.pop(attempt, None)
        self._active.pop(attempt, None)
        self._room = max(self._max_batch, len(self._active))

    def start(self) -> None:
        """Restore waiting sequences while there is room for them."""
        while self._waiting and len(self._active) < self._max_batch:
            attempt = next(iter(self._waiting))
            each = self._waiting.pop(attempt)
            each.started_s = self._bench.now()
            if each.cache is not None or self._bench.succeeds(partial(self._restore, each), attempt):
                self._active[attempt] = each

    def step(self) -> None:
        """Advance every active sequence whose prompt lacks only its last token."""
        ready = {attempt: each for attempt, each in self._active.items() if not each.missing_tokens}
        if not ready:
            return
        inputs = [StepInput(each.sequence, each.token_id, each.sampling) for each in ready.values()]
        outputs: list[StepOutput] = []
        started_s = self._bench.now()
        if not self._bench.succeeds(lambda: outputs.extend(self._bench.engine.step(inputs)), *ready):
            # Any of them may have been advanced by half, so none can go on.
            for attempt in ready:
                self.forget(attempt)
            return
        ended_s = self._bench.now()
        self.busy_s += ended_s - started_s
        self.steps += 1
        self.stepped_sequences += len(inputs)
        self.stepped_s += ended_s - started_s
        self.forwarded_tokens += len(inputs)
        for each, output in zip(ready.values(), outputs, strict=True):
            self._drawn(each, output, ended_s)

    def recompute(self) -> bool:
        """One chunk for the oldest sequence that lacks part of its prompt. False when there is none."""
        each = next((each for each in self._active.values() if each.missing_tokens), None)
        if each is None:
            return False
        if not self._bench.succeeds(partial(self._recompute, each), each.command.attempt):
            self.forget(each.command.attempt)
        return True

    def check(self) -> None:
        assert len(self._active) <= self._room
        for each in self._waiting.values():
            assert each.cache is None or each.cache.tokens == each.command.tokens
        for each in self._active.values():
            assert each.output_tokens < each.command.max_tokens, "a finished sequence is still active"
            assert not each.missing_tokens or not each.output_tokens, "drawn before the prompt was complete"
            fed_tokens = max(0, each.output_tokens - 1)
            assert each.sequence.tokens == each.command.tokens + each.recomputed_tokens + fed_tokens

    def _restore(self, each: Decoding) -> None:
        tokens, span = each.command.tokens, each.command.span
        if span is None:
            each.cache = self._bench.engine.new_cache()
            return
        whole = self._bench.engine.info.layout.parts(tokens, (tokens,) if tokens else ())
        each.cache = self._bench.engine.restore(tokens, ((part, self._bench.memory(span, part)) for part in whole))
        self._bench.emit(PoolRead(each.command.attempt))

    def _recompute(self, each: Decoding) -> None:
        started_s = self._bench.now()
        start, end = each.sequence.tokens, next(each.ends)
        self._bench.engine.prefill(each.sequence, tokens_between(each.command.prompt, start, end), None)
        each.recomputed_tokens += end - start
        self.forwarded_tokens += end - start
        self.busy_s += self._bench.now() - started_s

    def _drawn(self, each: Decoding, output: StepOutput, ended_s: float) -> None:
        command, first = each.command, each.output_tokens == 0
        each.recomputed_tokens += first
        if output.token_id in command.stop_token_ids:
            self._finish(each, FinishReason.STOP)
            return
        each.token_id = output.token_id
        each.output_tokens += 1
        self._bench.emit(
            Tokens(
                attempt=command.attempt,
                tokens=output.token_id.to_bytes(TOKEN_BYTES, "little"),
                top_logits=(output.top_logits[: command.top_logits],) if command.top_logits else (),
                first_queue_s=each.started_s - each.arrived_s if first else None,
                first_step_s=ended_s - each.started_s if first else None,
            )
        )
        if each.output_tokens == command.max_tokens:
            self._finish(each, FinishReason.LENGTH)

    def _finish(self, each: Decoding, reason: FinishReason) -> None:
        attempt = each.command.attempt
        self.forget(attempt)
        self._bench.emit(
            Finished(
                attempt=attempt,
                reason=reason.value,
                recomputed_tokens=each.recomputed_tokens,
                output_tokens=each.output_tokens,
            )
        )
