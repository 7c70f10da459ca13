"""The small pure parts of the vLLM engine: wishes, pages, the shelf, the geometry."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.engine.vllm.geometry import attention_layer, in_order, recurrent_layer
from prfaas.engine.vllm.paging import Pages, pages
from prfaas.engine.vllm.shelf import Shelf
from prfaas.engine.vllm.wish import Wish, params_of, wish_of
from prfaas.kvcache.layout import ALIGN_BYTES


def test_a_wish_comes_back():
    wish = Wish("a", load=7, save=True)
    assert wish_of(params_of(wish)) == wish


@pytest.mark.parametrize(
    "params", [None, {}, {"prfaas": 7}, {"prfaas": {"attempt": "a", "load": -1}}, {"prfaas": {"attempt": "a", "at": 0}}]
)
def test_what_makes_no_sense_is_no_wish(params: dict[str, object] | None):
    """It comes from a request; an error in a server's scheduler would end the server."""
    assert wish_of(params) is None


def test_pages_cover_the_rows():
    assert pages([5, 6, 7], 4, 5, 9) == Pages((6, 7), 1)
    assert pages([5, 6, 7], 4, 0, 12) == Pages((5, 6, 7), 0)
    with pytest.raises(ValueError, match="not in 3 blocks of 4"):
        pages([5, 6, 7], 4, 5, 13)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 400), st.booleans()), max_size=40))
def test_nobody_shares_a_place_on_the_shelf(steps: list[tuple[int, int, bool]]):
    shelf, nbytes, taken = Shelf(1024), 1024, dict[str, list[tuple[int, int]]]()
    for number, size, takes in steps:
        owner = str(number)
        if not takes:
            shelf.give_back(owner)
            taken.pop(owner, None)
        elif (offset := shelf.take(owner, size)) is not None:
            assert offset % ALIGN_BYTES == 0 and offset + size <= nbytes
            spans = [span for spans in taken.values() for span in spans]
            assert all(offset + size <= start or end <= offset for start, end in spans)
            taken.setdefault(owner, []).append((offset, offset + size))
        assert len(shelf) == sum(map(len, taken.values()))
    for owner in taken:
        shelf.give_back(owner)
    assert shelf.take("all", nbytes) == 0


def test_geometry_is_in_the_order_of_the_model():
    """By number, not by spelling; what a page of states holds inside is part of the layout."""
    attention = attention_layer("model.layers.10.attn", 0, 16, "float32", heads=2, key_width=32, value_width=32)
    states = [("float32", (3, 8))]
    recurrent = recurrent_layer("model.layers.2.mixer", 1, 16, "mamba2", states, 96)
    geometry = in_order([attention, recurrent])
    assert [layer.name for layer in geometry.layers] == ["model.layers.2.mixer", "model.layers.10.attn"]
    assert (geometry.layout.state_bytes, geometry.layout.bytes_per_token) == (96, 512)
    turned = recurrent_layer("model.layers.2.mixer", 1, 16, "mamba2", [("float32", (8, 3))], 96)
    assert in_order([attention, turned]).layout.digest != geometry.layout.digest
