"""Opposite `prfaas/rpc/cache_updates.py`."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.cluster import Incarnation, Namespace
from prfaas.errors import InvalidRequest
from prfaas.kvcache.feed import Changes, Heartbeat, SnapshotBegin, SnapshotChunk, SnapshotEnd, Update
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS, KEY_BYTES, unit_keys
from prfaas.kvcache.placement import PROMPT_UNITS
from prfaas.kvcache.prefix import Change, ChangeKind
from prfaas.rpc.cache_updates import MAX_UPDATE_BYTES, pack_update, unpack_update
from prfaas.rpc.v1 import cache_pb2 as pb


def keys(*tokens: int) -> bytes:
    """Of a prompt with so many units, each of one token over and over."""
    return unit_keys(b"".join(token.to_bytes(4, "little") * HASH_UNIT_TOKENS for token in tokens), "ns", b"")


def update(*changes: Change) -> Update:
    return Update(Incarnation(2**63 + 1), 2**40, Changes(changes), 3)


def across(told: Update) -> Update:
    return unpack_update(pb.Update.FromString(pack_update(told).SerializeToString()))


PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(lambda word: keys(*word))
CHANGES = st.lists(st.builds(Change, st.sampled_from(ChangeKind), PATHS), max_size=20).map(tuple)


@settings(deadline=None)
@given(CHANGES, st.integers(0, 2**32 - 1))
def test_every_update_arrives_as_it_was_told(changes: tuple[Change, ...], number: int):
    """Whatever the paths have in common."""
    for kind in (
        SnapshotBegin(Namespace("ns")),
        SnapshotChunk(number, changes),
        SnapshotEnd(number),
        Changes(changes),
        Heartbeat(),
    ):
        told = Update(Incarnation(2**63 + 1), 2**40, kind, 3)
        assert across(told) == told


def test_a_block_costs_its_key_once():
    """The states of a prompt, and a path that grows unit by unit, repeat no keys."""
    path = keys(*range(128))
    grown = [Change(ChangeKind.KV_ADDED, path[: end * KEY_BYTES]) for end in range(1, 129)]
    states = [Change(ChangeKind.STATE_ADDED, path)] * 50
    size = len(pack_update(update(*grown, *states)).SerializeToString())
    assert size < len(path) + 16 * (len(grown) + len(states))
    assert across(update(*grown, *states)) == update(*grown, *states)


def test_the_longest_prompt_fits_an_update():
    """It is told whole, whatever else is."""
    change = Change(ChangeKind.KV_ADDED, bytes(PROMPT_UNITS * KEY_BYTES))
    assert across(update(change)) == update(change)


def test_field_I8_an_update_that_is_too_long_is_not_accepted():
    """A message is bounded on both sides; what is more comes in several."""
    others = [keys(*range(first, first + 128)) for first in range(200)]
    message = pb.Update(incarnation=1, seq=1)
    message.changes.changes.extend(pb.IndexChange(kind=pb.INDEX_CHANGE_KIND_KV_ADDED, keys=each) for each in others)
    assert message.ByteSize() > MAX_UPDATE_BYTES
    with pytest.raises(InvalidRequest, match="at most"):
        unpack_update(message)
    with pytest.raises(AssertionError):
        pack_update(update(*(Change(ChangeKind.KV_ADDED, each) for each in others)))


@pytest.mark.parametrize(
    "changes",
    [
        [pb.IndexChange(kind=pb.INDEX_CHANGE_KIND_KV_ADDED, keys=b"")],
        [pb.IndexChange(kind=pb.INDEX_CHANGE_KIND_KV_ADDED, keys=b"x" * 15)],
        [pb.IndexChange(kind=pb.INDEX_CHANGE_KIND_KV_ADDED, keys=b"x" * KEY_BYTES * (PROMPT_UNITS + 1))],
        [pb.IndexChange(kind=pb.INDEX_CHANGE_KIND_KV_ADDED, shared_units=1, keys=b"x" * 16)],
        [pb.IndexChange(kind=99, keys=b"x" * 16)],
        [pb.IndexChange(keys=b"x" * 16)],
    ],
)
def test_field_I3_keys_of_another_size_are_refused(changes: list[pb.IndexChange]):
    """Blocks are of one size: what is not made of them, or of too many, is no change."""
    with pytest.raises(InvalidRequest):
        unpack_update(pb.Update(incarnation=1, seq=1, changes=pb.IndexChanges(changes=changes)))


def test_an_update_of_an_unknown_kind_is_refused():
    """It may have changed something, so that going on without it would be wrong."""
    with pytest.raises(InvalidRequest):
        unpack_update(pb.Update(incarnation=1, seq=1))
