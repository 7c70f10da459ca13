"""A shard grants, pins, publishes and gives up as R14 to R23 say, rule by rule."""

import sys
from itertools import count
from types import FrameType

import pytest

from prfaas.kvcache.blocks import BlockClass, BlockState
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS
from prfaas.kvcache.layout import Window
from prfaas.kvcache.objects import Drop, Dropped, Granted, Kind, Leased, Load, PutId, Refused, Spill, Stored
from prfaas.kvcache.prefix import Change, ChangeKind, PrefixIndex
from prfaas.request import Match
from tests.unit.kvcache.prompts import keys, tokens
from tests.unit.kvcache.shards import BLOCK, SHARD, STATE, UNIT, World, keys_of, object_at, spec

#: In blocks, with padding.
UNIT_BLOCKS, STATE_BLOCKS = 2, 4


def quarantined(world: World) -> int:
    return world.shard.stock.memory.pool.used_bytes(BlockClass.PREFIX, BlockState.QUARANTINE) // BLOCK


def free(world: World) -> int:
    return world.shard.stock.memory.pool.free_bytes // BLOCK


def window(unit: int, offset: int, state: bool = False) -> Window:
    return Window(tokens(unit) if state else tokens(unit - 1), tokens(unit), offset * BLOCK, state)


def test_what_is_missing_is_granted_and_what_is_known_is_not():
    """One window for each object, KV from one end of the pool and states from the other; a second put of the same gets
    the rest."""
    world = World(spec(blocks=100))
    assert world.put("p1", "tom", "ab", [2]) == Granted(
        0, tokens(2), (tokens(2),), (window(1, 0), window(2, 2), window(2, 96, state=True))
    )
    world.received("p1")
    assert world.finds("tom", "ab") == (2, 2)
    assert world.put("p2", "tom", "ab", [2]) == Granted(tokens(2), tokens(2))
    assert world.put("p3", "tom", "abc", [2, 3]) == Granted(
        tokens(2), tokens(3), (tokens(3),), (window(3, 4), window(3, 92, state=True))
    )
    world.check()


def test_what_another_is_putting_is_not_granted_twice():
    world = World(spec())
    assert world.put("p1", "tom", "abcd", [4])
    answer = world.put("p2", "tom", "abcdef", [4, 6])
    assert isinstance(answer, Granted)
    assert (answer.first_tokens, answer.stop_tokens, answer.states) == (tokens(4), tokens(6), (tokens(6),))


def test_a_state_alone_can_be_missing():
    world = World(spec())
    world.stored("tom", "abcd")
    answer = world.put("p2", "tom", "abcd", [2, 4])
    assert isinstance(answer, Granted)
    assert (answer.first_tokens, answer.stop_tokens, answer.states) == (tokens(4), tokens(4), (tokens(4),))
    world.received("p2")
    assert world.finds("tom", "abcd") == (4, 4)


def test_a_long_prompt_is_granted_piece_by_piece():
    """As much as one transfer moves, wherever that begins, and a state only with the rows before it."""
    world, word = World(spec()), "a" * 300
    world.stored("tom", word[:2])
    for put, first, stop, states in (("p1", 2, 130, ()), ("p2", 130, 258, ()), ("p3", 258, 300, (300,))):
        answer = world.put(put, "tom", word, [300])
        assert isinstance(answer, Granted)
        ends = tuple(tokens(at) for at in states)
        assert (answer.first_tokens, answer.stop_tokens, answer.states) == (tokens(first), tokens(stop), ends)
    for put in ("p3", "p2", "p1"):
        assert world.finds("tom", word) == (0, 2)
        world.received(put)
    assert world.finds("tom", word) == (300, 300)
    world.check()


def test_R22_nothing_is_found_before_all_of_it_is_there():
    """A hit published before it is written would be read as whatever lay there before."""
    world = World(spec())
    world.put("p1", "tom", "ab", [2])
    assert world.lease("l1", "tom", "ab") == Leased(0, 0, 0) and world.changes == []
    world.received("p1")
    assert [change.kind for change in world.changes] == [ChangeKind.KV_ADDED, ChangeKind.STATE_ADDED]
    assert world.lease("l2", "tom", "ab") == Leased(tokens(2), tokens(2), tokens(2))


