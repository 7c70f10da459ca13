"""Prefills of an engine process: first come, first served, one chunk at a time, only the oldest under way.

With a span, each part is written and announced as soon as its layer has computed it; without one, the finished sequence
is kept for the Decode of the same attempt.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from prfaas.engine.messages import PartsReady, PoolRead, Prefill, Prefilled
from prfaas.engine.port import Cache
from prfaas.kvcache.layout import Part, chunk_ends
from prfaas.node.engine_workbench import Workbench, tokens_between


@dataclass(slots=True)
class Prefilling:
    """One Prefill. `ends` are the chunk ends still to come; `parts`, filled at the start of the work, is what comes to
    exist with each (chunk end, layer)."""

    command: Prefill
    arrived_s: float
    cache: Cache
    ends: Iterator[int]
    started_s: float | None = None
    parts: dict[tuple[int, int], list[Part]] = field(default_factory=dict)

    @property
    def remaining_tokens(self) -> int:
        return self.command.stop - max(self.command.held, self.cache.tokens)


class PrefillQueue:
    """`kept` holds finished sequences that wait for their Decode."""

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench
        self._queue: dict[str, Prefilling] = {}
        self.kept: dict[str, Cache] = {}
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

    def add(self, command: Prefill, arrived_s: float) -> None:
        chunk_tokens = self._bench.engine.info.chunk_tokens
        ends = (end for end in chunk_ends(command.stop, chunk_tokens) if end > command.held)
        self._queue[command.attempt] = Prefilling(command, arrived_s, self._bench.engine.new_cache(), ends)

    def forget(self, attempt: str) -> None:
        self._queue.pop(attempt, None)
        self.kept.pop(attempt, None)

    def chunk(self) -> None:
        """One chunk of the oldest prefill."""
        if not self._queue:
            return
        attempt, oldest = next(iter(self._queue.items()))
        if not self._bench.succeeds(partial(self._compute, oldest), attempt):
            self.forget(attempt)
        elif not oldest.remaining_tokens:
            self._finish(oldest)

    def check(self) -> None:
        for place, each in enumerate(self._queue.values()):
            assert each.started_s is None or place == 0, "only the oldest is under way"
            assert each.cache.tokens == 0 if each.started_s is None else each.cache.tokens > 0
            assert each.cache.tokens < max(each.command.stop, 1), "a finished prefill is still queued"

    def _compute(self, each: Prefilling) -> None:
        bench, command, started_s = self._bench, each.command, self._bench.now()
        if each.started_s is None:
            each.started_s = started_s
            each.parts = self._parts(command)
            self._take_up(each)
        if not each.remaining_tokens:
            return
        start, end = each.cache.tokens, next(each.ends)
        hook = None if command.span is None else partial(self._export, each, command.span, end)
        bench.engine.prefill(each.cache, tokens_between(command.prompt, start, end), hook)
        self.forwarded_tokens += end - start
        self.busy_s += bench.now() - started_s

    def _take_up(self, each: Prefilling) -> None:
        """What is there already."""
        command, bench = each.command, self._bench
        if command.held_span is not None and command.held:
            span, parts = command.held_span, bench.engine.info.layout.prefix(command.stop, command.held)
            each.cache = bench.engine.restore(command.held, ((part, bench.memory(span, part)) for part in parts))
            bench.emit(PoolRead(command.attempt))

    def _parts(self, command: Prefill) -> dict[tuple[int, int], list[Part]]:
        info, groups = self._bench.engine.info, dict[tuple[int, int], list[Part]]()
        if command.span is not None:
            for part in info.layout.parts(command.stop, chunk_ends(command.stop, info.chunk_tokens)):
                groups.setdefault((part.stop, part.layer), []).append(part)
        return groups

    def _export(self, each: Prefilling, span: int, end: int, layer: int) -> None:
        """Write what this layer of this chunk has made, then announce it in one message."""
        parts = each.parts.get((end, layer), ())
        for part in parts:
            self._bench.engine.export(each.cache, part, self._bench.memory(span, part))
        if parts:
            self._bench.emit(PartsReady(each.command.attempt, tuple(part.index for part in parts)))

    def _finish(self, each: Prefilling) -> None:
        """`compute_s` runs from the start of the first chunk to the end of the last, decode steps between included, so
        that with `queue_s` it adds up to the time since the command."""
        attempt, started_s = each.command.attempt, each.started_s
        assert started_s is not None
        self.forget(attempt)
        if each.command.span is None:
            self.kept[attempt] = each.cache
        self._bench.emit(
            Prefilled(
                attempt=attempt,
                tokens=each.command.stop - each.command.held,
                queue_s=started_s - each.arrived_s,
                compute_s=self._bench.now() - started_s,
            )
        )
