"""Prefix keys are equal for equal prefixes of one model and one tenant, and for nothing else."""

import struct

from hypothesis import given
from hypothesis import strategies as st

from prfaas.kvcache.hashing import HASH_UNIT_TOKENS, KEY_BYTES, tenant_salt, unit_keys
from prfaas.request import TOKEN_BYTES

UNIT_BYTES = HASH_UNIT_TOKENS * TOKEN_BYTES
tails = st.binary(max_size=UNIT_BYTES - 1)
units = st.lists(st.binary(min_size=UNIT_BYTES, max_size=UNIT_BYTES), max_size=5)
salts = st.binary(max_size=40)


def test_keys_are_the_same_on_every_machine_and_in_every_version():
    """Changing these values empties every cache of every cluster on upgrade."""
    prompt = struct.pack("<130I", *range(130))
    assert unit_keys(prompt, "ns", b"salt").hex() == "506c9a71caac95d5ff7daf62ea548815f8fc9031127608ff6d8815a410a0d5a1"


def test_the_tenant_salt_is_a_keyed_hash():
    """HMAC-sha256 under the cluster secret, as any other tool computes it."""
    assert tenant_salt(b"secret", "acme").hex() == "700f8a71077438948e68c52f90421d3f3361b533d746d90668bce4dc8a387812"


@given(shared=units, left=units, right=units, tail=tails)
def test_prompts_share_keys_exactly_as_far_as_they_share_units(shared, left, right, tail):
    """R11: a key stands for the whole prefix, so that keys part where prompts part and never meet again."""
    one = unit_keys(b"".join(shared + left), "ns", b"")
    other = unit_keys(b"".join(shared + right) + tail, "ns", b"")
    common = len(shared)
    while common < min(len(shared + left), len(shared + right)) and (shared + left)[common] == (shared + right)[common]:
        common += 1
    assert one[: common * KEY_BYTES] == other[: common * KEY_BYTES]
    rest = zip(_split(one)[common:], _split(other)[common:], strict=False)
    assert all(mine != theirs for mine, theirs in rest)


@given(whole=units, tail=tails)
def test_only_complete_units_have_keys(whole, tail):
    """R13: the tail of a prompt is transfer-only."""
    prompt = b"".join(whole)
    keys = unit_keys(prompt + tail, "ns", b"salt")
    assert keys == unit_keys(prompt, "ns", b"salt")
    assert len(keys) == len(whole) * KEY_BYTES


@given(prompt=units.filter(bool), salt=salts, other_salt=salts)
def test_tenants_share_no_key(prompt, salt, other_salt):
    """The salt is part of every key: no unit of the same prompt has the same key under another salt."""
    mine, theirs = (_split(unit_keys(b"".join(prompt), "ns", s)) for s in (salt, other_salt))
    assert set(mine).isdisjoint(theirs) == (salt != other_salt)


def test_models_share_no_key():
    """KV of one namespace is meaningless in another."""
    prompt = bytes(3 * UNIT_BYTES)
    assert set(_split(unit_keys(prompt, "a", b""))).isdisjoint(_split(unit_keys(prompt, "b", b"")))


def test_namespace_and_salt_do_not_run_together():
    """What one field ends with cannot pass for the start of the other."""
    prompt = bytes(UNIT_BYTES)
    assert unit_keys(prompt, "ab", b"c") != unit_keys(prompt, "a", b"bc")


def test_equal_units_have_different_keys_at_different_places():
    """A unit that repeats is another prefix each time."""
    keys = _split(unit_keys(bytes(4 * UNIT_BYTES), "ns", b""))
    assert len(set(keys)) == 4


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
