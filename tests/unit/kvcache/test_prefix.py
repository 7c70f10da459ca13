"""The prefix index tells for each owner how far its KV reaches and where a prefill can resume."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prfaas.cluster import NodeId
from prfaas.kvcache.hashing import HASH_UNIT_TOKENS
from prfaas.kvcache.matching import BEST_HOLDERS
from prfaas.kvcache.prefix import Change, ChangeKind, PrefixIndex
from prfaas.request import Match
from tests.unit.kvcache.prompts import keys, prefixes, tokens

A, B = NodeId("a"), NodeId("b")
FAR = tokens(1000)


def matches(index: PrefixIndex, word: str, limit_tokens: int = FAR) -> dict[NodeId, tuple[int, int]]:
    """(joint, KV) of each holder, in units."""
    return {
        owner: (match.joint // HASH_UNIT_TOKENS, match.kv // HASH_UNIT_TOKENS)
        for owner, match in index.match(keys(word), limit_tokens).items()
    }


def runs(index: PrefixIndex) -> list[tuple[int, int]]:
    return sorted((run.start, run.stop) for run in index.runs())


def test_an_owner_has_two_matches():
    """M1 and M2: KV counts as far as prompts agree, a resume only from a state within that."""
    index = PrefixIndex()
    index.insert(keys("systemquestion"), A)
    index.add_state(keys("system"), A)
    index.add_state(keys("systemquestion"), A)
    assert matches(index, "systemquestion") == {A: (14, 14)}
    assert matches(index, "systemquery") == {A: (6, 9)}
    assert matches(index, "sys") == {A: (0, 3)}
    assert matches(index, "other") == {}


def test_field_B8_a_prompt_that_is_cached_whole_resumes_before_its_end():
    """A state at N is of no use where N-1 tokens are computed: the match is the checkpoint before, never N-1 itself."""
    index = PrefixIndex()
    index.insert(keys("abcdef"), A)
    for word in ("ab", "abcdef"):
        index.add_state(keys(word), A)
    assert index.match(keys("abcdef"), tokens(6) - 1) == {A: Match(joint=tokens(2), kv=tokens(6) - 1)}
    assert index.match(keys("abcdef"), tokens(6)) == {A: Match(joint=tokens(6), kv=tokens(6))}


def test_a_long_prompt_is_one_object():
    """R4: one object for each run, never for each unit; it grows with the conversation and is cut where prompts
    part."""
    index = PrefixIndex()
    index.insert(keys("a" * 1000), A)
    index.insert(keys("a" * 2048), A)
    index.insert(keys("a" * 1500), B)
    assert runs(index) == [(0, 2048)]
    index.insert(keys("a" * 1200 + "b"), B)
    assert runs(index) == [(0, 1200), (1200, 1201), (1200, 2048)]


def test_runs_join_again_when_prompts_no_longer_part():
    """Or else a prefix that many prompts leave and are evicted from would end up as one object for each unit."""
    index = PrefixIndex()
    index.insert(keys("abcdef"), A)
    index.insert(keys("abcxyz"), B)
    index.remove_owner(B)
    index.check()
    assert runs(index) == [(0, 6)]


def test_splitting_a_run_never_moves_a_state():
    """R4: states keep their boundary, on whichever side of the cut it lies, and at the cut itself."""
    index = PrefixIndex()
    index.insert(keys("abcdef"), A)
    for end in (2, 3, 5):
        index.add_state(keys("abcdef"[:end]), A)
    index.insert(keys("abcxyz"), B)
    index.check()
    assert [matches(index, "abcdef"[:end])[A] for end in range(1, 7)] == [
        (0, 1),
        (2, 2),
        (3, 3),
        (3, 4),
        (5, 5),
        (5, 6),
    ]
    assert matches(index, "abcxyz")[B] == (0, 6)


def test_a_state_goes_with_the_kv_under_it():
    """R21: in the same step, on that owner only, and in every branch that grew on what is lost."""
    index = PrefixIndex()
    for owner in (A, B):
        for word in ("abcd", "abxy"):
            index.insert(keys(word), owner)
            index.add_state(keys(word), owner)
    index.add_state(keys("a"), A)
    index.remove(keys("ab"), A)
    index.check()
    assert matches(index, "abcd") == {A: (1, 1), B: (4, 4)}
    assert matches(index, "abxy") == {A: (1, 1), B: (4, 4)}


def test_an_orphan_state_is_refused():
    """A state without all of its KV is of no use, whoever claims it."""
    index = PrefixIndex()
    index.insert(keys("ab"), A)
    index.insert(keys("abcd"), B)
    assert not index.add_state(keys("abc"), A)
    assert not index.add_state(keys("abx"), A)
    assert matches(index, "abc") == {A: (0, 2), B: (0, 3)}


def test_the_best_holders_come_first_by_either_match():
    """A node with the most KV and no state is best to decode on, one with less KV and a state to resume on. Both are
    among the first, however many hold a little."""
    index = PrefixIndex()
    for number in range(40):
        index.insert(keys("ab"), NodeId(f"n{number}"))
    index.insert(keys("abcdef"), A)
    index.insert(keys("abc"), B)
    index.add_state(keys("abc"), B)
    found = index.match(keys("abcdefgh"), FAR)
    assert list(found)[:2] == [B, A]
    assert len(found) == BEST_HOLDERS
    assert list(found.values())[:2] == [Match(tokens(3), tokens(3)), Match(0, tokens(6))]


def test_less_kv_ranks_lower():
    """Also among those whose KV ends within one run."""
    index = PrefixIndex()
    for end in (2, 6, 3, 5, 4):
        index.insert(keys("abcdefgh"[:end]), NodeId(f"n{end}"))
    assert list(matches(index, "abcdefgh")) == ["n6", "n5", "n4", "n3", "n2"]
    assert list(matches(index, "abcd"))[3:] == ["n3", "n2"]


def test_a_state_that_cannot_be_used_earns_no_rank():
    """Neither one past where prompts part, nor one past what a prefill computes."""
    index = PrefixIndex()
    for owner, word in ((A, "abcdef"), (B, "abcd")):
        index.insert(keys(word), owner)
        index.add_state(keys(word), owner)
    assert list(matches(index, "abcdxyz")) == [B, A]
    assert list(matches(index, "abcdef", tokens(6) - 1)) == [B, A]
    assert list(matches(index, "abcdef", tokens(6))) == [A, B]


def test_prompts_with_a_common_start_name_different_holders_of_it():
    """Or else the same few of all the nodes that hold a system prompt would get all requests."""
    index = PrefixIndex()
    owners = [NodeId(f"n{number}") for number in range(100)]
    for owner in owners:
        index.insert(keys("ab"), owner)
    named = {owner for letter in "cdefghijklmnopqrstuvwxyz" for owner in matches(index, "ab" + letter)}
    assert len(named) > 3 * BEST_HOLDERS


def test_any_owner_can_be_asked_for_after_one_walk():
    """Whoever weighs a node that is not among the best holders learns what that node has."""
    index = PrefixIndex()
    for number in range(100):
        index.insert(keys("ab"), NodeId(f"n{number}"))
    found = index.find(keys("abc"), FAR)
    assert all(found.at(NodeId(f"n{number}")) == Match(0, tokens(2)) for number in range(100))
    assert found.at(NodeId("stranger")) == Match()


@pytest.mark.parametrize("broken", ["orphan", "hole", "unheld", "unjoined"])
def test_check_finds_what_must_not_be(broken):
    """Each of the things that R4 and R21 rule out is seen."""
    index = PrefixIndex()
    for word in ("abcd", "abxy"):
        index.insert(keys(word), A)
    index.add_state(keys("abcd"), A)
    index.check()
    trunk, *branches = index.runs()
    match broken:
        case "orphan":
            trunk.states[2] = {B: branches[0].states[4][A]}
        case "hole":
            del trunk.holders[A]
            trunk.holders[B] = 2
        case "unheld":
            trunk.keys += keys("z")
        case "unjoined":
            trunk.children.popitem()
    with pytest.raises(AssertionError):
        index.check()


OWNERS = [NodeId(f"n{number}") for number in range(4)]
owners = st.sampled_from(OWNERS)
#: Few letters and much repetition, so that prompts share beginnings and part everywhere.
words = st.text("ab", min_size=1, max_size=9)


class IndexMachine(RuleBasedStateMachine):
    """The index against plain sets of prefixes."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.kv: dict[NodeId, set[str]] = {owner: set() for owner in OWNERS}
        self.states: dict[NodeId, set[str]] = {owner: set() for owner in OWNERS}

    def _change(self, kind: ChangeKind, word: str, owner: NodeId) -> None:
        self.index.apply(owner, Change(kind, keys(word)))

    @rule(word=words, owner=owners)
    def insert(self, word: str, owner: NodeId) -> None:
        self._change(ChangeKind.KV_ADDED, word, owner)
        self.kv[owner].update(prefixes(word))

    @rule(word=words, owner=owners)
    def add_state(self, word: str, owner: NodeId) -> None:
        self._change(ChangeKind.STATE_ADDED, word, owner)
        if word in self.kv[owner]:
            self.states[owner].add(word)

    @rule(word=words, owner=owners)
    def remove(self, word: str, owner: NodeId) -> None:
        self._change(ChangeKind.KV_REMOVED, word, owner)
        for held in (self.kv, self.states):
            held[owner] = {prefix for prefix in held[owner] if not prefix.startswith(word)}

    @rule(word=words, owner=owners)
    def remove_state(self, word: str, owner: NodeId) -> None:
        self._change(ChangeKind.STATE_REMOVED, word, owner)
        self.states[owner].discard(word)

    @rule(owner=owners)
    def remove_owner(self, owner: NodeId) -> None:
        self.index.remove_owner(owner)
        self.kv[owner], self.states[owner] = set(), set()

    @rule(word=words, limit_tokens=st.integers(0, tokens(10)))
    def match(self, word: str, limit_tokens: int) -> None:
        expected = {owner: self._expected(word, owner, limit_tokens) for owner in OWNERS}
        found = self.index.find(keys(word), limit_tokens)
        assert {owner: found.at(owner) for owner in OWNERS} == expected
        best = found.best()
        assert best == {owner: match for owner, match in expected.items() if word[0] in self.kv[owner]}
        if best:
            joints, kvs = zip(*((match.joint, match.kv) for match in best.values()), strict=True)
            assert joints[0] == max(joints)
            assert max(kvs) in kvs[:2]

    def _expected(self, word: str, owner: NodeId, limit_tokens: int) -> Match:
        kv = max((len(p) for p in prefixes(word) if p in self.kv[owner]), default=0)
        states = [len(p) for p in prefixes(word) if p in self.states[owner] and tokens(len(p)) <= limit_tokens]
        return Match(joint=tokens(max(states, default=0)), kv=min(tokens(kv), limit_tokens))

    @invariant()
    def holds(self) -> None:
        """R4, R21; and nothing is in the tree that nobody told of."""
        self.index.check()
        kv_units = {prefix for held in self.kv.values() for prefix in held}
        assert sum(run.stop - run.start for run in self.index.runs()) == len(kv_units)
        states = sum(len(owners) for run in self.index.runs() for owners in run.states.values())
        assert states == sum(len(held) for held in self.states.values())


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
