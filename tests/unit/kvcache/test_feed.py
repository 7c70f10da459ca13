"""A router's copy of a shard's index over a line that loses, repeats and exchanges messages."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.cluster import Incarnation, Namespace, NodeId, Pool, RegionId
from prfaas.kvcache.feed import (
    Changes,
    Copy,
    Heartbeat,
    ShardFeed,
    SnapshotBegin,
    SnapshotChunk,
    SnapshotEnd,
    Stale,
    Update,
)
from prfaas.kvcache.prefix import Change, ChangeKind
from prfaas.kvcache.region_index import RegionIndex
from prfaas.request import NO_MATCH, Match
from tests.unit.kvcache.prompts import keys, prefixes, tokens

S0 = NodeId("s0")
NS = Namespace("ns")
WORDS = [a + b + c for a in "ab" for b in ("", "a", "b", "c") for c in ("", "a", "b") if b or not c]
BOUND = 1 << 24


def pool(incarnation: int = 1) -> Pool:
    return Pool(
        id=S0, region=RegionId("far"), incarnation=Incarnation(incarnation), namespace=NS, rpc_address="127.0.0.1:1"
    )


class TruthfulShard:
    """What a shard holds, as two sets of words, and what it says about it."""

    def __init__(self, incarnation: int = 1) -> None:
        self.incarnation, self.seq, self.snapshots = Incarnation(incarnation), 0, 0
        self.kv: set[str] = set()
        self.states: set[str] = set()
        #: What each probe finds as of each number.
        self.history = {0: self.found()}

    def found(self) -> dict[str, Match]:
        return {word: Match(self._longest(self.states, word), self._longest(self.kv, word)) for word in WORDS}

    def change(self, kind: ChangeKind, word: str) -> Update | None:
        match kind:
            case ChangeKind.KV_ADDED:
                self.kv.update(prefixes(word))
            case ChangeKind.STATE_ADDED if word in self.kv:
                self.states.add(word)
            case ChangeKind.KV_REMOVED if word in self.kv:
                self.kv = {each for each in self.kv if not each.startswith(word)}
                self.states = {each for each in self.states if not each.startswith(word)}
            case ChangeKind.STATE_REMOVED if word in self.states:
                self.states.remove(word)
            case _:
                return None
        self.seq += 1
        self.history[self.seq] = self.found()
        return self.say(Changes((Change(kind, keys(word)),)))

    def say(self, kind: SnapshotBegin | SnapshotChunk | SnapshotEnd | Changes | Heartbeat) -> Update:
        return Update(self.incarnation, self.seq, kind, self.snapshots)

    def snapshot(self, piece: int = 2) -> list[Update]:
        self.snapshots += 1
        changes = [Change(ChangeKind.KV_ADDED, keys(word)) for word in sorted(self.kv)]
        changes += [Change(ChangeKind.STATE_ADDED, keys(word)) for word in sorted(self.states)]
        pieces = [tuple(changes[at : at + piece]) for at in range(0, len(changes), piece)]
        chunks = [self.say(SnapshotChunk(number, part)) for number, part in enumerate(pieces)]
        return [self.say(SnapshotBegin(NS)), *chunks, self.say(SnapshotEnd(len(pieces)))]

    @staticmethod
    def _longest(held: set[str], word: str) -> int:
        return max((tokens(len(prefix)) for prefix in prefixes(word) if prefix in held), default=0)


class Router:
    """One router's copy, and what it finds."""

    def __init__(self, shard: TruthfulShard) -> None:
        self.index = RegionIndex(BOUND)
        self.meet(shard)

    def meet(self, shard: TruthfulShard) -> None:
        """The view shows this life of the shard."""
        self.shard = shard
        self.index.forget(S0)
        self.feed = ShardFeed(self.index, pool(shard.incarnation))

    def hear(self, update: Update) -> Stale | None:
        stale = self.feed.apply(update, now=1.0)
        self.check()
        return stale

    def hear_all(self, updates: list[Update]) -> None:
        assert [self.hear(update) for update in updates] == [None] * len(updates)

    def found(self) -> dict[str, Match]:
        return {word: self.index.match([S0], keys(word), tokens(len(word)), heard_since=0.0) for word in WORDS}

    def check(self) -> None:
        """Current means: exactly what the shard had as of that number. Anything else finds nothing."""
        self.index.check()
        if self.feed.copy is Copy.CURRENT:
            assert self.found() == self.shard.history[self.feed.seq]
        else:
            assert set(self.found().values()) == {NO_MATCH}


