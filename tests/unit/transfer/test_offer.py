"""The receiver derives what must come; an offer that differs is refused by the name of what differs."""

import pytest

from prfaas.kvcache.layout import KvLayout, TensorKind, TensorSpec, chunk_ends
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


def offered(tokens: int = 20, chunk: int = 8) -> tuple[Offer, Pieces]:
    return offer_for(LAYOUT, tokens, chunk_ends(tokens, chunk), PIECE_BYTES)


def refusal(tokens: int, offer: Offer) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        expected_pieces(LAYOUT, tokens, offer, PIECE_BYTES)
    assert caught.value.cause is Cause.OFFER_MISMATCH
    return caught.value


@pytest.mark.parametrize("tokens", [0, 1, 20])
def test_an_honest_offer_promises_what_must_come(tokens: int):
    offer, pieces = offered(tokens)
    expected = expected_pieces(LAYOUT, tokens, unpack(pack(offer), Offer), PIECE_BYTES)
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


def test_an_offer_of_more_than_must_come_is_refused():
    offer, _ = offered()
    assert "3 groups offered, 2 expected" in refusal(20, changed(offer, groups=(*offer.groups, offer.groups[0]))).detail


def test_an_offer_for_another_length_or_other_pieces_is_refused():
    """The token count is compared, not only the bytes; and both ends number the same pieces."""
    assert "20 tokens, offered 21" in refusal(20, offered(21)[0]).detail
    assert "pieces of 64 bytes, offered 65" in refusal(20, changed(offered()[0], piece_bytes=65)).detail


@pytest.mark.parametrize("ends", [(), (20, 20), (8, 16), (16, 8, 20), tuple(range(1, MAX_PARTS + 2))])
def test_chunk_ends_that_make_no_sense_are_refused(ends: tuple[int, ...]):
    """Nor are more parts derived than a transfer may have."""
    refusal(20, changed(offered()[0], chunk_ends=ends))


def test_the_longest_offer_fits_its_frame():
    """A layout of very many tensors, and as many chunks as there may be, far into a long prompt."""
    tokens = 1 << 20
    wide = KvLayout(layers=tuple((LAYOUT.layers[1][0],) * 8 for _ in range(128)))
    offer, _ = offer_for(wide, tokens, (tokens,), PIECE_BYTES)
    assert len(pack(offer)) <= LIMIT_BYTES[Kind.OFFER]
    long = changed(offered()[0], chunk_ends=tuple(range(tokens, tokens + MAX_CHUNKS)))
    assert len(pack(long)) <= LIMIT_BYTES[Kind.OFFER]
    with pytest.raises(ValueError, match="chunks make more"):
        offer_for(LAYOUT, MAX_CHUNKS + 1, tuple(range(1, MAX_CHUNKS + 2)), PIECE_BYTES)


def test_a_seal_repeats_what_was_promised():
    _, pieces = offered()
    seal = seal_for(20, pieces)
    assert (seal.tokens, seal.parts, seal.pieces, seal.payload_bytes) == (20, 4, 6, LAYOUT.size_bytes(20))


def changed(offer: Offer, **fields: object) -> Offer:
    return Offer(**({name: getattr(offer, name) for name in Offer.__struct_fields__} | fields))
