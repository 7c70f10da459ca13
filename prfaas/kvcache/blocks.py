"""Who owns which bytes of a node's KV pool: contiguous runs of fixed-size blocks.

A sequence lies in one run, because today every reader wants it whole: the engine views a tensor of all tokens as one
array, and a part goes from socket to its place in one call. The price is fragmentation, which whole blocks and best fit
keep small. Free runs are disjoint, sorted and never touch each other. Spans that ever shared a byte have different
generations.
"""

import bisect
import itertools
from dataclasses import dataclass

BLOCK_BYTES = 64 * 1024
#: Generations travel as 32 bits and wrap; 0 is never given out.
GENERATIONS = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of the pool that one owner holds. A span of no bytes exists too: its owner has asked for nothing and got
    it."""

    offset: int
    nbytes: int
    generation: int


@dataclass(frozen=True, slots=True, order=True)
class _Run:
    """Blocks `start:stop`."""

    start: int
    stop: int

    @property
    def blocks(self) -> int:
        return self.stop - self.start


class BlockPool:
    """Gives out spans and takes them back. An owner has at most one."""

    def __init__(self, total_bytes: int, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._blocks = total_bytes // block_bytes
        self._free = [_Run(0, self._blocks)] if self._blocks else []
        self._spans: dict[str, Span] = {}
        self._generation = 1

    @property
    def total_bytes(self) -> int:
        return self._blocks * self._block_bytes

    @property
    def free_bytes(self) -> int:
        return sum(run.blocks for run in self._free) * self._block_bytes

    @property
    def spans(self) -> int:
        return len(self._spans)

    def span(self, owner: str) -> Span | None:
        return self._spans.get(owner)

    def reserve(self, owner: str, nbytes: int) -> Span | None:
        """The whole of `nbytes`, or None: nobody ever waits holding half of what it needs."""
        assert owner not in self._spans, f"{owner} already holds a span"
        blocks = -(-nbytes // self._block_bytes)
        start = self._take(blocks) if blocks else 0
        if start is None:
            return None
        span = Span(start * self._block_bytes, nbytes, self._generation)
        self._spans[owner] = span
        return span

    def free(self, owner: str) -> None:
        """Idempotent. From here on the generation of the freed span is stale."""
        span = self._spans.pop(owner, None)
        if span is None:
            return
        self._generation = self._generation % GENERATIONS + 1
        run = self._run(span)
        if run.blocks:
            self._give_back(run)

    def check(self) -> None:
        runs = sorted([*self._free, *(run for span in self._spans.values() if (run := self._run(span)).blocks)])
        assert sum(run.blocks for run in runs) == self._blocks, "free + reserved != total"
        assert all(a.stop == b.start for a, b in itertools.pairwise(runs)), (
            f"a block is owned twice or by nobody: {runs}"
        )
        assert all(a.stop < b.start for a, b in itertools.pairwise(self._free)), f"not coalesced: {self._free}"

    def _take(self, blocks: int) -> int | None:
        """Best fit, the lowest of equals: long runs stay whole for the long sequences that need them."""
        fitting = [index for index, run in enumerate(self._free) if run.blocks >= blocks]
        if not fitting:
            return None
        index = min(fitting, key=lambda i: self._free[i].blocks)
        run = self._free.pop(index)
        if run.blocks > blocks:
            self._free.insert(index, _Run(run.start + blocks, run.stop))
        return run.start

    def _give_back(self, run: _Run) -> None:
        index = bisect.bisect(self._free, run)
        if index < len(self._free) and self._free[index].start == run.stop:
            run = _Run(run.start, self._free.pop(index).stop)
        if index and self._free[index - 1].stop == run.start:
            index -= 1
            run = _Run(self._free.pop(index).start, run.stop)
        self._free.insert(index, run)

    def _run(self, span: Span) -> _Run:
        start = span.offset // self._block_bytes
        return _Run(start, start + -(-span.nbytes // self._block_bytes))