def test_R22_kv_waits_for_what_it_stands_on():
    """The second put is whole first; without the first it would have a hole below it."""
    world = World(spec())
    world.put("p1", "tom", "ab")
    world.put("p2", "tom", "abcd", [4])
    world.received("p2")
    world.released("p2")
    world.check()
    assert world.finds("tom", "abcd") == (0, 0)
    world.received("p1")
    assert world.finds("tom", "abcd") == (4, 4)


def test_R22_a_put_whose_ground_is_lost_is_discarded_whole():
    world = World(spec(blocks=100))
    world.put("p1", "tom", "ab")
    world.put("p2", "tom", "abcd", [4])
    world.received("p2")
    world.lost("p1")
    assert world.discarded == {"p1": "lost", "p2": "hole"}
    for put in ("p1", "p2"):
        world.released(put)
    assert free(world) == 100 and world.changes == []


@pytest.mark.parametrize("end", ["lost", "expired"])
def test_R16_memory_is_free_only_when_the_pump_has_let_go(end: str):
    """A timeout does not prove that the writer stopped: nobody else gets the memory before its barrier."""
    world = World(spec(blocks=4))
    world.put("p1", "tom", "ab", ttl_s=10.0)
    if end == "lost":
        world.lost("p1")
    else:
        world.tick(10.0)
    assert world.discarded == {"p1": end}
    assert quarantined(world) == 4
    assert world.put("p2", "tom", "xy") is Refused.NO_ROOM
    world.released("p1")
    assert quarantined(world) == 0
    assert world.put("p3", "tom", "xy")


def test_R16_what_was_published_is_not_reused_before_the_pump_has_let_go():
    """It may still write the same bytes again."""
    world = World(spec(blocks=4))
    world.put("p1", "tom", "ab")
    world.received("p1")
    assert world.put("p2", "tom", "xy") is Refused.NO_ROOM
    assert world.finds("tom", "ab") == (0, 2), "nothing goes where that would free nothing"
    world.released("p1")
    assert world.put("p3", "tom", "xy")
    assert world.finds("tom", "ab") == (0, 0)


def test_what_comes_after_its_time_is_not_published():
    world = World(spec())
    world.put("p1", "tom", "ab", ttl_s=10.0)
    world.tick(10.0)
    world.received("p1")
    assert world.changes == [] and world.published == set()


def test_R15_R18_what_is_leased_is_not_evicted():
    """Not the KV, not the state, until the lease ends, however much room is wanted."""
    world = World(spec(blocks=20))
    world.stored("tom", "abc", [3])
    assert world.lease("l1", "tom", "abcd", ttl_s=10.0) == Leased(tokens(3), tokens(3), tokens(3))
    assert world.put("p2", "tom", "pqrstuvwx") is Refused.NO_ROOM
    assert world.finds("tom", "abc") == (3, 3)
    world.tick(10.0)
    assert world.put("p3", "tom", "pqrstuvwx")
    assert world.finds("tom", "abc") == (0, 0)


def test_R18_kv_past_a_lease_may_go():
    """A lease pins what it found, and no more of the same prompt."""
    world = World(spec(blocks=20))
    world.stored("tom", "abcdefgh")
    assert world.lease("l1", "tom", "abcX", joint=False) == Leased(tokens(3), 0, tokens(3))
    assert world.put("p2", "tom", "pqrst")
    assert world.finds("tom", "abcdefgh") == (0, 3)
    world.check()


def test_R17_a_lease_that_has_expired_was_not_held():
    """Whoever read meanwhile has read nothing, even if its bytes look good."""
    world = World(spec())
    world.stored("tom", "ab", [2])
    world.lease("l1", "tom", "ab", ttl_s=10.0)
    world.get("g1", "l1", 0, tokens(2), state=True)
    world.lease("l2", "tom", "ab", ttl_s=20.0)
    world.get("g2", "l2", 0, tokens(2), state=True)
    world.tick(10.0)
    assert not world.got("g1") and world.got("g2")
    assert not world.release("l1") and world.release("l2")


