"""The cache benchmark's check names exactly the figures that are not what they must be, and what it compares with is
what it says it is."""

from dataclasses import replace
from typing import Any

import pytest

from bench.cache import index
from bench.cache.dense import DenseLru
from bench.cache.index import IndexCost
from bench.cache.replay import DENSE, OURS, Replayed
from bench.cache.results import Results

COST = IndexCost(
    blocks=10_000_000,
    lookup_ms=0.05,
    lookup_p99_ms=0.2,
    lookup_branchy_ms=0.5,
    bytes_per_block=35,
    fill_blocks_per_s=900_000,
    apply_blocks_per_s=1_000_000,
    dict_lookup_ms=0.6,
    dict_bytes_per_block=91,
    dict_fill_blocks_per_s=1_500_000,
)


def row(pool_gib: int | None, policy: str, joint_hit: float) -> Replayed:
    rest: dict[str, Any] = {
        "kv_hit": None,
        "states": 1,
        "evictions": 1,
        "lookup_us": None,
        "admit_us": None,
        "admit_worst_ms": None,
    }
    return Replayed(trace="chat", pool_gib=pool_gib, policy=policy, joint_hit=joint_hit, **rest)


ROWS = {(pool, OURS): hit for pool, hit in ((None, 36.6), (64, 22.0), (256, 34.5))}
ROWS |= {(pool, DENSE): hit for pool, hit in ((None, 37.3), (64, 4.9), (256, 15.1))}


def results(changed: dict[tuple[int | None, str], float] | None = None, **cost: float) -> Results:
    rows = [row(*key, hit) for key, hit in (ROWS | (changed or {})).items()]
    return Results(index=replace(COST, **cost), replay=rows)


def test_figures_as_they_must_be_are_not_missed() -> None:
    assert list(results().misses()) == []
    assert list(Results().misses()) == []


@pytest.mark.parametrize(
    ("measured", "named"),
    [
        (results(lookup_ms=1.1), "a look-up takes"),
        (results(lookup_branchy_ms=1.1), "part often"),
        (results(bytes_per_block=151), "bytes"),
        (results(apply_blocks_per_s=199_000), "blocks a second"),
        (results({(None, OURS): 36.0}), "without a bound"),
        (results({(None, OURS): 37.2}), "without a bound"),
        (results({(64, OURS): 21.4}), "64 GiB"),
        (results({(256, OURS): 34.2}), "256 GiB"),
        (results({(64, DENSE): 22.5}), "dense"),
    ],
)
def test_each_miss_is_named(measured: Results, named: str) -> None:
    """One figure is off: one line, which says which."""
    (miss,) = measured.misses()
    assert named in miss


def test_json_has_a_row_for_each_pool_and_policy() -> None:
    found = results().as_json()
    assert [(each["pool_gib"], each["policy"]) for each in found["replay"]] == list(ROWS)
    assert found["index"]["lookup_speedup"] == pytest.approx(12)


def test_dense_states_crowd_out_what_would_be_found() -> None:
    """A block of one byte with a state of nine at each end: room for two blocks, and the first to go is the end of the
    prompt that was used longest ago."""
    cache = DenseLru(20, state_bytes=9, block_bytes=1)
    assert cache.serve([1, 2], usable=2) == 0
    assert cache.serve([1, 2], usable=2) == 2
    assert cache.serve([1, 2], usable=1) == 1
    assert cache.serve([3], usable=1) == 0
    assert cache.serve([1, 2], usable=2) == 1
    assert cache.states <= 2


def test_an_index_that_has_given_up_and_learned_anew_is_whole() -> None:
    """All that is measured happens on a small index too, and is not nothing."""
    cost = index.measure(400_000)
    assert cost.blocks >= 400_000
    assert min(cost.lookup_ms, cost.lookup_branchy_ms, cost.apply_blocks_per_s, cost.dict_lookup_ms) > 0
