"""What of a sequence is put into the cache, and how a prefill runs that goes on from there."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from prfaas.kvcache.layout import Extent
from prfaas.kvcache.placement import TRANSFER_TOKENS
from prfaas.kvcache.states import Checkpoint
from prfaas.node.cache_books import CacheBooks
from prfaas.node.cache_plan import Piece, alignment_tokens, handoff, holdable, pieces, schedule, sent_ends, whole_units
from prfaas.request import Match

PROVEN = [Checkpoint(576, proven=True)]


def test_rows_and_the_state_within_them_are_two_puts():
    """A span has states at its end only: first up to the state, then what is behind it."""
    assert pieces(700, PROVEN) == (Piece(576, state=True), Piece(640))


def test_a_partial_unit_is_not_put():
    """Only whole units have keys (R13)."""
    assert pieces(63, ()) == ()
    assert pieces(639, PROVEN) == (Piece(576, state=True),)


def test_a_put_is_no_more_than_a_transfer_moves():
    """A state where one ends comes with it."""
    states = [Checkpoint(8192, proven=False), Checkpoint(8256, proven=True)]
    assert pieces(8300, states) == (
        Piece(8192, state=True, proven=False),
        Piece(8256, state=True),
    )


def test_what_the_cache_has_is_not_offered_again():
    """Rows that were found there are left out; a state that the prefill has taken is new."""
    assert pieces(8300, [Checkpoint(64, proven=True)], known_tokens=8192) == (
        Piece(64, state=True),
        Piece(8256),
    )


@given(st.integers(0, 30_000), st.sets(st.integers(1, 400)), st.integers(0, 30_000))
def test_pieces_cover_all_whole_units_and_every_state(kv_tokens: int, units: set[int], known: int):
    """Whatever there is: rising, every state once, no row that is new left out, and none too much for a transfer."""
    states = [Checkpoint(64 * unit, proven=True) for unit in sorted(units)]
    found = pieces(kv_tokens, states, known)
    stops = [piece.stop for piece in found]
    assert stops == sorted(set(stops)) and all(stop % 64 == 0 for stop in stops)
    assert {piece.stop for piece in found if piece.state} == {
        each.tokens for each in states if each.tokens <= kv_tokens
    }
    whole = whole_units(kv_tokens)
    assert whole <= known or stops[-1] == whole
    there = [0, *(end for end in range(TRANSFER_TOKENS, whole + 1, TRANSFER_TOKENS) if end <= known)]
    steps = sorted({*there, *stops})
    assert all(b - a <= TRANSFER_TOKENS for a, b in itertools.pairwise(steps))


def test_chunks_end_where_states_are_kept():
    """At the junction with an older prompt and at the last whole unit (R6, R8); nowhere before what is resumed."""
    plan = schedule(1000, Match(joint=256, kv=448), 256, keeps_states=True)
    assert plan.checkpoints == (448, 960)
    assert plan.ends == (448, 512, 768, 960, 1000)


def test_a_model_without_states_keeps_none():
    """It can go on wherever its rows end."""
    assert schedule(1000, Match(joint=448, kv=448), 256, keeps_states=False).ends == (512, 768, 1000)


def test_a_prompt_that_is_there_whole_has_nothing_to_compute():
    """The engine restores it, and is done."""
    assert schedule(640, Match(joint=640, kv=640), 256, keeps_states=True).ends == ()


def test_what_another_region_had_is_kept_here_too():
    """The states that were pulled are a checkpoint like those that are computed; no chunk ends there (R5)."""
    plan = schedule(1000, Match(joint=448, kv=448), 256, keeps_states=True, new_to_us=True)
    assert plan.checkpoints == (448, 960) and plan.ends == (512, 768, 960, 1000)


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 46), st.integers(1, 512))
def test_what_is_sent_rises_from_what_is_held(stop: int, held: int, resumed_units: int, chunk_tokens: int):
    """The parts of a hand-off lead from what the other side has to the end, and every one of them comes to exist: with
    the restored rows or with a chunk."""
    held, resumed = min(held, holdable(stop)), min(64 * resumed_units, whole_units(stop))
    plan = schedule(stop, Match(joint=resumed, kv=resumed), chunk_tokens, keeps_states=True)
    ends = sent_ends(held, resumed, plan.ends)
    assert all(a < b for a, b in itertools.pairwise((held, *ends)))
    assert (ends[-1] if ends else held) == stop or stop == 0
    assert set(ends) <= {resumed, *plan.ends}


@given(st.integers(0, 10_000))
def test_a_row_at_least_is_sent(stop: int):
    """However much is held: a transfer of nothing could not be told from none."""
    extent = handoff(holdable(stop), stop)
    assert extent.first < extent.stop or stop == 0
    assert extent == Extent(whole_units(max(0, stop - 1)), stop, (stop,) if stop else ())


def test_waste_is_told_by_its_cause():
    """Rows without a state to resume at, and rows of a unit that is not whole."""
    books = CacheBooks()
    books.looked_up(1000, Match(joint=256, kv=448))
    assert books.wasted_tokens == {"missing_state": 192, "alignment": 0}
    books.looked_up(1000, Match(joint=960, kv=960))
    assert books.wasted_tokens == {"missing_state": 192, "alignment": 40}
    assert books.hit_tokens == {"kv": 1408, "joint": 1216} and books.looked_up_tokens == 2000
    books.looked_up(1000, Match())
    books.not_looked_up()
    assert books.lookups == {"hit": 2, "miss": 1, "failed": 1} and books.looked_up_tokens == 3000
    assert alignment_tokens(30, Match()) == 0