def test_a_look_up_tells_how_far_KV_reaches_without_a_state():
    """Where a prompt leaves those that are known is where its prefill keeps a state (R6), whatever is pinned."""
    world = World(spec())
    world.stored("tom", "abcd", [2])
    assert world.lease("l1", "tom", "abcX") == Leased(tokens(2), tokens(2), tokens(3))
    assert world.lease("l2", "tom", "abcX", tokens(2) - 1) == Leased(0, 0, tokens(1))
    assert world.shard.leases == 1


def test_what_was_offered_and_will_not_come_can_be_put_by_others_at_once():
    """Its memory waits for the pump all the same (R16), and what has come stays."""
    world = World(spec(blocks=6))
    world.put("p1", "tom", "ab")
    assert not world.put("p2", "tom", "ab"), "somebody is sending it"
    world.shard.lost(PutId("p1"), Dropped.ABANDONED)
    world.obey()
    assert world.discarded == {"p1": "abandoned"}
    assert world.put("p3", "tom", "ab") is Refused.NO_ROOM
    world.released("p1")
    assert world.put("p4", "tom", "ab")
    world.received("p4")
    world.shard.lost(PutId("p4"), Dropped.ABANDONED)
    assert world.finds("tom", "ab") == (0, 2)


def test_R17_time_that_no_tick_has_told_of_counts_too():
    world = World(spec())
    world.stored("tom", "ab")
    for lease in ("l1", "l2", "l3"):
        world.lease(lease, "tom", "ab", joint=False, ttl_s=10.0)
    world.get("g1", "l3", 0, tokens(2))
    world.now = 10.0
    assert not world.shard.renew("l1", world.now, 10.0)  # type: ignore[arg-type]
    assert not world.release("l2") and not world.got("g1")
    assert world.shard.leases == 0


def test_a_renewed_lease_holds_on():
    world = World(spec())
    world.stored("tom", "ab")
    world.lease("l1", "tom", "ab", joint=False, ttl_s=10.0)
    world.now = 9.0
    assert world.shard.renew("l1", world.now, 10.0)  # type: ignore[arg-type]
    world.tick(9.0)
    assert world.release("l1")


def test_memory_that_is_being_sent_stays_though_its_lease_has_ended():
    """The reader's bytes are not another's while the pump still sends them: it is only told that they do not count."""
    world = World(spec(blocks=6))
    world.stored("tom", "ab")
    world.lease("l1", "tom", "ab", joint=False, ttl_s=10.0)
    world.get("g1", "l1", 0, tokens(2))
    world.tick(10.0)
    assert world.put("p2", "tom", "xyz") is Refused.NO_ROOM
    assert not world.got("g1")
    assert world.put("p3", "tom", "xyz")


def test_a_get_within_what_is_leased_and_no_more():
    world = World(spec())
    world.stored("tom", "abcd", [2])
    world.lease("l1", "tom", "abcd")
    for number, (first, stop, state) in enumerate(
        [(0, 4, False), (0, 1, True), (2, 2, False), (0, 2, True), (1, 2, False), (2, 2, True)]
    ):
        world.get(f"g{number}", "l1", tokens(first), tokens(stop), state)
    assert world.missed == dict.fromkeys(("g0", "g1", "g2"), "outside")
    assert [len(world.served[f"g{number}"]) for number in (3, 4, 5)] == [3, 1, 1]
    world.get("g6", "l1", 10, 100)
    assert [(each.first, each.stop) for each in world.served["g6"]] == [(0, 64), (64, 128)]


