"""The receiver derives what must come; an offer that differs is refused by the name of what differs."""

import pytest
from msgspec.structs import replace

from prfaas.kvcache.layout import Extent, KvLayout, TensorKind, TensorSpec, Window, chunk_ends, whole
from prfaas.transfer.frames import LIMIT_BYTES, Cause, Kind, ProtocolError
from prfaas.transfer.greeting import pack, unpack
from prfaas.transfer.offer import MAX_CHUNKS, MAX_PARTS, Group, Offer, expected_pieces, offer_for, seal_for
from prfaas.transfer.pieces import Pieces

LAYOUT = KvLayout(
    layers=(
        (TensorSpec("conv_state", TensorKind.STATE, "float32", (3,)),),
        (TensorSpec("keys", TensorKind.TOKENS, "bfloat16", (8,)),),
    )
)
PIECE_BYTES = 64


def span(tokens: int) -> tuple[Window, ...]:
    return (Window(0, tokens, 0, state=True),)


def offered(tokens: int = 20, chunk: int = 8) -> tuple[Offer, Pieces]:
    return offer_for(LAYOUT, whole(tokens), chunk_ends(tokens, chunk), span(tokens), PIECE_BYTES)


def refusal(held: int | Extent, offer: Offer, windows: tuple[Window, ...] = span(20)) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        expected_pieces(LAYOUT, whole(held) if isinstance(held, int) else held, windows, offer, PIECE_BYTES)
    assert caught.value.cause is Cause.OFFER_MISMATCH
    return caught.value


@pytest.mark.parametrize("tokens", [0, 1, 20])
def test_an_honest_offer_promises_what_must_come(tokens: int):
    offer, pieces = offered(tokens)
    expected = expected_pieces(LAYOUT, whole(tokens), span(tokens), unpack(pack(offer), Offer), PIECE_BYTES)
    assert expected.parts == pieces.parts and expected.count == pieces.count
    assert sum(group.nbytes for group in offer.groups) == pieces.nbytes == LAYOUT.size_bytes(tokens)
    assert sum(group.parts for group in offer.groups) == len(pieces.parts)


@pytest.mark.parametrize(("left_out", "name"), [(0, "layer 0 conv_state"), (1, "layer 1 keys")])
def test_field_B7_a_tensor_that_an_offer_leaves_out_is_named(left_out: int, name: str):
    offer, _ = offered()
    groups = tuple(group for index, group in enumerate(offer.groups) if index != left_out)
    assert name in refusal(20, changed(offer, groups=groups)).detail


@pytest.mark.parametrize("field", ["layer", "tensor", "parts", "nbytes"])
def test_field_H3_a_tensor_of_another_size_or_place_is_named(field: str):
    offer, _ = offered()
    fields = {name: getattr(offer.groups[1], name) for name in Group.__struct_fields__}
    fields[field] += 1
    assert "layer 1 keys" in refusal(20, changed(offer, groups=(offer.groups[0], Group(**fields)))).detail


@pytest.mark.parametrize("more", [Group(0, 0, 1, 12), Group(0, 1, 1, 12), Group(7, 0, 3, 320)])
def test_field_H3_a_tensor_that_nobody_knows_is_refused(more: Group):
    """Or one that comes again: nothing beside what must come is taken or waited for."""
    offer, _ = offered()
    assert "3 groups offered, 2 expected" in refusal(20, changed(offer, groups=(*offer.groups, more))).detail


#: What a KDA layer keeps, of this rank's heads: what the convolutions of q, k and v still see, and the recurrent state.
KDA = (
    TensorSpec("q_conv", TensorKind.STATE, "bfloat16", (3, 64)),
    TensorSpec("k_conv", TensorKind.STATE, "bfloat16", (3, 64)),
    TensorSpec("v_conv", TensorKind.STATE, "bfloat16", (3, 128)),
    TensorSpec("recurrent", TensorKind.STATE, "float32", (2, 32, 32)),
)


def kda(*parts: TensorSpec) -> KvLayout:
    return KvLayout((parts, LAYOUT.layers[1]))


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        ((*KDA[:3], replace(KDA[3], shape=(1, 32, 32))), "layer 0 recurrent"),
        ((KDA[0], replace(KDA[1], shape=(3, 32)), *KDA[2:]), "layer 0 k_conv"),
        ((KDA[0], KDA[2], KDA[1], KDA[3]), "layer 0 k_conv"),
        (KDA[:3], "layer 0 recurrent"),
        ((*KDA, TensorSpec("mtp", TensorKind.STATE, "bfloat16", (64,))), "layer 1 keys"),
    ],
    ids=[
        "half of the heads",
        "half of one convolution",
        "as many bytes in another order",
        "a part less",
        "a buffer more",
    ],
)
def test_field_H4_every_part_of_a_state_is_checked_by_its_size(theirs: tuple[TensorSpec, ...], named: str):
    """Also where all of them together have as many bytes: the first tensor that differs is named, at either end."""
    ours, other = kda(*KDA), kda(*theirs)
    for held, sent in ((ours, other), (other, ours)):
        offer, _ = offer_for(sent, whole(20), (8, 20), span(20), PIECE_BYTES)
        with pytest.raises(ProtocolError) as caught:
            expected_pieces(held, whole(20), span(20), offer, PIECE_BYTES)
        assert caught.value.cause is Cause.OFFER_MISMATCH
        assert named in caught.value.detail or held is other


