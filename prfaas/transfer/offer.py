"""What a transfer promises and what its seal repeats. Both ends derive the parts from the layout; neither trusts the
other's list, and where a part lies is each end's own affair.

A tensor that the receiver expects and the sender did not offer is an error with that tensor's name.
"""

import itertools
from collections.abc import Iterator, Sequence

import msgspec

from prfaas.kvcache.layout import Extent, KvLayout, Part, TensorKind, Window
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
    """`groups`: every tensor of which anything comes, in order."""

    extent: Extent
    chunk_ends: tuple[int, ...]
    piece_bytes: int
    groups: tuple[Group, ...]


class Seal(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of the offer was sent at least once. That it arrived whole is known from the pieces themselves."""

    tokens: int
    parts: int
    pieces: int
    payload_bytes: int


def offer_for(
    layout: KvLayout, extent: Extent, chunk_ends: tuple[int, ...], windows: Sequence[Window], piece_bytes: int
) -> tuple[Offer, Pieces]:
    """Raises ValueError when the chunk ends do not fit the extent or its windows, or make too many parts."""
    pieces = Pieces(_parts(layout, extent, chunk_ends, windows), piece_bytes)
    groups = tuple(_groups(layout, extent, len(chunk_ends)))
    return Offer(extent=extent, chunk_ends=chunk_ends, piece_bytes=piece_bytes, groups=groups), pieces


def expected_pieces(
    layout: KvLayout, extent: Extent, windows: Sequence[Window], offer: Offer, piece_bytes: int
) -> Pieces:
    """What must come of an extent, and where in `windows` it goes. Raises ProtocolError unless the offer promises
    exactly that."""
    if offer.extent != extent:
        raise ProtocolError(Cause.OFFER_MISMATCH, f"reserved for {_said(extent)}, offered {_said(offer.extent)}")
    if offer.piece_bytes != piece_bytes:
        raise ProtocolError(Cause.OFFER_MISMATCH, f"pieces of {piece_bytes} bytes, offered {offer.piece_bytes}")
    try:
        expected, pieces = offer_for(layout, extent, offer.chunk_ends, windows, piece_bytes)
    except ValueError as error:
        raise ProtocolError(Cause.OFFER_MISMATCH, str(error)) from None
    if offer.groups != expected.groups:
        raise ProtocolError(Cause.OFFER_MISMATCH, _first_difference(layout, expected.groups, offer.groups))
    return pieces


def seal_for(extent: Extent, pieces: Pieces) -> Seal:
    return Seal(tokens=extent.stop, parts=len(pieces.parts), pieces=pieces.count, payload_bytes=pieces.nbytes)


def _parts(
    layout: KvLayout, extent: Extent, chunk_ends: tuple[int, ...], windows: Sequence[Window]
) -> tuple[Part, ...]:
    if len(chunk_ends) > MAX_CHUNKS or len(chunk_ends) * sum(len(layer) for layer in layout.layers) > MAX_PARTS:
        raise ValueError(f"{len(chunk_ends)} chunks make more than {MAX_PARTS} parts, or are more than {MAX_CHUNKS}")
    return layout.extent_parts(extent, chunk_ends, windows)


def _groups(layout: KvLayout, extent: Extent, chunks: int) -> Iterator[Group]:
    rows, states = extent.stop - extent.first, len(extent.states)
    for layer, tensors in enumerate(layout.layers):
        for number, tensor in enumerate(tensors):
            if tensor.kind is TensorKind.TOKENS and rows:
                yield Group(layer, number, chunks, rows * tensor.nbytes)
            elif tensor.kind is TensorKind.STATE and states:
                yield Group(layer, number, states, states * tensor.nbytes)


def _said(extent: Extent) -> str:
    """It may be anybody's word: no more of it is repeated than is looked at."""
    more = "..." if len(extent.states) > 2 else ""
    return f"rows {extent.first}:{extent.stop} and {len(extent.states)} states {extent.states[:2]}{more}"


def _first_difference(layout: KvLayout, ours: Sequence[Group], theirs: Sequence[Group]) -> str:
    for mine, offered in itertools.zip_longest(ours, theirs):
        if mine is None:
            return f"{len(theirs)} groups offered, {len(ours)} expected"
        if mine != offered:
            name = layout.layers[mine.layer][mine.tensor].name
            return f"layer {mine.layer} {name} ({mine.parts} parts, {mine.nbytes} bytes) is not offered"
    raise AssertionError("the groups are equal")