def grown(*words: str) -> TruthfulShard:
    shard = TruthfulShard()
    for word in words:
        shard.change(ChangeKind.KV_ADDED, word)
        shard.change(ChangeKind.STATE_ADDED, word)
    return shard


def test_a_copy_follows_from_a_snapshot_on():
    """Nothing is found before the snapshot is whole; then all of it, and every change after that."""
    shard = grown("aab", "b")
    router = Router(shard)
    *pieces, end = shard.snapshot(piece=1)
    for update in pieces:
        assert router.hear(update) is None
        assert router.feed.copy is Copy.SYNCING
    router.hear_all([end])
    assert router.found()["aab"] == Match(tokens(3), tokens(3))
    gone = shard.change(ChangeKind.KV_REMOVED, "aa")
    assert gone is not None
    router.hear_all([gone, shard.say(Heartbeat())])
    assert router.found()["aab"] == Match(0, tokens(1))


def test_field_I4_a_gap_makes_the_copy_stale_until_a_snapshot():
    """One message of changes is lost: the next one, or the next heartbeat, gives it away."""
    for later in ("changes", "heartbeat"):
        shard = grown("aa")
        router = Router(shard)
        router.hear_all(shard.snapshot())
        shard.change(ChangeKind.KV_REMOVED, "a")
        after = shard.change(ChangeKind.KV_ADDED, "b") if later == "changes" else shard.say(Heartbeat())
        assert after is not None
        assert router.hear(after) is Stale.GAP
        assert router.hear(shard.say(Heartbeat())) is Stale.GAP, "nothing but a snapshot mends it"
        assert router.feed.known_seq() is None
        router.hear_all(shard.snapshot())
        assert router.found() == shard.found()


def test_field_I4_what_came_before_is_not_played_again():
    """A repeated message, and a snapshot from before what is known, are steps back."""
    shard = grown("aa")
    router = Router(shard)
    old = shard.snapshot()
    router.hear_all(old)
    change = shard.change(ChangeKind.KV_REMOVED, "a")
    assert change is not None
    router.hear_all([change])
    assert router.hear(change) is Stale.BACKWARD
    assert router.hear(old[0]) is Stale.BACKWARD


def test_field_I4_a_restarted_shard_keeps_none_of_its_old_blocks():
    """Another life has other blocks: its messages are not taken for those of the life in the view, nor the other way
    round."""
    shard = grown("aa")
    router = Router(shard)
    router.hear_all(shard.snapshot())
    again = TruthfulShard(incarnation=2)
    assert router.hear(again.say(Heartbeat())) is Stale.INCARNATION
    router.meet(again)
    assert router.hear(shard.say(Heartbeat())) is Stale.INCARNATION
    router.hear_all(again.snapshot())
    assert router.found() == again.found()


def test_another_models_index_is_refused():
    shard = grown("aa")
    router = Router(shard)
    assert router.hear(shard.say(SnapshotBegin(Namespace("other")))) is Stale.MALFORMED


def test_a_held_copy_is_not_scored_from_until_the_shard_is_heard_again():
    """A connection that broke for a moment costs no snapshot, if nothing was missed; a snapshot under way is lost."""
    shard = grown("aa")
    router = Router(shard)
    router.hear_all(shard.snapshot())
    router.feed.hold()
    router.check()
    assert router.feed.known_seq() == shard.seq
    router.hear_all([shard.say(Heartbeat())])
    assert router.found()["aa"] == Match(tokens(2), tokens(2))
    router.hear_all(shard.snapshot()[:2])
    router.feed.hold()
    assert router.feed.copy is Copy.STALE


def test_a_snapshot_that_misses_a_piece_is_none():
    shard = grown("aab", "b")
    whole = shard.snapshot(piece=1)
    for missing in range(1, len(whole) - 1):
        router = Router(shard)
        told = [router.hear(update) for update in whole[:missing] + whole[missing + 1 :]]
        assert Stale.SNAPSHOT in told
        assert router.feed.copy is Copy.STALE


def test_a_piece_that_came_twice_does_not_stand_in_for_one_that_is_missing():
    shard = grown("aab", "b")
    begin, first, second, *rest = shard.snapshot(piece=1)
    router = Router(shard)
    assert [router.hear(update) for update in (begin, first, first, *rest)][2] is Stale.SNAPSHOT
    assert router.feed.copy is Copy.STALE
    assert second != first