@pytest.mark.parametrize(
    ("states", "short", "agreed"),
    [([2], 0, 2), ([2, 4], 0, 4), ([2, 4], 1, 2), ([4], 1, 0), ([], 0, 0), ([1, 3], 0, 3)],
)
def test_field_H1_kv_and_state_are_leased_to_one_length(states: list[int], short: int, agreed: int):
    """However far KV alone reaches: to the last state within the limit, and what a get brings ends there in both."""
    world = World(spec())
    world.stored("tom", "abcd", states)
    found = world.lease("l1", "tom", "abcd", limit_tokens=tokens(4) - short)
    assert (found.kv_tokens, found.state_tokens) == (tokens(agreed), tokens(agreed))
    if agreed:
        world.get("g1", "l1", 0, tokens(agreed), state=True)
        windows = world.served["g1"]
        assert [each.stop for each in windows if not each.state] == [tokens(at + 1) for at in range(agreed)]
        assert [each.stop for each in windows if each.state] == [tokens(agreed)]
    else:
        assert not found and world.shard.leases == 0


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_field_H3_a_state_that_is_not_there_is_refused_at_once(stop: int):
    """Nobody waits for what will not come, nor gets the rows without it: below the state that was leased, behind it,
    or where KV alone was."""
    world = World(spec())
    world.stored("tom", "abcd", [2])
    world.lease("joint", "tom", "abcd")
    world.lease("kv", "tom", "abcd", joint=False)
    world.get("g1", "joint", 0, tokens(stop), state=True)
    world.get("g2", "kv", 0, tokens(stop), state=True)
    expected = {"g2": "outside"} if stop == 2 else {"g1": "outside", "g2": "outside"}
    assert world.missed == expected and world.shard.gets == 2 - len(expected)


def test_R14_the_same_key_with_other_content_raises_the_alarm_and_keeps_the_old():
    """Published or on its way; who gives no checksum says nothing."""
    world = World(spec())
    path = keys_of("tom", "ab")
    first, second = object_at(path, 1), object_at(path, 2)
    world.put("p1", "tom", "ab", checksums={first: 1, second: 2})
    world.put("p2", "tom", "ab", checksums={first: 1, second: 3})
    world.received("p1")
    world.put("p3", "tom", "ab", checksums={first: 9})
    world.put("p4", "tom", "ab")
    assert [(alarm.key, alarm.kept, alarm.refused) for alarm in world.alarms] == [(second, 2, 3), (first, 1, 9)]
    assert world.shard.counts.alarms == 2
    assert world.finds("tom", "ab") == (0, 2)


def test_R19_a_put_is_granted_whole_or_refused_whole():
    """And one that could never fit drives nothing out."""
    world = World(spec(blocks=20))
    world.stored("tom", "abcd", [4])
    assert world.put("p2", "tom", "pqrstuvwxyz") is Refused.NO_ROOM
    assert world.finds("tom", "abcd") == (4, 4) and free(world) == 8
    assert world.shard.puts == 0


def test_R20_a_tenant_gets_its_quota_and_pays_for_more_with_its_own():
    """What it has goes before anything of the others, though theirs was used longer ago."""
    world = World(spec(blocks=100, quota_bytes=8 * BLOCK))
    world.stored("ann", "abcd")
    world.stored("tom", "abcd")
    assert world.put("p2", "tom", "vwxyz") is Refused.QUOTA
    assert world.put("p3", "tom", "wxyz")
    assert world.finds("tom", "abcd") == (0, 0) and world.finds("ann", "abcd") == (0, 4)
    world.lost("p3")
    assert world.shard.stock.memory.pool.charged_bytes("tom") == 8 * BLOCK
    world.released("p3")
    assert world.shard.stock.memory.pool.charged_bytes("tom") == 0


def test_R21_a_state_goes_with_the_kv_below_it():
    """KV evicted under a deeper state would let a prefill resume on nothing."""
    world = World(spec(lower_bytes=100_000))
    world.stored("tom", "abcd", [2, 4])
    world.restart()
    world.lease("l1", "tom", "ab")
    world.get("g1", "l1", 0, tokens(1))
    world.below_does(ok=False)
    assert world.missed == {"g1": "damaged"}
    assert world.finds("tom", "abcd") == (0, 0)
    world.settle()
    assert world.below == {}
    world.check()


def test_field_B1_memory_has_another_generation_for_its_next_holder():
    world = World(spec(blocks=4))
    pool = world.shard.stock.memory.pool
    seen = []
    for word in ("ab", "pq", "xy"):
        world.stored("tom", word)
        seen += [
            (span.offset, span.generation)
            for each in list(world.shard.stock.memory.residents())
            if (span := pool.span(each.owner))
        ]
    assert len(set(seen)) == 6 and len({offset for offset, _ in seen}) == 2


