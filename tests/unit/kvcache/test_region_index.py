"""A router's copies of what shards hold are exact or say nothing, and never take more memory than they may."""

import gc
import random
import tracemalloc

import pytest

from prfaas.cluster import Incarnation, NodeId
from prfaas.kvcache.hashing import KEY_BYTES
from prfaas.kvcache.placement import PROMPT_UNITS, shard_of
from prfaas.kvcache.prefix import Change, ChangeKind
from prfaas.kvcache.radix import first_units
from prfaas.kvcache.region_index import RegionIndex
from prfaas.request import Match
from tests.unit.kvcache.prompts import keys, tokens

EU = [NodeId(f"eu-{number}") for number in range(3)]
US = [NodeId("us-0")]
ONE = Incarnation(1)
ROOMY = 1 << 30


def kv(added: bytes) -> Change:
    return Change(ChangeKind.KV_ADDED, added)


def state(added: bytes) -> Change:
    return Change(ChangeKind.STATE_ADDED, added)


def gone(removed: bytes) -> Change:
    return Change(ChangeKind.KV_REMOVED, removed)


class Told:
    """What shards tell, properly numbered."""

    def __init__(self, bound_bytes: int = ROOMY) -> None:
        self.index = RegionIndex(bound_bytes)
        self.seq: dict[NodeId, int] = {}

    def join(self, *shards: NodeId) -> None:
        for shard in shards:
            self.index.begin(shard, ONE, 0, 0.0)
            self.index.end(shard)
            self.seq[shard] = 0

    def tell(self, shard: NodeId, *changes: Change) -> bool:
        self.seq[shard] += 1
        return self.index.changes(shard, ONE, self.seq[shard], changes, 0.0)

    def hold(self, shards: list[NodeId], prompt: bytes, *states: int) -> None:
        """A prompt of so many keys in one region, with states at these units."""
        self.tell(shard_of(prompt, shards), kv(prompt), *(state(first_units(prompt, at)) for at in states))


def random_keys(rng: random.Random, count: int) -> bytes:
    return rng.randbytes(count * KEY_BYTES)


def test_a_long_prompt_is_matched_where_it_belongs():
    """KV as far as it goes, and a resume where the last state within it is; in each region for itself."""
    told, prompt = Told(), random_keys(random.Random(1), 300)
    told.join(*EU, *US)
    told.hold(EU, prompt, 100, 128, 290)
    told.hold(US, first_units(prompt, 200), 128)
    far = tokens(300)
    assert told.index.match(EU, prompt, far) == Match(joint=tokens(290), kv=tokens(300))
    assert told.index.match(EU, prompt, tokens(290) - 1) == Match(joint=tokens(128), kv=tokens(290) - 1)
    assert told.index.match(EU, prompt, tokens(128) - 1) == Match(joint=tokens(100), kv=tokens(128) - 1)
    assert told.index.match(US, prompt, far) == Match(joint=tokens(128), kv=tokens(200))
    assert told.index.match([], prompt, far) == told.index.match(EU, b"", far) == Match()


def test_what_is_lost_takes_all_behind_it():
    told, prompt = Told(), random_keys(random.Random(2), 300)
    told.join(*EU)
    told.hold(EU, prompt, 290)
    told.tell(shard_of(prompt, EU), gone(first_units(prompt, 120)))
    assert told.index.match(EU, prompt, tokens(300)) == Match(joint=0, kv=tokens(119))


def test_a_shard_that_is_elsewhere_is_not_asked():
    """Where shards have come or gone, prompts have moved: what the old one holds is not what a worker would find."""
    told, prompt = Told(), random_keys(random.Random(3), 10)
    told.join(*EU)
    told.hold(EU, prompt, 10)
    holder = shard_of(prompt, EU)
    assert told.index.match([shard for shard in EU if shard != holder], prompt, tokens(10)) == Match()


@pytest.mark.parametrize("bad", ["gap", "backward", "again", "another life"])
def test_field_I4_a_copy_that_missed_something_finds_nothing(bad: str):
    told = Told()
    told.join(*US)
    told.tell(US[0], kv(keys("ab")))
    told.tell(US[0], kv(keys("abcd")))
    seq, incarnation = {"gap": (4, ONE), "backward": (1, ONE), "again": (2, ONE), "another life": (3, Incarnation(2))}[
        bad
    ]
    assert not told.index.changes(US[0], incarnation, seq, [kv(keys("x"))], 0.0)
    assert told.index.match(US, keys("abcd"), tokens(4)) == Match()
    assert not told.index.changes(US[0], ONE, 3, [kv(keys("x"))], 0.0), "only a snapshot makes it good"
    told.join(*US)
    assert told.tell(US[0], kv(keys("abc")))
    assert told.index.match(US, keys("abcd"), tokens(4)) == Match(kv=tokens(3))
    told.index.check()


def test_field_I4_a_heartbeat_shows_what_was_missed():
    told = Told()
    told.join(*US)
    told.tell(US[0], kv(keys("ab")))
    assert told.index.heartbeat(US[0], ONE, 1, 1.0)
    assert not told.index.heartbeat(US[0], ONE, 2, 2.0)
    assert told.index.match(US, keys("ab"), tokens(2)) == Match()


