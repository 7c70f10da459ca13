"""Spans and parts follow from the layout alone: both ends of a transfer derive the same."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.kvcache.layout import (
    ALIGN_BYTES,
    DTYPE_BYTES,
    KvLayout,
    TensorKind,
    TensorSpec,
    chunk_ends,
    namespace_digest,
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


def test_a_prefix_of_a_span_is_where_its_parts_are():
    """The parts of the first chunks, whole tensor by whole tensor; the whole span is a prefix of itself."""
    dense = KvLayout(layers=((KEYS,), (KEYS, KEYS)))
    first = [part for part in dense.parts(9, (4, 8, 9)) if part.stop <= 8]
    for whole in dense.prefix(9, 8):
        pieces = [part for part in first if (part.layer, part.tensor) == (whole.layer, whole.tensor)]
        assert (whole.offset, whole.nbytes) == (pieces[0].offset, sum(part.nbytes for part in pieces))
    assert HYBRID.prefix(5, 5) == HYBRID.parts(5, (5,))
    assert HYBRID.prefix(5, 0) == ()
    with pytest.raises(AssertionError, match="a state has no prefix"):
        HYBRID.prefix(5, 4)


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