def test_two_tenants_never_share():
    """Equal prompts with other salts have no object in common."""
    world = World(spec())
    world.stored("tom", "abcd", [4])
    assert world.lease("l1", "ann", "abcd") == Leased(0, 0, 0)
    answer = world.put("p2", "ann", "abcd", [4])
    assert isinstance(answer, Granted) and len(answer.windows) == 5


def test_an_unproven_state_goes_first():
    """R6: what a prefill left every few thousand tokens, until somebody resumes there."""
    world = World(spec(blocks=20))
    world.put("p1", "tom", "abcd", [2, 4], unproven=[2])
    world.received("p1")
    world.released("p1")
    world.put("p2", "tom", "xyz")
    assert world.finds("tom", "abcd") == (4, 4) and world.finds("tom", "ab") == (0, 2)
    assert world.shard.stock.evictions["unproven"] == 1


def test_a_model_without_states_resumes_anywhere():
    world = World(spec(state_bytes=0))
    world.stored("tom", "abcd", [4])
    assert world.lease("l1", "tom", "abcX", tokens(3) - 1) == Leased(tokens(2), tokens(2), tokens(2))
    world.get("g1", "l1", 0, tokens(2), state=True)
    assert [each.state for each in world.served["g1"]] == [False, False, True]
    assert world.finds("tom", "abcd") == (0, 4)


def test_field_H6_tokens_that_were_there_and_could_not_be_used_are_counted():
    world = World(spec())
    world.stored("tom", "abcd", [2, 4])
    assert world.lease("l1", "tom", "abcd", tokens(4) - 1) == Leased(tokens(2), tokens(2), tokens(3))
    counts = world.shard.counts
    assert (counts.kv_hit_tokens, counts.joint_hit_tokens) == (tokens(4) - 1, tokens(2))
    assert (counts.unaligned_tokens, counts.stateless_tokens) == (63, tokens(1))


def test_padding_is_known():
    """R3."""
    world = World(spec())
    world.stored("tom", "ab", [2])
    padding = 2 * (UNIT_BLOCKS * BLOCK - UNIT) + STATE_BLOCKS * BLOCK - STATE
    assert world.shard.stock.memory.pool.padding_bytes(BlockClass.PREFIX) == padding


# -- the lower tier


def test_what_is_published_is_written_through_and_may_then_leave_memory():
    """The index keeps it, cold, and a get brings it back."""
    world = World(spec(blocks=8, lower_bytes=100_000))
    world.put("p1", "tom", "ab", [2])
    world.received("p1")
    world.released("p1")
    assert [type(order) for order in world.orders] == [Spill] * 3
    assert world.put("p2", "tom", "xyz") is Refused.NO_ROOM
    world.settle()
    world.stored("tom", "xyz")
    assert world.finds("tom", "ab") == (2, 2)
    assert world.lease("l1", "tom", "ab") == Leased(tokens(2), tokens(2), tokens(2))
    world.get("g1", "l1", 0, tokens(2), state=True)
    loads = [order for order in world.orders if isinstance(order, Load)]
    assert loads and "g1" not in world.served
    world.settle()
    assert len(world.served["g1"]) == 3 and world.got("g1")
    world.check()


def test_two_gets_wait_for_one_reading():
    world = World(spec(lower_bytes=100_000))
    world.stored("tom", "a")
    world.restart()
    world.lease("l1", "tom", "a", joint=False)
    world.get("g1", "l1", 0, tokens(1))
    world.get("g2", "l1", 0, tokens(1))
    assert len(world.orders) == 1
    world.settle()
    assert world.served.keys() == {"g1", "g2"}


def test_a_get_whose_lease_ends_while_it_waits_comes_to_nothing():
    world = World(spec(lower_bytes=100_000))
    world.stored("tom", "a")
    world.restart()
    world.lease("l1", "tom", "a", joint=False, ttl_s=10.0)
    world.get("g1", "l1", 0, tokens(1))
    world.tick(10.0)
    assert world.missed == {"g1": "expired"}
    world.settle()
    world.check()
    assert world.shard.gets == 0


