"""The pool gives out runs that nobody else has, takes them back whole, and can tell one holder from the next."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from prfaas.kvcache.blocks import NEXT, BlockClass, BlockPool, BlockState, Fit, Shortage, Span, Wanted

BLOCK = 64


def pool(blocks: int) -> BlockPool:
    return BlockPool(blocks * BLOCK, BLOCK)


def test_a_span_is_as_long_as_asked_and_takes_whole_blocks():
    blocks = pool(10)
    assert blocks.reserve("a", 65) == Span(offset=0, nbytes=65, generation=1)
    assert blocks.free_bytes == 8 * BLOCK
    assert blocks.reserve("b", 1) == Span(offset=2 * BLOCK, nbytes=1, generation=1)


def test_what_does_not_fit_in_one_run_is_refused_whole():
    """R19: nobody waits with half of what it needs, and a refusal takes nothing."""
    blocks = pool(4)
    for owner in "abcd":
        assert blocks.reserve(owner, BLOCK)
    blocks.free("a")
    blocks.free("c")
    assert blocks.reserve("e", 2 * BLOCK) is None
    assert blocks.free_bytes == 2 * BLOCK
    assert blocks.reserve("f", BLOCK) is not None


@pytest.mark.parametrize("order", ["abc", "acb", "bac", "bca", "cab", "cba"])
def test_neighbours_grow_together_when_freed(order: str):
    blocks = pool(3)
    for owner in "abc":
        blocks.reserve(owner, BLOCK)
    for owner in order:
        blocks.free(owner)
        blocks.check()
    assert blocks.reserve("all", 3 * BLOCK) == Span(0, 3 * BLOCK, 4)


def test_the_smallest_run_that_fits_is_taken():
    """A short sequence does not break the long run that a long one will need."""
    blocks = pool(10)
    for owner, size in (("big", 5), ("x", 1), ("small", 2), ("y", 2)):
        blocks.reserve(owner, size * BLOCK)
    blocks.free("big")
    blocks.free("small")
    span = blocks.reserve("new", 2 * BLOCK)
    assert span is not None and span.offset == 6 * BLOCK


def test_freeing_twice_changes_nothing():
    """The second free must not touch the next holder."""
    blocks = pool(2)
    blocks.reserve("a", 2 * BLOCK)
    blocks.free("a")
    successor = blocks.reserve("b", 2 * BLOCK)
    blocks.free("a")
    assert blocks.span("b") == successor
    assert blocks.free_bytes == 0


def test_field_B1_the_next_holder_has_another_generation():
    """Frames for the former holder of the same bytes can be told apart."""
    blocks = pool(1)
    generations = set()
    for owner in "abcde":
        span = blocks.reserve(owner, BLOCK)
        assert span is not None and span.offset == 0
        generations.add(span.generation)
        blocks.free(owner)
    assert len(generations) == 5 and 0 not in generations


def test_nothing_can_be_reserved_even_from_a_full_pool():
    """The cache of an empty sequence has no bytes, yet somebody owns it."""
    blocks = pool(1)
    blocks.reserve("a", BLOCK)
    assert blocks.reserve("empty", 0) == Span(0, 0, 1)
    assert blocks.spans == 2
    blocks.free("empty")
    assert blocks.spans == 1 and blocks.free_bytes == 0
    blocks.check()


def test_bytes_beyond_the_last_whole_block_are_not_used():
    assert BlockPool(3 * BLOCK - 1, BLOCK).total_bytes == 2 * BLOCK
    assert BlockPool(BLOCK - 1, BLOCK).reserve("a", 1) is None


def wanted(*owners: str, blocks: int = 1, fit: Fit = Fit.BEST) -> list[Wanted]:
    return [Wanted(owner, blocks * BLOCK, fit) for owner in owners]


def test_R19_several_spans_are_reserved_together_or_not_at_all():
    blocks = pool(4)
    assert blocks.reserve_all(wanted("a", "b", blocks=3), BlockClass.PREFIX) is Shortage.ROOM
    blocks.reserve("x", BLOCK)
    blocks.reserve("y", BLOCK)
    blocks.free("x")
    assert blocks.reserve_all(wanted("a", "b", "c"), BlockClass.PREFIX) != Shortage.ROOM
    for owner in "abc":
        blocks.free(owner)
    assert blocks.reserve_all([*wanted("a", blocks=2), *wanted("b")], BlockClass.PREFIX) == (
        Span(2 * BLOCK, 2 * BLOCK, 5),
        Span(0, BLOCK, 5),
    )
    blocks.check()


def test_R19_what_fits_in_bytes_and_not_in_runs_leaves_nothing_behind():
    blocks = pool(5)
    for owner in "abcde":
        blocks.reserve(owner, BLOCK)
    for owner in "abd":
        blocks.free(owner)
    assert blocks.reserve_all([*wanted("p"), *wanted("q", blocks=2)], BlockClass.PREFIX) != Shortage.ROOM
    blocks.free("p")
    blocks.free("q")
    assert blocks.reserve_all([*wanted("p", fit=Fit.LOW), *wanted("q", blocks=2)], BlockClass.PREFIX) is Shortage.ROOM
    assert blocks.spans == 2 and blocks.free_bytes == 3 * BLOCK
    blocks.check()


def test_R19_a_class_always_has_its_floor():
    """Cache cannot starve hand-offs, nor a burst of hand-offs flush the cache; between the floors all may grow."""
    floors = {BlockClass.PREFIX: 3 * BLOCK, BlockClass.TRANSFER: 4 * BLOCK}
    blocks = BlockPool(10 * BLOCK, BLOCK, floors)
    assert blocks.reserve_all(wanted("a", blocks=7), BlockClass.PREFIX) is Shortage.FLOOR
    assert blocks.reserve_all(wanted("a", blocks=6), BlockClass.PREFIX) != Shortage.FLOOR
    assert blocks.reserve("b", BLOCK, BlockClass.SCRATCH) is None
    assert blocks.reserve("b", 4 * BLOCK, BlockClass.TRANSFER) is not None
    blocks.free("a")
    assert blocks.reserve("c", 4 * BLOCK, BlockClass.TRANSFER) is None
    assert blocks.reserve("c", 3 * BLOCK, BlockClass.TRANSFER) is not None
    assert blocks.reserve("d", 3 * BLOCK, BlockClass.PREFIX) is not None
    blocks.check()


def test_R20_a_quota_is_charged_at_reserve_and_returned_at_free():
    """In whole blocks, each tenant its own."""
    blocks = BlockPool(10 * BLOCK, BLOCK, quota_bytes=3 * BLOCK, quotas={"big": 5 * BLOCK})
    assert blocks.reserve_all([Wanted("a", BLOCK + 1)], BlockClass.PREFIX, "tom") != Shortage.QUOTA
    assert blocks.charged_bytes("tom") == 2 * BLOCK
    assert blocks.reserve_all(wanted("b", blocks=2), BlockClass.PREFIX, "tom") is Shortage.QUOTA
    assert blocks.over_quota_bytes("tom", 2 * BLOCK) == BLOCK
    assert blocks.reserve_all(wanted("c", blocks=5), BlockClass.PREFIX, "big") != Shortage.QUOTA
    blocks.free("a")
    assert blocks.charged_bytes("tom") == 0
    assert blocks.reserve_all(wanted("b", blocks=3), BlockClass.PREFIX, "tom") != Shortage.QUOTA
    blocks.check()


def test_small_spans_and_large_ones_fill_from_opposite_ends():
    """Or small ones would end up between large ones, and no run would be long enough for the next."""
    blocks = pool(12)
    blocks.reserve_all([*wanted("k1", fit=Fit.LOW), *wanted("s1", blocks=3, fit=Fit.HIGH)], BlockClass.PREFIX)
    spans = blocks.reserve_all([*wanted("k2", fit=Fit.LOW), *wanted("s2", blocks=3, fit=Fit.HIGH)], BlockClass.PREFIX)
    assert not isinstance(spans, Shortage)
    assert [span.offset // BLOCK for span in spans] == [1, 6]
    blocks.free("k1")
    blocks.free("s1")
    spans = blocks.reserve_all([*wanted("k3", fit=Fit.LOW), *wanted("s3", blocks=3, fit=Fit.HIGH)], BlockClass.PREFIX)
    assert not isinstance(spans, Shortage)
    assert [span.offset // BLOCK for span in spans] == [0, 9]


def test_R1_a_block_goes_through_its_states_and_no_others():
    """Immutable once sealed; what is still being written does not become free."""
    blocks = pool(4)
    blocks.reserve("a", 2 * BLOCK - 5, BlockClass.PREFIX)
    assert blocks.state("a") is BlockState.RESERVED and blocks.padding_bytes(BlockClass.PREFIX) == 5
    for state in (BlockState.FILLING, BlockState.SEALED, BlockState.PUBLISHED, BlockState.EVICTING):
        blocks.move("a", state)
        assert blocks.used_bytes(BlockClass.PREFIX, state) == blocks.used_bytes(BlockClass.PREFIX) == 2 * BLOCK
        blocks.check()
    with pytest.raises(AssertionError):
        blocks.move("a", BlockState.FILLING)
    blocks.free("a")
    assert blocks.state("a") is BlockState.FREE
    blocks.reserve("b", BLOCK)
    blocks.move("b", BlockState.FILLING)
    with pytest.raises(AssertionError):
        blocks.free("b")
    blocks.move("b", BlockState.QUARANTINE)
    blocks.free("b")
    assert blocks.free_bytes == 4 * BLOCK


class PoolMachine(RuleBasedStateMachine):
    """Whatever the order of reserve and free: no byte has two owners, and all of it comes back."""

    owners = Bundle("owners")
    LIMITED = False

    def new(self) -> BlockPool:
        return pool(24)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = self.new()
        self.held: dict[str, Span] = {}
        self.past: list[Span] = []
        self.count = 0

    @rule(target=owners, nbytes=st.integers(0, 10 * BLOCK))
    def reserve(self, nbytes: int):
        self.count += 1
        owner = f"o{self.count}"
        span = self.blocks.reserve(owner, nbytes)
        if span is None:
            assert self.LIMITED or self._longest_gap() < -(-nbytes // BLOCK)
            return multiple()
        assert span.nbytes == nbytes and span.offset % BLOCK == 0
        assert span.offset + nbytes <= self.blocks.total_bytes
        assert all(span.generation != before.generation for before in self.past if overlap(span, before))
        self.held[owner] = span
        return owner

    @rule(owner=consumes(owners))
    def free(self, owner: str):
        self.blocks.free(owner)
        self.past.append(self.held.pop(owner))

    @rule(owner=st.sampled_from(["o1", "o2", "never"]))
    def free_again(self, owner: str):
        if owner not in self.held:
            self.blocks.free(owner)

    @rule(
        kind=st.sampled_from(BlockClass),
        sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
        tenant=st.sampled_from("xy"),
    )
    def reserve_some(self, kind: BlockClass, sizes: list[int], tenant: str):
        """R19: all of them or nothing."""
        some = [Wanted(f"m{self.count}.{n}", size * BLOCK, list(Fit)[size % 3]) for n, size in enumerate(sizes)]
        self.count += 1
        free_bytes = self.blocks.free_bytes
        spans = self.blocks.reserve_all(some, kind, tenant)
        if isinstance(spans, Shortage):
            assert self.blocks.free_bytes == free_bytes
            return
        self.held |= {each.owner: span for each, span in zip(some, spans, strict=True)}

    @rule(pick=st.integers(0, 100), state=st.sampled_from(BlockState))
    def move(self, pick: int, state: BlockState):
        if self.held:
            owner = sorted(self.held)[pick % len(self.held)]
            if owner.startswith("m") and state in NEXT[self.blocks.state(owner)]:
                if state is BlockState.FREE:
                    self.blocks.free(owner)
                    self.past.append(self.held.pop(owner))
                else:
                    self.blocks.move(owner, state)

    @invariant()
    def sound(self):
        """R23 after every step."""
        self.blocks.check()
        used_bytes = sum(self.blocks.used_bytes(kind, state) for kind in BlockClass for state in BlockState)
        assert used_bytes + self.blocks.free_bytes == self.blocks.total_bytes
        assert self.blocks.spans == len(self.held)
        spans = sorted(self.held.values(), key=lambda span: (span.offset, span.nbytes))
        assert not any(overlap(a, b) for i, a in enumerate(spans) for b in spans[i + 1 :])

    def _longest_gap(self) -> int:
        taken = {b for span in self.held.values() for b in range(span.offset // BLOCK, block_end(span))}
        line = "".join("x" if b in taken else "." for b in range(24))
        return max(map(len, line.split("x")))


def block_end(span: Span) -> int:
    return -(-(span.offset + span.nbytes) // BLOCK) if span.nbytes else span.offset // BLOCK


def overlap(a: Span, b: Span) -> bool:
    starts = max(a.offset, b.offset) // BLOCK
    return starts < min(block_end(a), block_end(b))


class LimitedMachine(PoolMachine):
    """With floors and quotas, which `check` asserts."""

    LIMITED = True

    def new(self) -> BlockPool:
        floors = {BlockClass.PREFIX: 5 * BLOCK, BlockClass.TRANSFER: 6 * BLOCK}
        return BlockPool(24 * BLOCK, BLOCK, floors, quota_bytes=9 * BLOCK)


TestPoolMachine = PoolMachine.TestCase
TestLimitedMachine = LimitedMachine.TestCase
