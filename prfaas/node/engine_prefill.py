"""Prefills of an engine process: first come, first served, one chunk at a time, only the oldest under way.

A prefill begins where what it is given ends. With `out`, each layer's rows are written and announced as soon as they
are there: those that were given at once, the others as the layer has computed them. Without, the finished sequence is
kept for the Decode of the same attempt.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from prfaas.engine.messages import PoolRead, Prefill, Prefilled, RowsReady
from prfaas.kvcache.layout import Extent, Part
from prfaas.node.engine_sequence import Lingering, Sequence
from prfaas.node.engine_workbench import Workbench, tokens_between


@dataclass(slots=True)
class Prefilling:
    """One Prefill. `ends` are the chunk ends still to come; `parts`, filled at the start of the work, is what comes to
    exist in `out` with each (chunk end, layer)."""

    command: Prefill
    sequence: Sequence
    ends: Iterator[int]
    started_s: float | None = None
    parts: dict[tuple[int, int], list[Part]] = field(default_factory=dict)

    @property
    def remaining_tokens(self) -> int:
        return self.command.stop - max(self.command.resume_tokens, self.sequence.cache.tokens)


class PrefillQueue:
    """`kept` holds finished sequences that wait for their Decode."""

    def __init__(self, bench: Workbench, lingering: Lingering) -> None:
        self._bench, self._lingering = bench, lingering
        self._queue: dict[str, Prefilling] = {}
        self.kept: dict[str, Sequence] = {}
        self.forwarded_tokens = 0
        self.busy_s = 0.0

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, attempt: str) -> bool:
        return attempt in self._queue

    @property
    def remaining_tokens(self) -> int:
        return sum(each.remaining_tokens for each in self._queue.values())

    @property
    def attempts(self) -> list[str]:
        return [*self._queue, *self.kept]

    def add(self, command: Prefill) -> None:
        sequence = Sequence(self._bench.engine.new_cache())
        self._queue[command.attempt] = Prefilling(command, sequence, iter(command.ends))

    def find(self, attempt: str) -> Sequence | None:
        queued = self._queue.get(attempt)
        return queued.sequence if queued is not None else self.kept.get(attempt)

    def forget(self, attempt: str) -> None:
        self._queue.pop(attempt, None)
        self.kept.pop(attempt, None)

    def chunk(self) -> None:
        """One chunk of the oldest prefill."""
        if not self._queue:
            return
        attempt, oldest = next(iter(self._queue.items()))
        if not self._bench.succeeds(partial(self._work, oldest), attempt):
            self.forget(attempt)
        elif not oldest.remaining_tokens:
            self._finish(oldest)

    def check(self) -> None:
        for place, each in enumerate(self._queue.values()):
            tokens = each.sequence.cache.tokens
            assert each.started_s is None or place == 0, "only the oldest is under way"
            assert tokens == 0 if each.started_s is None else tokens > 0
            assert tokens < max(each.command.stop, 1), "a finished prefill is still queued"
            assert set(each.sequence.snapshots) == {at for at in each.command.checkpoints if at <= tokens}

    def _work(self, each: Prefilling) -> None:
        started_s = self._bench.now()
        if each.started_s is None:
            each.started_s = started_s
            each.parts = self._parts(each.command)
            self._resume(each)
        if each.remaining_tokens:
            self._compute(each)
        self.busy_s += self._bench.now() - started_s

    def _resume(self, each: Prefilling) -> None:
        """What is there already, and of that what is to be in `out`."""
        command, resume_tokens = each.command, each.command.resume_tokens
        if not command.held:
            return
        each.sequence.cache = self._bench.restore(command.held, resume_tokens)
        self._bench.emit(PoolRead(command.attempt))
        if resume_tokens in command.checkpoints:
            each.sequence.keep_snapshot(self._bench.engine)
        for layer in range(len(self._bench.layout.layers)):
            self._write_out(each, resume_tokens, layer)

    def _compute(self, each: Prefilling) -> None:
        bench, command, cache = self._bench, each.command, each.sequence.cache
        start, end = cache.tokens, next(each.ends)
        hook = partial(self._write_out, each, end) if each.parts else None
        bench.engine.prefill(cache, tokens_between(command.prompt, start, end), hook)
        if end in command.checkpoints:
            each.sequence.keep_snapshot(bench.engine)
        self.forwarded_tokens += end - start

    def _parts(self, command: Prefill) -> dict[tuple[int, int], list[Part]]:
        out, groups = command.out, dict[tuple[int, int], list[Part]]()
        if out is None or not out.stop:
            return groups
        ends = tuple(end for end in (command.resume_tokens, *command.ends) if end > out.first)
        states = self._bench.states_at(out.stop) if out.state else ()
        for part in self._bench.layout.extent_parts(Extent(out.first, out.stop, states), ends, (out,)):
            groups.setdefault((part.stop, part.layer), []).append(part)
        return groups

    def _write_out(self, each: Prefilling, end: int, layer: int) -> None:
        """Write what this layer has up to this end, then announce it in one message."""
        parts = each.parts.get((end, layer), ())
        for part in parts:
            self._bench.engine.export(each.sequence.cache, part, self._bench.memory(part))
        if parts:
            self._bench.emit(RowsReady(each.command.attempt, layer, end))

    def _finish(self, each: Prefilling) -> None:
        """From the start of the first chunk to the end of the last it was under way, decode steps between included."""
        command, started_s = each.command, each.started_s
        assert started_s is not None
        self.forget(command.attempt)
        if command.out is None:
            self.kept[command.attempt] = each.sequence
        elif command.linger:
            self._lingering.add(command.attempt, each.sequence)
        self._bench.emit(
            Prefilled(
                attempt=command.attempt,
                tokens=command.stop - command.resume_tokens,
                started_s=started_s,
                ended_s=self._bench.now(),
                snapshots=each.sequence.boundaries,
            )
        )
