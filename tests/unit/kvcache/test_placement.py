"""Every process puts a prompt on the same shard, and moves it in pieces of one size."""

import hashlib
from collections import Counter

import pytest

from prfaas.cluster import NodeId
from prfaas.kvcache.hashing import KEY_BYTES
from prfaas.kvcache.placement import TRANSFER_UNITS, shard_of, transfers, unit_ends

PROMPTS = [hashlib.sha256(str(number).encode()).digest()[:KEY_BYTES] * 2 for number in range(4000)]


def shards(count: int) -> list[NodeId]:
    return [NodeId(f"eu-cache-{number}") for number in range(count)]


def test_every_shard_has_its_share():
    counts = Counter(shard_of(prompt, shards(5)) for prompt in PROMPTS)
    assert all(600 < counts[shard] < 1000 for shard in shards(5))


def test_the_choice_does_not_depend_on_the_order_in_which_shards_are_known():
    assert all(shard_of(prompt, shards(5)) == shard_of(prompt, shards(5)[::-1]) for prompt in PROMPTS[:100])


def test_the_choice_is_by_the_first_key():
    """All that begin alike are on one shard, and so is the prompt when it has grown."""
    first = PROMPTS[0]
    assert shard_of(first, shards(7)) == shard_of(first[:KEY_BYTES] + b"x" * 160, shards(7))


@pytest.mark.parametrize("count", [2, 5, 12])
def test_only_what_a_new_shard_wins_moves(count: int):
    """About one of n prompts, all of them to the new one; and back when it goes."""
    before, after = shards(count), shards(count + 1)
    moved = [prompt for prompt in PROMPTS if shard_of(prompt, before) != shard_of(prompt, after)]
    assert {shard_of(prompt, after) for prompt in moved} == {after[-1]}
    share = len(PROMPTS) / (count + 1)
    assert 0.8 * share < len(moved) < 1.2 * share


def test_the_choice_is_the_same_everywhere():
    """Processes of other versions and machines must find what these have put."""
    assert [shard_of(prompt, shards(4)) for prompt in PROMPTS[:6]] == [
        NodeId(f"eu-cache-{number}") for number in [2, 2, 3, 1, 3, 0]
    ]


def test_what_moves_is_cut_every_8192_tokens():
    """Wherever it begins."""
    assert list(transfers(0, 19_200)) == [(0, 8192), (8192, 16_384), (16_384, 19_200)]
    assert list(transfers(8128, 16_384)) == [(8128, 8192), (8192, 16_384)]
    assert list(transfers(64, 64)) == []
    assert TRANSFER_UNITS == 128


def test_a_transfer_is_divided_at_every_unit():
    assert unit_ends(0, 192) == (64, 128, 192)
    assert unit_ends(128, 192) == (192,)
    assert unit_ends(64, 64) == ()
