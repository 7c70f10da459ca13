"""A prompt is cut into segments, and every process puts a segment on the same shard."""

import hashlib
from collections import Counter

import pytest

from prfaas.cluster import NodeId
from prfaas.kvcache.hashing import KEY_BYTES
from prfaas.kvcache.segments import SEGMENT_UNITS, segments, shard_of, unit_ends

SEGMENTS = [hashlib.sha256(str(number).encode()).digest()[:KEY_BYTES] * 2 for number in range(4000)]


def shards(count: int) -> list[NodeId]:
    return [NodeId(f"eu-cache-{number}") for number in range(count)]


def test_a_prompt_is_cut_every_8192_tokens():
    keys = b"".join(number.to_bytes(KEY_BYTES, "big") for number in range(300))
    cut = list(segments(keys))
    assert [(start, len(part) // KEY_BYTES) for start, part in cut] == [(0, 128), (8192, 128), (16384, 44)]
    assert b"".join(part for _, part in cut) == keys
    assert list(segments(b"")) == []
    assert SEGMENT_UNITS == 128


def test_every_shard_has_its_share():
    counts = Counter(shard_of(segment, shards(5)) for segment in SEGMENTS)
    assert all(600 < counts[shard] < 1000 for shard in shards(5))


def test_the_choice_does_not_depend_on_the_order_in_which_shards_are_known():
    assert all(shard_of(segment, shards(5)) == shard_of(segment, shards(5)[::-1]) for segment in SEGMENTS[:100])


def test_the_choice_is_by_the_first_key():
    """Two prompts that part later in a segment have it on the same shard."""
    first = SEGMENTS[0]
    assert shard_of(first, shards(7)) == shard_of(first[:KEY_BYTES] + b"x" * 160, shards(7))


@pytest.mark.parametrize("count", [2, 5, 12])
def test_only_what_a_new_shard_wins_moves(count: int):
    """About one of n segments, all of them to the new one; and back when it goes."""
    before, after = shards(count), shards(count + 1)
    moved = [segment for segment in SEGMENTS if shard_of(segment, before) != shard_of(segment, after)]
    assert {shard_of(segment, after) for segment in moved} == {after[-1]}
    share = len(SEGMENTS) / (count + 1)
    assert 0.8 * share < len(moved) < 1.2 * share


def test_the_choice_is_the_same_everywhere():
    """Processes of other versions and machines must find what these have put."""
    assert [shard_of(segment, shards(4)) for segment in SEGMENTS[:6]] == [
        NodeId(f"eu-cache-{number}") for number in [2, 2, 3, 1, 3, 0]
    ]


def test_a_transfer_is_divided_at_every_unit():
    assert unit_ends(0, 192) == (64, 128, 192)
    assert unit_ends(128, 192) == (192,)
    assert unit_ends(64, 64) == ()
