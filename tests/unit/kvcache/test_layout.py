"""Spans and parts follow from the layout alone: both ends of a transfer derive the same."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.kvcache.layout import (
    ALIGN_BYTES,
    DTYPE_BYTES,
    Extent,
    KvLayout,
    Part,
    TensorKind,
    TensorSpec,
    Window,
    chunk_ends,
    namespace_digest,
    whole,
)

KEYS = TensorSpec("keys", TensorKind.TOKENS, "bfloat16", (2, 8))
CONV = TensorSpec("conv_state", TensorKind.STATE, "float32", (6, 3))
HYBRID = KvLayout(layers=((CONV,), (KEYS, KEYS)))

tensors = st.builds(
    TensorSpec,
    st.just("t"),
    st.sampled_from(TensorKind),
    st.sampled_from(sorted(DTYPE_BYTES)),
    st.lists(st.integers(1, 5), max_size=3).map(tuple),
)
layouts = st.lists(st.lists(tensors, max_size=3).map(tuple), min_size=1, max_size=4).map(tuple).map(KvLayout)


def test_the_size_of_a_cache_is_a_line():
    """S_kv(l) = a + b*l; nothing exists of an empty sequence."""
    assert HYBRID.state_bytes == 6 * 3 * 4
    assert HYBRID.bytes_per_token == 2 * (2 * 8 * 2)
    assert HYBRID.size_bytes(10) == 72 + 640
    assert HYBRID.size_bytes(0) == HYBRID.span_bytes(0) == 0


def test_parts_come_in_the_order_in_which_prefill_makes_them():
    """Chunk by chunk, layer by layer; a state exists only after the last chunk, and is valid at its end."""
    parts = HYBRID.parts(5, (4, 5))
    assert [(p.layer, p.tensor, p.start, p.stop) for p in parts] == [
        (1, 0, 0, 4),
        (1, 1, 0, 4),
        (0, 0, 0, 5),
        (1, 0, 4, 5),
        (1, 1, 4, 5),
    ]
    assert [p.index for p in parts] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("ends", [(), (4,), (4, 6), (3, 3, 5), (4, 3, 5), (0, 5), (-1, 5)])
def test_chunk_ends_that_do_not_rise_to_the_length_are_refused(ends: tuple[int, ...]):
    with pytest.raises(ValueError, match="do not rise"):
        HYBRID.parts(5, ends)


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [(0, ()), (1, (1,)), (7, (7,)), (8, (8,)), (9, (8, 9)), (24, (8, 16, 24)), (25, (8, 16, 24, 25))],
)
def test_chunks_end_at_absolute_multiples_and_at_the_end(tokens: int, ends: tuple[int, ...]):
    assert chunk_ends(tokens, 8) == ends


@given(layouts, st.integers(0, 40), st.integers(1, 16))
def test_parts_fill_a_span_without_touching_each_other(layout: KvLayout, tokens: int, chunk_tokens: int):
    """Every byte of the sequence is in exactly one part, every part is inside the span, regions are aligned."""
    parts = layout.parts(tokens, chunk_ends(tokens, chunk_tokens))
    ranges = sorted((part.offset, part.offset + part.nbytes) for part in parts if part.nbytes)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
    assert sum(part.nbytes for part in parts) == layout.size_bytes(tokens) <= layout.span_bytes(tokens)
    assert not ranges or ranges[-1][1] <= layout.span_bytes(tokens)
    assert all(offset % ALIGN_BYTES == 0 for layer in layout.offsets(tokens) for offset in layer)


@given(layouts, st.integers(1, 40), st.integers(1, 16), st.integers(1, 16))
def test_where_bytes_lie_does_not_depend_on_the_chunks(layout: KvLayout, tokens: int, ours: int, theirs: int):
    """A reader needs the length only, not how the writer cut its prefill."""

    def last_rows(chunk_tokens: int) -> dict[tuple[int, int], int]:
        parts = layout.parts(tokens, chunk_ends(tokens, chunk_tokens))
        return {(part.layer, part.tensor): part.offset + part.nbytes for part in parts if part.stop == tokens}

    assert last_rows(ours) == last_rows(theirs)


def test_a_span_is_one_window():
    """Where parts lie in a window is where they lie in a span of so many rows."""
    parts = HYBRID.extent_parts(whole(5), (4, 5), (Window(0, 5, 0, state=True),))
    assert parts == HYBRID.parts(5, (4, 5)) and HYBRID.window_bytes(5, True) == HYBRID.span_bytes(5)
    assert HYBRID.extent_parts(whole(0), (), ()) == HYBRID.parts(0, ())


def test_states_leave_with_the_rows_that_they_belong_to():
    """The state of where an extent begins is there before anything is computed; within a chunk order is by layer."""
    windows = (Window(2, 2, 0, state=True), Window(2, 9, 128, state=True))
    parts = HYBRID.extent_parts(Extent(2, 9, (2, 9)), (5, 9), windows)
    assert [(part.layer, part.tensor, part.start, part.stop) for part in parts] == [
        (0, 0, 0, 2),
        (1, 0, 2, 5),
        (1, 1, 2, 5),
        (0, 0, 0, 9),
        (1, 0, 5, 9),
        (1, 1, 5, 9),
    ]
    assert [part.index for part in parts] == list(range(6))
    assert HYBRID.extent_bytes(Extent(2, 9, (2, 9))) == sum(part.nbytes for part in parts) == 2 * 72 + 7 * 64


ROWS = (Window(0, 4, 0), Window(4, 9, 4096))
STATES = (Window(4, 4, 8192, state=True), Window(9, 9, 12288, state=True))


@pytest.mark.parametrize(
    ("extent", "ends", "windows", "why"),
    [
        (Extent(2, 9), (9,), ROWS, "no window holds the rows 2:9"),
        (Extent(0, 9), (4, 9), ROWS[1:], "no window holds the rows 0:4"),
        (Extent(0, 10), (4, 10), ROWS, "no window holds the rows 4:10"),
        (Extent(0, 9, (4, 9)), (4, 9), (*ROWS, STATES[0]), "no window holds the states at 9"),
        (Extent(0, 9, (5,)), (4, 9), (*ROWS, *STATES), "at no chunk end"),
        (Extent(0, 9, (9, 4)), (4, 9), (*ROWS, *STATES), "do not rise"),
        (Extent(0, 9), (4, 8), ROWS, "do not rise from 0 to 9"),
        (Extent(4, 9), (4, 9), ROWS, "do not rise from 4 to 9"),
        (Extent(4, 2), (), ROWS, "do not rise from 4 to 2"),
        (Extent(0, 4), (4,), (Window(0, 4, 0), Window(3, 9, 4096)), "hold the same rows"),
        (Extent(0, 4, (4,)), (4,), (Window(0, 4, 0, state=True), STATES[0]), "hold the same states"),
    ],
)
def test_windows_that_do_not_hold_an_extent_are_refused(
    extent: Extent, ends: tuple[int, ...], windows: tuple[Window, ...], why: str
):
    """Every part has one place, or nothing is moved at all."""
    with pytest.raises(ValueError, match=why):
        HYBRID.extent_parts(extent, ends, windows)


@pytest.mark.parametrize(
    "extent", [Extent(0, 10), Extent(-1, 9), Extent(6, 5), Extent(0, 9, (5,)), Extent(4, 9, (9, 4)), Extent(5, 9, (4,))]
)
def test_what_windows_do_not_hold_is_found_before_there_are_chunks(extent: Extent):
    windows = (*ROWS, *STATES)
    HYBRID.check_holds(Extent(2, 8, (4,)), windows)
    HYBRID.check_holds(Extent(9, 9, (9,)), windows)
    with pytest.raises(ValueError, match=r"no window holds|makes no sense"):
        HYBRID.check_holds(extent, windows)


def test_windows_lie_in_the_pool_and_not_in_each_other():
    """A window is as long as its tensors, each on its boundary."""
    rows, state = HYBRID.window_bytes(3, False), HYBRID.window_bytes(0, True)
    assert (rows, state) == (2 * 128, 128)
    windows = (Window(3, 6, rows), Window(6, 6, 2 * rows, state=True), Window(0, 3, 0))
    HYBRID.check_windows(windows, 2 * rows + state)
    for wrong in (
        (*windows, Window(9, 12, rows - 1)),
        (Window(0, 3, -1),),
        (Window(4, 3, 0),),
        (Window(3, 6, 2 * rows + state),),
        (*windows[1:], Window(3, 8, rows)),
    ):
        with pytest.raises(ValueError, match=r"makes no sense|in a pool of"):
            HYBRID.check_windows(wrong, 2 * rows + state)


@st.composite
def extents(draw: st.DrawFn) -> tuple[KvLayout, Extent, tuple[int, ...]]:
    """Of any layout, with any chunks and states."""
    edges = sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=6)))
    states = sorted(draw(st.sets(st.sampled_from(edges))))
    return draw(layouts), Extent(edges[0], edges[-1], tuple(states)), tuple(edges[1:])


def placed(draw: st.DrawFn, layout: KvLayout, extent: Extent, ends: tuple[int, ...]) -> tuple[Window, ...]:
    """Windows that hold the extent, cut at some of the ends, perhaps with more before and behind, in any order and at
    any distance in the pool. A state is behind rows, or by itself."""
    before, behind = draw(st.integers(0, min(3, extent.first))), draw(st.integers(0, 3))
    cuts = sorted(draw(st.sets(st.sampled_from(ends)))) if ends else []
    edges = [extent.first - before, *(cut for cut in cuts if cut < extent.stop), extent.stop + behind]
    lone, windows, at = set(extent.states), [], 0
    for first, stop in itertools.pairwise(edges):
        state = stop in lone and draw(st.booleans())
        lone -= {stop} if state else set()
        windows.append((first, stop, state))
    windows += [(boundary, boundary, True) for boundary in sorted(lone)]
    found = []
    for first, stop, state in draw(st.permutations(windows)):
        at += draw(st.sampled_from([0, 1, 1000]))
        found.append(Window(first, stop, at, state))
        at += layout.window_bytes(stop - first, state)
    return tuple(found)


def rows_and_states(layout: KvLayout, parts: tuple[Part, ...]) -> list[tuple[int, int, int]]:
    """What each part stands for: (layer, tensor, row), or (layer, tensor, boundary) of a state."""
    return [
        (part.layer, part.tensor, row)
        for part in parts
        for row in (
            range(part.start, part.stop)
            if layout.layers[part.layer][part.tensor].kind is TensorKind.TOKENS
            else [part.stop]
        )
    ]


@given(extents(), st.data())
def test_both_ends_of_a_transfer_derive_the_same_parts_wherever_they_lie(
    drawn: tuple[KvLayout, Extent, tuple[int, ...]], data: st.DataObject
):
    """All rows and states of the extent, each in one part, and the same at both ends but for their places: there no
    part touches another, and each lies inside its window."""
    layout, extent, ends = drawn
    sides = [placed(data.draw, layout, extent, ends) for _ in range(2)]
    ours, theirs = (layout.extent_parts(extent, ends, windows) for windows in sides)
    assert [msgspec.structs.replace(part, offset=0) for part in ours] == [
        msgspec.structs.replace(part, offset=0) for part in theirs
    ]
    wanted = [
        (layer, number, at)
        for layer, tensors in enumerate(layout.layers)
        for number, tensor in enumerate(tensors)
        for at in (range(extent.first, extent.stop) if tensor.kind is TensorKind.TOKENS else extent.states)
    ]
    assert sorted(rows_and_states(layout, ours)) == wanted
    assert sum(part.nbytes for part in ours) == layout.extent_bytes(extent)
    for parts, windows in ((ours, sides[0]), (theirs, sides[1])):
        layout.check_holds(extent, windows)
        layout.check_windows(windows, 1 << 40)
        ranges = sorted((part.offset, part.offset + part.nbytes) for part in parts)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
        inside = [
            (each.offset, each.offset + layout.window_bytes(each.stop - each.first, each.state)) for each in windows
        ]
        assert all(any(at <= first and stop <= end for at, end in inside) for first, stop in ranges)


@given(extents(), st.data())
def test_where_a_row_lies_does_not_depend_on_the_chunks(
    drawn: tuple[KvLayout, Extent, tuple[int, ...]], data: st.DataObject
):
    """What was put in large chunks is got in small ones, or a suffix of it only."""
    layout, extent, ends = drawn
    windows = placed(data.draw, layout, extent, ends)
    part_of = {
        (part.layer, part.tensor, part.stop): part.offset + part.nbytes
        for part in layout.extent_parts(extent, ends, windows)
    }
    first = data.draw(st.sampled_from([extent.first, *ends]))
    finer = tuple(end for end in range(first + 1, extent.stop + 1))
    suffix = Extent(first, extent.stop, tuple(at for at in extent.states if at >= first))
    found = {
        (part.layer, part.tensor, part.stop): part.offset + part.nbytes
        for part in layout.extent_parts(suffix, finer, windows)
    }
    shared = part_of.keys() & found.keys()
    assert all(part_of[key] == found[key] for key in shared)
    assert shared == {key for key in part_of if key[2] > first or (key[2] == first and key in found)}


def test_a_layout_survives_the_wire():
    encoded = msgspec.msgpack.encode(HYBRID)
    decoded = msgspec.msgpack.decode(encoded, type=KvLayout)
    assert decoded == HYBRID and decoded.digest == HYBRID.digest


@pytest.mark.parametrize(
    "other",
    [
        ("w2", "t", HYBRID, 64),
        ("w", "t2", HYBRID, 64),
        ("w", "t", KvLayout(layers=((CONV,), (KEYS,))), 64),
        ("w", "t", KvLayout(layers=((CONV,), (KEYS, msgspec.structs.replace(KEYS, dtype="float16")))), 64),
        ("w", "t", HYBRID, 128),
    ],
)
def test_anything_that_changes_the_bytes_changes_the_namespace(other: tuple[str, str, KvLayout, int]):
    """R12: weights, tokenizer, dtypes, geometry, hash unit."""
    assert namespace_digest(*other) != namespace_digest("w", "t", HYBRID, 64) == namespace_digest("w", "t", HYBRID, 64)


def test_field_H4_another_division_of_a_state_is_another_namespace():
    """Nodes that hold another share of the heads, or the same bytes in other parts, never meet: not even with as many
    bytes in all."""
    half = msgspec.structs.replace(CONV, shape=(CONV.shape[0] // 2, *CONV.shape[1:]))
    layouts = [
        KvLayout(layers=(layer, (KEYS,))) for layer in ((CONV,), (half,), (half, half), (CONV, half), (half, CONV))
    ]
    assert layouts[0].state_bytes == layouts[2].state_bytes and layouts[3].state_bytes == layouts[4].state_bytes
    assert len({namespace_digest("w", "t", layout, 64) for layout in layouts}) == len(layouts)
