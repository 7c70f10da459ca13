"""Decodes of an engine process: waiting, then active, all active sequences advanced together by one step.

What the hand-off left out of a prompt is recomputed first: all but the last token in chunks, then the last by the first
step. Every prompt token that is forwarded here counts as recomputed, at the moment it is forwarded.

What a sequence has computed when it reaches a multiple of its `snapshot_tokens` is what a later turn can begin from.

A token of `stop_token_ids` ends its sequence unseen: it is neither sent nor counted in `output_tokens`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from prfaas.engine.messages import Decode, Finished, PoolRead, Tokens
from prfaas.engine.port import StepInput, StepOutput
from prfaas.kvcache.layout import chunk_ends
from prfaas.node.engine_sequence import Lingering, Sequence
from prfaas.node.engine_workbench import Workbench, tokens_between
from prfaas.request import TOKEN_BYTES, FinishReason, Sampling


@dataclass(slots=True)
class Decoding:
    """One Decode. `kept` is None until it is restored; `ends` are those of the chunks to recompute; `token_id` is fed
    next."""

    command: Decode
    kept: Sequence | None
    ends: Iterator[int]
    token_id: int
    sampling: Sampling
    started_s: float = 0.0
    recomputed_tokens: int = 0
    output_tokens: int = 0

    @property
    def missing_tokens(self) -> int:
        """Prompt tokens that must be forwarded before the last one."""
        held = self.command.tokens if self.kept is None else self.kept.cache.tokens
        return max(0, len(self.command.prompt) // TOKEN_BYTES - 1 - held)

    @property
    def sequence(self) -> Sequence:
        assert self.kept is not None
        return self.kept


class DecodeBatch:
    """At most `max_batch` sequences are active; the others wait, first come, first served. Where it is lowered, those
    that are active stay so."""

    def __init__(self, bench: Workbench, lingering: Lingering, max_batch: int) -> None:
        self._bench, self._lingering, self._max_batch = bench, lingering, max_batch
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

    def add(self, command: Decode, kept: Sequence | None) -> None:
        last = len(command.prompt) // TOKEN_BYTES - 1
        chunk_tokens = self._bench.engine.info.chunk_tokens
        self._waiting[command.attempt] = Decoding(
            command,
            kept,
            ends=(end for end in chunk_ends(last, chunk_tokens) if end > command.tokens),
            token_id=int.from_bytes(tokens_between(command.prompt, last, last + 1), "little"),
            sampling=Sampling(
                max_tokens=command.max_tokens,
                temperature=command.temperature,
                top_p=command.top_p,
                seed=command.seed,
                stop_token_ids=command.stop_token_ids,
                constraint=command.constraint,
            ),
        )

    def limit(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._room = max(max_batch, len(self._active))

    def find(self, attempt: str) -> Sequence | None:
        each = self._waiting.get(attempt) or self._active.get(attempt)
        return each.kept if each is not None else None

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
            if self._bench.succeeds(partial(self._begin, each), attempt):
                self._active[attempt] = each

    def step(self) -> None:
        """Advance every active sequence whose prompt lacks only its last token."""
        ready = {attempt: each for attempt, each in self._active.items() if not each.missing_tokens}
        if not ready:
            return
        inputs = [StepInput(each.sequence.cache, each.token_id, each.sampling) for each in ready.values()]
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
        for (attempt, each), output in zip(ready.items(), outputs, strict=True):
            if self._bench.succeeds(partial(self._snapshot, each), attempt):
                self._drawn(each, output)
            else:
                self.forget(attempt)

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
            assert each.kept is None or each.kept.cache.tokens == each.command.tokens
        for each in self._active.values():
            assert each.output_tokens < each.command.max_tokens, "a finished sequence is still active"
            assert not each.missing_tokens or not each.output_tokens, "drawn before the prompt was complete"
            fed_tokens = max(0, each.output_tokens - 1)
            assert each.sequence.cache.tokens == each.command.tokens + each.recomputed_tokens + fed_tokens

    def _begin(self, each: Decoding) -> None:
        command, bench = each.command, self._bench
        if each.kept is None:
            cache = bench.restore(command.held, command.tokens) if command.held else bench.engine.new_cache()
            each.kept = Sequence(cache)
        if command.held:
            bench.emit(PoolRead(command.attempt))
        self._snapshot(each)

    def _snapshot(self, each: Decoding) -> None:
        tokens, every = each.sequence.cache.tokens, each.command.snapshot_tokens
        if tokens and every and tokens % every == 0:
            each.sequence.move_snapshot(self._bench.engine)

    def _recompute(self, each: Decoding) -> None:
        started_s = self._bench.now()
        start, end = each.sequence.cache.tokens, next(each.ends)
        self._bench.engine.prefill(each.sequence.cache, tokens_between(each.command.prompt, start, end), None)
        self._snapshot(each)
        each.recomputed_tokens += end - start
        self.forwarded_tokens += end - start
        self.busy_s += self._bench.now() - started_s

    def _drawn(self, each: Decoding, output: StepOutput) -> None:
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
                scores=(output.score,) if command.top_logits and output.score is not None else (),
                started_s=each.started_s if first else None,
            )
        )
        if each.output_tokens == command.max_tokens:
            self._finish(each, FinishReason.LENGTH)

    def _finish(self, each: Decoding, reason: FinishReason) -> None:
        attempt = each.command.attempt
        self.forget(attempt)
        if each.command.linger:
            self._lingering.add(attempt, each.sequence)
        self._bench.emit(
            Finished(
                attempt=attempt,
                reason=reason.value,
                recomputed_tokens=each.recomputed_tokens,
                output_tokens=each.output_tokens,
                kept_tokens=each.sequence.cache.tokens,
                snapshots=each.sequence.boundaries,
            )
        )