def test_a_damaged_object_breaks_the_leases_on_it_and_on_what_stands_on_it():
    """What was only above goes too; what is below it stays."""
    world = World(spec(lower_bytes=100_000))
    world.stored("tom", "abcd", [1, 4])
    world.restart()
    world.lease("deep", "tom", "abcd")
    world.lease("low", "tom", "aX")
    world.get("g1", "deep", tokens(1), tokens(2))
    world.get("g2", "deep", tokens(3), tokens(4), state=True)
    world.below_does(ok=False)
    assert world.missed == {"g1": "damaged", "g2": "damaged"}
    assert world.finds("tom", "abcd") == (1, 1)
    assert not world.release("deep") and world.release("low")
    world.settle()
    world.check()
    assert set(world.below) == {object_at(keys_of("tom", "a"), 1, kind) for kind in Kind}
    world.stored("tom", "abcd", [4], put="again")
    assert world.finds("tom", "abcd") == (4, 4)


def test_a_damaged_state_takes_no_kv_with_it():
    world = World(spec(lower_bytes=100_000))
    world.stored("tom", "ab", [2])
    world.restart()
    world.lease("l1", "tom", "ab")
    world.get("g1", "l1", tokens(2), tokens(2), state=True)
    world.below_does(ok=False)
    assert world.finds("tom", "ab") == (0, 2)
    assert world.changes[-1] == Change(ChangeKind.STATE_REMOVED, keys_of("tom", "ab"))


def test_the_lower_tier_gives_up_when_it_is_full():
    """Only that takes from the index; the order to delete follows."""
    world = World(spec(lower_bytes=10 * UNIT))
    world.stored("tom", "abcd")
    world.stored("tom", "pqrst")
    world.stored("tom", "xyz")
    assert world.finds("tom", "abcd") == (0, 0) and world.finds("tom", "xyz") == (0, 3)
    assert not any(key in world.below for key in (object_at(keys_of("tom", "abcd"), at) for at in range(1, 5)))
    assert len(world.below) * UNIT <= 9 * UNIT


def test_what_the_lower_tier_could_not_take_is_served_from_memory_until_that_is_needed():
    """A full disk: the service goes on."""
    world = World(spec(blocks=8, lower_bytes=100_000))
    world.put("p1", "tom", "abcd")
    world.received("p1")
    world.released("p1")
    world.settle(ok=False)
    world.lease("l1", "tom", "abcd", joint=False)
    world.get("g1", "l1", 0, tokens(4))
    assert world.got("g1") and world.release("l1")
    world.stored("tom", "wxyz")
    assert world.finds("tom", "abcd") == (0, 0) and world.finds("tom", "wxyz") == (0, 4)
    world.check()


def work_of_puts(prompts: int, ok: bool) -> int:
    """Lines run to place the last of so many prompts of four units, in a memory full of the others."""
    world = World(spec(blocks=8 * prompts, lower_bytes=10_000_000))
    numbers = count()

    def put() -> None:
        word = chr(0x4E00 + next(numbers)) + "bcd"
        assert world.put(word, "tom", word)
        world.received(word)
        world.released(word)
        world.settle(ok)

    for _ in range(prompts):
        put()
    lines = 0

    def note(frame: FrameType, event: str, argument: object) -> object:
        nonlocal lines
        lines += event == "line"
        return note if frame.f_globals["__name__"] in ("prfaas.kvcache.stock", "prfaas.kvcache.memory") else None

    traced = sys.gettrace()
    sys.settrace(note)
    try:
        for _ in range(10):
            put()
    finally:
        sys.settrace(traced)
    assert sum(world.shard.stock.evictions.values()) >= 40
    world.check()
    return lines


@pytest.mark.parametrize("ok", [True, False], ids=["written", "refused"])
def test_room_in_memory_is_made_without_looking_at_all_of_it(ok: bool):
    """Whether the lower tier takes everything or nothing: ten times the memory is not more work for a put."""
    assert work_of_puts(400, ok) < 1.5 * work_of_puts(40, ok)


