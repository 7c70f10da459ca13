"""Parts are cut into pieces that both ends number alike; what is known of pieces is kept in ranges."""

from hypothesis import given
from hypothesis import strategies as st

from prfaas.kvcache.layout import Part
from prfaas.transfer.pieces import Pieces, Ranges


def parts(*sizes: int) -> tuple[Part, ...]:
    return tuple(Part(index, 0, index, 0, 1, 1000 * index, size) for index, size in enumerate(sizes))


def test_the_last_piece_of_a_part_is_what_is_left():
    pieces = Pieces(parts(250, 100, 30), piece_bytes=100)
    assert (pieces.count, pieces.nbytes) == (5, 380)
    assert [pieces.of_part(index) for index in range(3)] == [(0, 3), (3, 4), (4, 5)]
    run = pieces.run(2, 3)
    assert (run.first, run.count, run.offset, run.nbytes) == (2, 1, 200, 50)


def test_field_F4_a_run_takes_what_lies_together_and_no_more():
    """Consecutive pieces are one frame, also of several parts; it says nowhere where those lie. What lies together is
    one place. A frame has no more parts than one call can take, wherever these lie at either end."""
    pieces = Pieces(parts(250, 100, 900, 30), piece_bytes=100)
    run = pieces.run(0, 6)
    assert (run.first, run.count, run.offset, run.nbytes) == (0, 6, 0, 550)
    assert run.places == ((0, 250), (1000, 100), (2000, 200))
    assert pieces.run(2, 14, parts=2) == pieces.run(2, 4)
    assert pieces.run(2, 14, parts=3) == pieces.run(2, 13)
    assert pieces.run(2, 14, apart_bytes=150) == pieces.run(2, 4)
    assert pieces.run(2, 14, apart_bytes=151) == pieces.run(2, 13)
    assert pieces.run(2, 14).places == ((200, 50), (1000, 100), (2000, 900), (3000, 30))
    together = Pieces(parts(1000, 1000, 500), piece_bytes=100)
    assert together.run(5, 22).places == ((500, 1700),)
    assert together.run(5, 22, apart_bytes=1) == together.run(5, 22)
    assert together.run(5, 22, parts=2) == together.run(5, 20)


def test_a_frame_takes_as_many_pieces_as_it_has_room_for():
    pieces = Pieces(parts(250, 0, 100, 30), piece_bytes=100)
    assert [pieces.within(0, nbytes) for nbytes in (0, 99, 100, 249, 250, 349, 350, 379, 380, 999)] == [
        0,
        0,
        1,
        2,
        3,
        3,
        4,
        4,
        5,
        5,
    ]
    assert [pieces.within(2, nbytes) for nbytes in (49, 50, 149, 150, 180)] == [2, 3, 3, 4, 5]


def test_an_empty_part_has_no_pieces():
    pieces = Pieces(parts(0, 100, 0, 0, 50), piece_bytes=100)
    assert pieces.count == 2 and pieces.of_part(0) == (0, 0) and pieces.of_part(4) == (1, 2)
    assert pieces.run(0, 2, parts=2).places == ((1000, 100), (4000, 50))
    assert pieces.run(0, 2, parts=1) == pieces.run(0, 1)


@given(st.lists(st.integers(0, 500), max_size=12), st.data())
def test_runs_cover_a_transfer_once(sizes: list[int], data: st.DataObject):
    """Cut anywhere, every byte of every part is in one run, at its place."""
    pieces = Pieces(parts(*sizes), piece_bytes=100)
    at, covered = 0, []
    while at < pieces.count:
        run = pieces.run(at, min(pieces.count, at + data.draw(st.integers(1, 4))), data.draw(st.integers(1, 3)))
        assert run.nbytes == pieces.bytes_of(run.first, run.stop) == sum(nbytes for _, nbytes in run.places)
        covered += [byte for offset, nbytes in run.places for byte in range(offset, offset + nbytes)]
        at = run.stop
    assert covered == [1000 * index + byte for index, size in enumerate(sizes) for byte in range(size)]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=25))
def test_ranges_are_a_set(spans: list[tuple[int, int]]):
    """As few ranges as can be, in order."""
    ranges, model = Ranges(), set()
    for first, length in spans:
        wanted = set(range(first, first + length))
        assert ranges.meets(first, first + length) == bool(wanted & model)
        assert ranges.covers(first, first + length) == (wanted <= model)
        if not wanted & model:
            ranges.add(first, first + length)
            model |= wanted
    assert ranges.count == len(model)
    assert [number for first, stop in ranges for number in range(first, stop)] == sorted(model)
    starts = [number for number in sorted(model) if number - 1 not in model]
    assert [first for first, _ in ranges] == starts
    assert all((number in ranges) == (number in model) for number in range(80))
