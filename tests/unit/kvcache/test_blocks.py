"""The pool gives out runs that nobody else has, takes them back whole, and can tell one holder from the next."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from prfaas.kvcache.blocks import BlockPool, Span

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


class PoolMachine(RuleBasedStateMachine):
    """Whatever the order of reserve and free: no byte has two owners, and all of it comes back."""

    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = pool(24)
        self.held: dict[str, Span] = {}
        self.past: list[Span] = []
        self.count = 0

    @rule(target=owners, nbytes=st.integers(0, 10 * BLOCK))
    def reserve(self, nbytes: int):
        self.count += 1
        owner = f"o{self.count}"
        span = self.blocks.reserve(owner, nbytes)
        if span is None:
            assert self._longest_gap() < -(-nbytes // BLOCK)
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

    @invariant()
    def sound(self):
        self.blocks.check()
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


TestPoolMachine = PoolMachine.TestCase