def test_no_more_goes_from_memory_than_is_needed():
    """A put waits for what it needs, not for a share of all the memory; the longest unused goes first."""
    world = World(spec(blocks=800, lower_bytes=10_000_000))
    words = [chr(0x4E00 + number) + "bcd" for number in range(91)]
    for word in words[:90]:
        world.put(word, "tom", word)
        world.received(word)
        world.released(word)
        world.settle(ok=False)
    assert world.finds("tom", words[0]) == (0, 4)
    world.put("one more", "tom", words[90])
    assert [world.finds("tom", word) for word in words[:3]] == [(0, 0), (0, 4), (0, 4)]
    assert world.shard.stock.evictions["unspilled"] == 4


def test_a_restart_finds_what_is_below_and_drops_what_hangs_on_nothing():
    world = World(spec(lower_bytes=100_000))
    world.stored("tom", "abcd", [2, 4])
    world.stored("ann", "xyz", [3])
    del world.below[object_at(keys_of("tom", "abcd"), 3)]
    world.restart()
    assert world.finds("tom", "abcd") == (2, 2) and world.finds("ann", "xyz") == (3, 3)
    assert all(isinstance(order, Drop) for order in world.orders) and len(world.orders) == 2
    world.settle()
    world.check()
    assert len(world.below) == 7


def test_a_header_that_cannot_be_is_dropped():
    world = World(spec(lower_bytes=100_000))
    path = keys("ab")
    odd = [
        Stored(object_at(path, 2), path[:-1]),
        Stored(object_at(path, 1), b""),
        Stored(object_at(path, 2), path[:16]),
    ]
    world.shard.recovered(odd)
    world.obey()
    assert {order.key for order in world.orders} == {each.key for each in odd} and world.changes == []


def test_a_snapshot_comes_in_pieces():
    """And whoever applies them has what those have who followed from the start."""
    world = World(spec())
    for word in ("abcd", "abxy", "pqrs"):
        world.stored("tom", word, [2, 4])
    pieces = list(world.shard.snapshot(100))
    assert all(sum(len(change.keys) for change in piece) <= 100 for piece in pieces) and len(pieces) > 3
    copy = PrefixIndex()
    for piece in pieces:
        for change in piece:
            copy.apply(SHARD, change)
    for word in ("abcd", "abxy", "pqrs"):
        found = copy.find(keys_of("tom", word), tokens(4)).at(SHARD)
        assert found == Match(joint=tokens(4), kv=tokens(4))


def test_a_state_that_comes_between_two_pieces_is_told():
    """By the piece that has its KV, if not as a change: as a change it came too early for the copy."""
    world = World(spec())
    for tenant, word in (("tom", "a"), ("ann", "abcde")):
        world.stored(tenant, word)
    snapshot, copy = world.shard.snapshot(16), PrefixIndex()
    told, first = len(world.changes), next(snapshot)
    other = "ann" if first[0].keys == keys_of("tom", "a") else "tom"
    for change in first:
        copy.apply(SHARD, change)
    world.stored(other, "a", [1])
    for change in (*world.changes[told:], *(change for piece in snapshot for change in piece)):
        copy.apply(SHARD, change)
    assert copy.find(keys_of(other, "a"), tokens(1)).at(SHARD) == Match(joint=tokens(1), kv=tokens(1))


def test_a_put_is_known_by_its_name_once():
    world = World(spec())
    world.put("p1", "tom", "ab")
    assert world.put("p1", "tom", "xy") is Refused.KNOWN
    world.shard.received(PutId("never"))
    world.shard.lost(PutId("never"))
    world.shard.released(PutId("never"))
    assert world.shard.take() == ()


def test_tokens_past_the_last_whole_unit_are_not_put():
    """R13: they belong to no key."""
    world = World(spec())
    answer = world.shard.put(PutId("p"), "w0", "tom", keys_of("tom", "abc"), 2 * HASH_UNIT_TOKENS + 9, (), {}, 0.0, 9.0)
    assert isinstance(answer, Granted) and answer.stop_tokens == tokens(2)
