"""What a transfer promises and what its seal repeats. Both ends derive the parts from the layout; neither trusts the
other's list.

A tensor that the receiver expects and the sender did not offer is an error with that tensor's name.
"""

import itertools
from collections.abc import Iterator, Sequence

import msgspec

from prfaas.kvcache.layout import KvLayout, Part, TensorKind
from prfaas.transfer.frames import Cause, ProtocolError
from prfaas.transfer.pieces import Pieces

#: More are never derived, however long a list of chunk ends somebody sends.
MAX_PARTS = 1 << 16
#: So that every offer fits its frame.
MAX_CHUNKS = 4096


class Group(msgspec.Struct, frozen=True, array_like=True):
    """All parts of one tensor."""

    layer: int
    tensor: int
    parts: int
    nbytes: int


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """`groups`: every tensor of the layout, in order."""

    tokens: int
    chunk_ends: tuple[int, ...]
    piece_bytes: int
    groups: tuple[Group, ...]


class Seal(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of the offer was sent at least once. That it arrived whole is known from the pieces themselves."""

    tokens: int
    parts: int
    pieces: int
    payload_bytes: int


def offer_for(layout: KvLayout, tokens: int, chunk_ends: tuple[int, ...], piece_bytes: int) -> tuple[Offer, Pieces]:
    """Raises ValueError when the chunk ends do not fit the tokens, or make too many parts."""
    pieces = Pieces(_parts(layout, tokens, chunk_ends), piece_bytes)
    groups = tuple(_groups(layout, tokens, len(chunk_ends)))
    return Offer(tokens=tokens, chunk_ends=chunk_ends, piece_bytes=piece_bytes, groups=groups), pieces


def expected_pieces(layout: KvLayout, tokens: int, offer: Offer, piece_bytes: int) -> Pieces:
    """What must come for a span of `tokens`. Raises ProtocolError unless the offer promises exactly that."""
    if offer.tokens != tokens:
        raise ProtocolError(Cause.OFFER_MISMATCH, f"reserved for {tokens} tokens, offered {offer.tokens}")
    if offer.piece_bytes != piece_bytes:
        raise ProtocolError(Cause.OFFER_MISMATCH, f"pieces of {piece_bytes} bytes, offered {offer.piece_bytes}")
    try:
        expected, pieces = offer_for(layout, tokens, offer.chunk_ends, piece_bytes)
    except ValueError as error:
        raise ProtocolError(Cause.OFFER_MISMATCH, str(error)) from None
    if offer.groups != expected.groups:
        raise ProtocolError(Cause.OFFER_MISMATCH, _first_difference(layout, expected.groups, offer.groups))
    return pieces


def seal_for(tokens: int, pieces: Pieces) -> Seal:
    return Seal(tokens=tokens, parts=len(pieces.parts), pieces=pieces.count, payload_bytes=pieces.nbytes)


def _parts(layout: KvLayout, tokens: int, chunk_ends: tuple[int, ...]) -> tuple[Part, ...]:
    if len(chunk_ends) > MAX_CHUNKS or len(chunk_ends) * sum(len(layer) for layer in layout.layers) > MAX_PARTS:
        raise ValueError(f"{len(chunk_ends)} chunks make more than {MAX_PARTS} parts, or are more than {MAX_CHUNKS}")
    return layout.parts(tokens, chunk_ends)


def _groups(layout: KvLayout, tokens: int, chunks: int) -> Iterator[Group]:
    for layer, tensors in enumerate(layout.layers if tokens else ()):
        for number, tensor in enumerate(tensors):
            if tensor.kind is TensorKind.TOKENS:
                yield Group(layer, number, chunks, tokens * tensor.nbytes)
            else:
                yield Group(layer, number, 1, tensor.nbytes)


def _first_difference(layout: KvLayout, ours: Sequence[Group], theirs: Sequence[Group]) -> str:
    for mine, offered in itertools.zip_longest(ours, theirs):
        if mine is None:
            return f"{len(theirs)} groups offered, {len(ours)} expected"
        if mine != offered:
            name = layout.layers[mine.layer][mine.tensor].name
            return f"layer {mine.layer} {name} ({mine.parts} parts, {mine.nbytes} bytes) is not offered"
    raise AssertionError("the groups are equal")
