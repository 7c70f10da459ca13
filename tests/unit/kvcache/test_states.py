"""Which states a prefill keeps, where its chunks end, and how far a cached prefix can be resumed."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cluster import NodeId
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS, unit_keys
from prfaas.kvcache.prefix import PrefixIndex
from prfaas.kvcache.states import Checkpoint, checkpoints, chunk_ends, usable_prefix
from prfaas.request import TOKEN_BYTES, Match

NODE = NodeId("p0")


@pytest.mark.parametrize(
    ("hit", "usable"),
    [(0, 0), (63, 0), (64, 64), (65, 64), (8191, 64), (8192, 8192), (8193, 8192), (9000, 9000), (1_000_000, 9000)],
)
def test_field_B8_a_hit_is_usable_down_to_its_last_checkpoint(hit, usable):
    """Never past the last state, and never from a state that lies behind the hit."""
    assert usable_prefix(hit, (64, 8192, 9000)) == usable


def test_field_B8_without_a_checkpoint_nothing_is_usable():
    assert usable_prefix(5000, ()) == 0


def test_field_H6_where_states_are_far_apart_short_prefixes_never_count():
    """A model whose kernels stop at multiples of 2048 keeps no other state, and the match says so: what is compared
    with the threshold is what can be used, not what lies in the cache."""
    kept = checkpoints(5000, Match(), every_tokens=8192, spacing_tokens=2048)
    assert [checkpoint.tokens for checkpoint in kept] == [4096]
    assert checkpoints(2047, Match(), every_tokens=8192, spacing_tokens=2048) == ()
    index, keys = PrefixIndex(), unit_keys(bytes(5000 * TOKEN_BYTES), "ns", b"")
    index.insert(keys, NODE)
    for checkpoint in kept:
        index.add_state(keys[: checkpoint.tokens // HASH_UNIT_TOKENS * 16], NODE)
    assert index.match(keys, 4095) == {NODE: Match(joint=0, kv=4095)}
    assert index.match(keys, 4999) == {NODE: Match(joint=4096, kv=78 * 64)}


@pytest.mark.parametrize(("prompt", "last"), [(64, 0), (65, 64), (127, 64), (128, 64), (129, 128)])
def test_the_last_state_stands_at_the_last_boundary_before_the_last_token(prompt, last):
    """R6: prefill computes N-1 tokens, so at a length of k units it passes k-1 boundaries."""
    kept = checkpoints(prompt - 1, Match())
    assert kept == ((Checkpoint(last, proven=True),) if last else ())


def test_a_prefill_keeps_a_state_where_it_leaves_an_older_prompt():
    """R6: KV was there up to 640, a state only at 128; the next prompt that leaves there finds one."""
    assert checkpoints(1000, Match(joint=128, kv=640)) == (Checkpoint(640, proven=True), Checkpoint(960, proven=True))


def test_periodic_states_have_yet_to_prove_themselves():
    """R6: unless one is the last boundary or the junction as well."""
    kept = checkpoints(4 * 8192, Match(kv=2 * 8192))
    assert [(checkpoint.tokens // 8192, checkpoint.proven) for checkpoint in kept] == [
        (1, False),
        (2, True),
        (3, False),
        (4, True),
    ]


def test_what_stands_already_is_not_kept_again():
    """A prefill passes only boundaries after the one it resumed at."""
    assert checkpoints(20_000, Match(joint=19_968, kv=19_999)) == ()


lengths = st.integers(0, 60_000)


@given(tokens=lengths, cached=st.tuples(lengths, lengths), chunk=st.integers(1, 70_000))
def test_chunks_end_on_every_checkpoint(tokens, cached, chunk):
    """R8: they rise from where the prefill resumes to its end, none is too long, and no state lies within one."""
    tokens += 1
    joint, kv = sorted(cached)
    match = Match(min(joint, tokens) // 64 * 64, kv)
    kept = checkpoints(tokens, match)
    ends = chunk_ends(tokens, match, kept, chunk)
    assert {checkpoint.tokens for checkpoint in kept} <= set(ends)
    if match.joint < tokens:
        assert ends[-1] == tokens
    assert all(0 < stop - start <= chunk for start, stop in itertools.pairwise((match.joint, *ends)))
