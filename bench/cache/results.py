"""What a run has measured, as a table and as JSON, and what the figures must be. A part that was not run is None."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.cache.index import IndexCost
from bench.cache.replay import DENSE, OURS, Replayed

#: By pool in GiB (None is without bound): the least joint hit in per cent of our policy. Without a bound it is known
#: what the states that are kept can find, and it must be that.
_LEAST_HIT: Mapping[int | None, float] = {64: 21.5, 256: 34.3}
_UNBOUNDED_HIT, _WITHIN = 36.6, 0.5
_LOOKUP_MS, _BYTES_PER_BLOCK, _APPLY_BLOCKS_PER_S = 1.0, 150.0, 200_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    index: IndexCost | None = None
    replay: Sequence[Replayed] | None = None

    def as_json(self) -> dict[str, Any]:
        found = {part: value for part, value in asdict(self).items() if value is not None}
        if self.index is not None:
            found["index"] |= {
                "lookup_speedup": self.index.lookup_speedup,
                "memory_ratio": self.index.memory_ratio,
                "fill_speedup": self.index.fill_speedup,
            }
        return found

    def table(self) -> Iterator[str]:
        if self.index is not None:
            yield from _index(self.index)
        if self.replay is not None:
            yield from _replay(self.replay)

    def misses(self) -> Iterator[str]:
        """What is not as it must be, in words. What was not measured is not missed."""
        if self.index is not None:
            yield from _index_misses(self.index)
        if self.replay is not None:
            yield from _replay_misses(self.replay)


def _index(cost: IndexCost) -> Iterator[str]:
    yield f"{f'index of {cost.blocks:,} blocks':44}{'ours':>12}{'dict':>12}"
    yield f"{'look-up of 128K tokens, left every 8K, ms':44}{cost.lookup_ms:12.3f}{cost.dict_lookup_ms:12.3f}"
    yield f"{'  99 of 100':44}{cost.lookup_p99_ms:12.3f}"
    yield f"{'  left every 512 tokens':44}{cost.lookup_branchy_ms:12.3f}"
    yield f"{'bytes for a block':44}{cost.bytes_per_block:12.1f}{cost.dict_bytes_per_block:12.1f}"
    yield f"{'blocks a second, filling':44}{cost.fill_blocks_per_s:12,.0f}{cost.dict_fill_blocks_per_s:12,.0f}"
    yield f"{'  that go and come back':44}{cost.apply_blocks_per_s:12,.0f}"
    yield ""


def _replay(rows: Sequence[Replayed]) -> Iterator[str]:
    yield (
        f"{'pool GiB':>9}{'policy':>18}{'joint hit %':>13}{'KV hit %':>10}{'states':>9}{'evictions':>11}"
        f"{'look-up us':>12}{'admit us':>10}{'worst ms':>10}"
    )
    for row in rows:
        pool = "no bound" if row.pool_gib is None else f"{row.pool_gib}"
        figures = f"{row.joint_hit:13.2f}{_or_blank(row.kv_hit, 10)}{row.states:9,}{row.evictions:11,}"
        times = f"{_or_blank(row.lookup_us, 12)}{_or_blank(row.admit_us, 10)}{_or_blank(row.admit_worst_ms, 10)}"
        yield f"{pool:>9}{row.policy:>18}{figures}{times}"
    yield ""


def _or_blank(figure: float | None, width: int) -> str:
    return " " * width if figure is None else f"{figure:{width}.2f}"


def _index_misses(cost: IndexCost) -> Iterator[str]:
    for what, found in (
        ("a look-up", cost.lookup_ms),
        ("a look-up where prompts part often", cost.lookup_branchy_ms),
    ):
        if found > _LOOKUP_MS:
            yield f"{what} takes {found:.2f} ms, more than {_LOOKUP_MS}"
    if cost.bytes_per_block > _BYTES_PER_BLOCK:
        yield f"a block takes {cost.bytes_per_block:.0f} bytes, more than {_BYTES_PER_BLOCK:.0f}"
    if cost.apply_blocks_per_s < _APPLY_BLOCKS_PER_S:
        yield f"{cost.apply_blocks_per_s:,.0f} blocks a second are followed, not {_APPLY_BLOCKS_PER_S:,.0f}"


def _replay_misses(rows: Sequence[Replayed]) -> Iterator[str]:
    dense = {row.pool_gib: row.joint_hit for row in rows if row.policy == DENSE}
    for row in rows:
        if row.policy != OURS:
            continue
        if row.pool_gib is None:
            if abs(row.joint_hit - _UNBOUNDED_HIT) > _WITHIN:
                yield f"without a bound {row.joint_hit:.2f} % hit, not {_UNBOUNDED_HIT} %"
            continue
        if row.joint_hit < _LEAST_HIT.get(row.pool_gib, 0.0):
            yield f"{row.pool_gib} GiB: {row.joint_hit:.2f} % hit, not {_LEAST_HIT[row.pool_gib]} %"
        if row.joint_hit <= dense.get(row.pool_gib, -1.0):
            yield f"{row.pool_gib} GiB: {row.joint_hit:.2f} % hit, no more than with dense states"