@pytest.mark.parametrize(
    "other",
    [Extent(0, 21, (20,)), Extent(0, 20), Extent(0, 20, (8, 20)), Extent(0, 20, (8,)), Extent(1, 20, (20,)), whole(21)],
)
def test_field_H1_rows_and_states_of_another_length_are_refused(other: Extent):
    """Both ends agree on one length for all tensors. Bytes alone would not show it: a state of another length has as
    many."""
    assert "rows 0:20 and 1 states (20,), offered" in refusal(20, changed(offered()[0], extent=other)).detail


def test_an_offer_of_other_pieces_is_refused():
    """Both ends number the same pieces."""
    assert "pieces of 64 bytes, offered 65" in refusal(20, changed(offered()[0], piece_bytes=65)).detail


@pytest.mark.parametrize("ends", [(), (20, 20), (8, 16), (16, 8, 20), tuple(range(1, MAX_PARTS + 2))])
def test_chunk_ends_that_make_no_sense_are_refused(ends: tuple[int, ...]):
    """Nor are more parts derived than a transfer may have."""
    refusal(20, changed(offered()[0], chunk_ends=ends))


def test_a_chunk_that_would_lie_in_two_windows_is_refused():
    """The sender's chunks are his to choose, as long as each has one place here."""
    blocks = (Window(0, 8, 0), Window(8, 20, 4096, state=True))
    assert expected_pieces(LAYOUT, whole(20), blocks, offered()[0], PIECE_BYTES).nbytes == LAYOUT.size_bytes(20)
    assert "no window holds the rows 0:10" in refusal(20, offered(chunk=10)[0], blocks).detail


def test_both_ends_have_the_same_pieces_wherever_they_lie():
    """Numbers and sizes follow from the extent; only places differ."""
    extent, ends = Extent(8, 20, (8, 20)), (16, 20)
    scattered = (Window(8, 8, 9000, state=True), Window(8, 16, 5000), Window(16, 20, 1000, state=True))
    ours = offer_for(LAYOUT, extent, ends, (Window(8, 8, 0, state=True), Window(8, 20, 64, state=True)), PIECE_BYTES)
    theirs = expected_pieces(LAYOUT, extent, scattered, ours[0], PIECE_BYTES)
    runs = [(pieces.run(0, 3), pieces.run(3, pieces.count)) for pieces in (ours[1], theirs)]
    assert [[(run.first, run.count, run.offset, run.nbytes) for run in each] for each in runs] == [
        [(0, 3, 0, 140), (3, 2, 140, 76)]
    ] * 2
    assert runs[1][0].places == ((9000, 12), (5000, 128)) and runs[1][1].places == ((1000, 12), (1064, 64))


def test_what_moves_at_once_of_a_large_model_is_one_transfer():
    """8,192 tokens in blocks of 64, of 96 layers with keys and values."""
    keys = LAYOUT.layers[1][0]
    large = KvLayout(layers=((keys, keys),) * 96)
    blocks = tuple(Window(at, at + 64, at * 1000) for at in range(0, 8192, 64))
    offer, pieces = offer_for(large, Extent(0, 8192), chunk_ends(8192, 64), blocks, PIECE_BYTES)
    assert len(pieces.parts) == 128 * 192 and len(pack(offer)) <= LIMIT_BYTES[Kind.OFFER]


def test_the_longest_offer_fits_its_frame():
    """A layout of very many tensors, and as many chunks as there may be, far into a long prompt."""
    tokens = 1 << 20
    wide = KvLayout(layers=tuple((LAYOUT.layers[1][0],) * 8 for _ in range(128)))
    offer, _ = offer_for(wide, whole(tokens), (tokens,), span(tokens), PIECE_BYTES)
    assert len(pack(offer)) <= LIMIT_BYTES[Kind.OFFER]
    ends = tuple(range(tokens, tokens + MAX_CHUNKS))
    long = changed(offered()[0], extent=Extent(0, ends[-1], ends), chunk_ends=ends)
    assert len(pack(long)) <= LIMIT_BYTES[Kind.OFFER]
    with pytest.raises(ValueError, match="chunks make more"):
        offer_for(LAYOUT, whole(MAX_CHUNKS + 1), tuple(range(1, MAX_CHUNKS + 2)), span(MAX_CHUNKS + 1), PIECE_BYTES)


def test_a_seal_repeats_what_was_promised():
    _, pieces = offered()
    seal = seal_for(whole(20), pieces)
    assert (seal.tokens, seal.parts, seal.pieces, seal.payload_bytes) == (20, 4, 6, LAYOUT.size_bytes(20))


def changed(offer: Offer, **fields: object) -> Offer:
    return Offer(**({name: getattr(offer, name) for name in Offer.__struct_fields__} | fields))
