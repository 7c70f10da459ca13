"""What a transfer promises and what it sealed. Both ends derive the parts from the layout; neither trusts the other's
list.

A part that the receiver expects and the sender did not offer, or offered and did not send, is an error with that part's
name.
"""

import itertools
import struct
from collections.abc import Iterable, Sequence

import msgspec
from crc32c import crc32c

from prfaas.kvcache.layout import KvLayout, Part
from prfaas.transfer.frames import LIMIT_BYTES, Cause, Kind, ProtocolError

_ENTRY = struct.Struct("<IIQQ")
#: More parts than an offer can list are never derived, however long a list of chunk ends somebody sends. The rest of
#: the frame is room for the chunk ends themselves.
MAX_PARTS = LIMIT_BYTES[Kind.OFFER] // (_ENTRY.size + 8)


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """`manifest`: per part its layer, tensor, offset in the span and length, in order, packed."""

    tokens: int
    chunk_ends: tuple[int, ...]
    manifest: bytes


class Seal(msgspec.Struct, frozen=True, kw_only=True):
    """`digest` is the CRC32C over the CRC32C of every part, in the order of the offer."""

    tokens: int
    parts: int
    payload_bytes: int
    digest: int


def manifest(parts: Iterable[Part]) -> bytes:
    return b"".join(_ENTRY.pack(part.layer, part.tensor, part.offset, part.nbytes) for part in parts)


def offer_for(layout: KvLayout, tokens: int, chunk_ends: tuple[int, ...]) -> tuple[Offer, tuple[Part, ...]]:
    """Raises ValueError when the chunk ends do not fit the tokens, or make too many parts."""
    parts = _parts(layout, tokens, chunk_ends)
    return Offer(tokens=tokens, chunk_ends=chunk_ends, manifest=manifest(parts)), parts


def expected_parts(layout: KvLayout, tokens: int, offer: Offer) -> tuple[Part, ...]:
    """The parts that must come for a span of `tokens`. Raises ProtocolError unless the offer lists exactly these."""
    if offer.tokens != tokens:
        raise ProtocolError(Cause.OFFER_MISMATCH, f"reserved for {tokens} tokens, offered {offer.tokens}")
    try:
        parts = _parts(layout, tokens, offer.chunk_ends)
    except ValueError as error:
        raise ProtocolError(Cause.OFFER_MISMATCH, str(error)) from None
    if offer.manifest != manifest(parts):
        raise ProtocolError(Cause.OFFER_MISMATCH, _first_difference(layout, parts, offer.manifest))
    return parts


def seal_for(tokens: int, parts: Sequence[Part], crcs: Sequence[int]) -> Seal:
    return Seal(
        tokens=tokens,
        parts=len(parts),
        payload_bytes=sum(part.nbytes for part in parts),
        digest=crc32c(struct.pack(f"<{len(crcs)}I", *crcs)),
    )


def part_name(layout: KvLayout, part: Part) -> str:
    tensor = layout.layers[part.layer][part.tensor]
    return f"part {part.index} (layer {part.layer} {tensor.name} {part.start}:{part.stop})"


def _parts(layout: KvLayout, tokens: int, chunk_ends: tuple[int, ...]) -> tuple[Part, ...]:
    if len(chunk_ends) * sum(len(layer) for layer in layout.layers) > MAX_PARTS:
        raise ValueError(f"{len(chunk_ends)} chunks make more than {MAX_PARTS} parts")
    return layout.parts(tokens, chunk_ends)


def _first_difference(layout: KvLayout, parts: Sequence[Part], offered: bytes) -> str:
    theirs = [offered[at : at + _ENTRY.size] for at in range(0, len(offered), _ENTRY.size)]
    for part, entry in itertools.zip_longest(parts, theirs):
        if part is None:
            return f"{len(theirs)} parts offered, {len(parts)} expected"
        if entry != manifest([part]):
            return f"{part_name(layout, part)} is not offered"
    raise AssertionError("manifests are equal")