def test_field_I4_a_restarted_shard_keeps_nothing_of_its_former_life():
    told = Told()
    told.join(*US)
    told.tell(US[0], kv(keys("ab")), state(keys("ab")))
    told.index.begin(US[0], Incarnation(2), 7, 1.0)
    told.index.piece(US[0], [kv(keys("a"))])
    assert told.index.match(US, keys("ab"), tokens(2)) == Match(), "a snapshot counts when it is whole"
    assert told.index.changes(US[0], Incarnation(2), 8, [state(keys("a"))], 1.0)
    told.index.end(US[0])
    assert told.index.match(US, keys("ab"), tokens(2)) == Match(joint=tokens(1), kv=tokens(1))


def test_a_silent_shard_finds_nothing():
    told = Told()
    told.join(*US)
    told.tell(US[0], kv(keys("ab")))
    assert told.index.heartbeat(US[0], ONE, 1, 5.0)
    assert told.index.match(US, keys("ab"), tokens(2), heard_since=4.0) == Match(kv=tokens(2))
    assert told.index.match(US, keys("ab"), tokens(2), heard_since=6.0) == Match()


def test_field_I3_keys_that_no_prompt_has_are_refused():
    """A pool with other units would blow the index up; it is refused, not stored."""
    told = Told()
    told.join(*US)
    for wrong in (b"", b"x" * 8, b"x" * (KEY_BYTES + 1), b"x" * (PROMPT_UNITS + 1) * KEY_BYTES):
        told.seq[US[0]] = 0
        told.join(*US)
        with pytest.raises(ValueError, match="bytes of keys"):
            told.tell(US[0], kv(wrong))
    told.index.check()


def test_field_I1_endless_new_prompts_and_lives_take_no_more_than_the_bound():
    """Pools that come, fill up and vanish, for ever: the estimate stays below the bound, and memory with it."""
    bound_bytes = 300_000
    told, rng = Told(bound_bytes), random.Random(4)
    told.join(*EU)
    tracemalloc.start()
    try:
        gc.collect()
        base_bytes, most_bytes = tracemalloc.get_traced_memory()[0], 0
        for number in range(4000):
            shard = rng.choice(EU)
            prompt = random_keys(rng, rng.randint(1, 128))
            told.tell(shard, kv(prompt), state(prompt))
            if rng.random() < 0.5:
                told.tell(shard, gone(first_units(prompt, 1)))
            if number % 500 == 499:
                told.index.forget(shard)
                told.join(shard)
                gc.collect()
                most_bytes = max(most_bytes, tracemalloc.get_traced_memory()[0] - base_bytes)
            assert told.index.nbytes <= bound_bytes
    finally:
        tracemalloc.stop()
    told.index.check()
    assert told.index.forgotten_units > 10_000
    assert most_bytes < 1.5 * bound_bytes


def test_field_I2_the_estimate_is_not_below_what_is_taken():
    """For prompts that part often and for those that never do."""
    for shared, own in ((0, 100), (5, 1), (60, 4)):
        rng = random.Random(5)
        system = random_keys(rng, shared)
        changes = [kv(system + random_keys(rng, own)) for _ in range(1500)]
        changes += [state(change.keys) for change in changes]
        told = Told()
        told.join(*US)
        gc.collect()
        tracemalloc.start()
        told.tell(US[0], *changes)
        taken_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert 0.8 * taken_bytes < told.index.nbytes < 3 * taken_bytes


def test_field_I1_what_was_matched_last_is_kept():
    """A match may be too short and is never too long: what was forgotten is not there, what is there is true."""
    told, rng = Told(300_000), random.Random(6)
    told.join(*US)
    prompts = [random_keys(rng, 50) for _ in range(400)]
    popular = prompts[:20]
    for prompt in prompts:
        told.tell(US[0], kv(prompt), state(prompt))
        for each in popular:
            told.index.match(US, each, tokens(50))
    whole = Match(joint=tokens(50), kv=tokens(50))
    found = [told.index.match(US, prompt, tokens(50)) for prompt in prompts]
    assert set(found) <= {whole, Match()} and Match() in found
    assert found[:20] == [whole] * 20
    told.index.check()


def test_a_change_to_what_was_forgotten_is_no_error():
    told, rng = Told(30_000), random.Random(7)
    told.join(*US)
    first = random_keys(rng, 20)
    told.tell(US[0], kv(first))
    for _ in range(100):
        told.tell(US[0], kv(random_keys(rng, 20)))
    assert told.index.match(US, first, tokens(20)) == Match()
    assert told.tell(US[0], state(first), gone(first), Change(ChangeKind.STATE_REMOVED, first))
    assert told.index.match(US, first, tokens(20)) == Match()
    assert told.tell(US[0], kv(first))
    assert told.index.match(US, first, tokens(20)) == Match(kv=tokens(20))
    told.index.check()