def test_two_snapshots_do_not_make_one():
    """Of the same moment, but cut in other pieces."""
    shard = grown("aab", "b")
    begin, first, *_ = shard.snapshot(piece=4)
    *_, third, end = shard.snapshot(piece=2)
    router = Router(shard)
    router.hear_all([begin, first])
    mixed = Update(third.incarnation, third.seq, SnapshotChunk(1, third.kind.changes), third.snapshot)  # type: ignore[union-attr]
    assert router.hear(mixed) is Stale.SNAPSHOT
    assert router.hear(end) is Stale.GAP


def test_a_heartbeat_says_that_a_snapshot_is_over():
    """Whose end was lost; the copy does not wait for it for ever."""
    shard = grown("aab")
    router = Router(shard)
    router.hear_all(shard.snapshot()[:-1])
    assert router.hear(shard.say(Heartbeat())) is Stale.SNAPSHOT


@pytest.mark.parametrize("bad", [b"", b"x" * 15, b"x" * 16 * 16_385])
def test_keys_that_no_prompt_has_make_the_copy_stale(bad: bytes):
    shard = grown("aa")
    router = Router(shard)
    router.hear_all(shard.snapshot())
    shard.seq += 1
    assert router.hear(shard.say(Changes((Change(ChangeKind.KV_ADDED, bad),)))) is Stale.MALFORMED


FATES = st.sampled_from(["come"] * 8 + ["lost", "twice", "late", "again"])
STEPS = st.one_of(
    st.tuples(st.sampled_from(list(ChangeKind)), st.sampled_from(WORDS)),
    st.sampled_from(["heartbeat", "snapshot", "restart", "break"]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(STEPS, FATES), max_size=60), st.integers(0, 2**16))
def test_whatever_the_line_does_a_current_copy_is_the_truth(story: list[tuple[object, str]], seed: int):
    """Messages are lost, repeated, exchanged and played again, streams break, the shard restarts: after each message
    the copy is what the shard had as of its number, or finds nothing. One snapshot that comes whole makes it what the
    shard has."""
    chance = random.Random(seed)
    shard = TruthfulShard()
    router = Router(shard)
    sent: list[Update] = []
    late: list[Update] = []

    def send(update: Update, fate: str) -> None:
        arriving = {"come": [update], "lost": [], "twice": [update, update], "late": [], "again": [update]}[fate]
        if fate == "again" and sent:
            arriving = [update, chance.choice(sent)]
        for each in arriving + late:
            router.hear(each)
        late.clear()
        if fate == "late":
            late.append(update)
        sent.append(update)

    for step, fate in story:
        match step:
            case "heartbeat":
                send(shard.say(Heartbeat()), fate)
            case "snapshot":
                for update in shard.snapshot(piece=1):
                    send(update, fate if chance.random() < 0.3 else "come")
            case "restart":
                shard = TruthfulShard(shard.incarnation + 1)
                router.meet(shard)
            case "break":
                router.feed.hold()
                router.check()
            case (ChangeKind() as kind, str(word)):
                if (update := shard.change(kind, word)) is not None:
                    send(update, fate)
    router.hear_all(shard.snapshot())
    assert router.feed.copy is Copy.CURRENT
    assert router.found() == shard.found()


def test_field_I1_forgetting_for_want_of_room_only_makes_matches_shorter():
    """What is told of goes far beyond the bound: the index stays below it, and never promises what is not there."""
    shard = TruthfulShard()
    router = Router(shard)
    router.index = RegionIndex(60_000)
    router.feed = ShardFeed(router.index, pool())
    for update in shard.snapshot():
        router.feed.apply(update, now=1.0)
    held = [f"{number:04d}" + "x" * 60 for number in range(200)]
    for number, word in enumerate(held, 1):
        update = Update(shard.incarnation, number, Changes((Change(ChangeKind.KV_ADDED, keys(word)),)))
        assert router.feed.apply(update, now=1.0) is None
        assert router.index.nbytes <= 60_000
        router.index.check()
    assert router.feed.copy is Copy.CURRENT
    assert router.index.forgotten_units > 0
    newest = router.index.match([S0], keys(held[-1]), tokens(64), heard_since=0.0)
    assert newest.kv == tokens(64)
