"""The receiver derives what must come; an offer or a seal that differs is refused by the name of what differs."""

import itertools

import pytest

from prfaas.kvcache.layout import KvLayout, Part, TensorKind, TensorSpec, chunk_ends
from prfaas.transfer.frames import LIMIT_BYTES, Cause, Header, Kind, ProtocolError
from prfaas.transfer.grant import Grant
from prfaas.transfer.greeting import pack
from prfaas.transfer.offer import MAX_PARTS, Offer, expected_parts, manifest, offer_for, seal_for

LAYOUT = KvLayout(
    layers=(
        (TensorSpec("conv_state", TensorKind.STATE, "float32", (3,)),),
        (TensorSpec("keys", TensorKind.TOKENS, "bfloat16", (8,)),),
    )
)
ATTEMPT = "ab" * 16


def offered(tokens: int = 20, chunk: int = 8) -> tuple[Offer, tuple[Part, ...]]:
    return offer_for(LAYOUT, tokens, chunk_ends(tokens, chunk))


def refusal(tokens: int, offer: Offer) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        expected_parts(LAYOUT, tokens, offer)
    assert caught.value.cause is Cause.OFFER_MISMATCH
    return caught.value


@pytest.mark.parametrize("tokens", [0, 1, 20])
def test_an_honest_offer_lists_what_must_come(tokens: int):
    offer, parts = offered(tokens)
    assert expected_parts(LAYOUT, tokens, offer) == parts


@pytest.mark.parametrize("left_out", range(4))
def test_field_B7_whatever_an_offer_leaves_out_is_named(left_out: int):
    """First, last, state or keys."""
    offer, parts = offered()
    short = [part for part in parts if part.index != left_out]
    error = refusal(20, Offer(tokens=20, chunk_ends=offer.chunk_ends, manifest=manifest(short)))
    assert error.detail.startswith(f"part {left_out} (layer {parts[left_out].layer} ")


def test_an_offer_of_more_than_must_come_is_refused():
    offer, parts = offered()
    more = manifest([*parts, parts[0]])
    assert "5 parts offered, 4 expected" in refusal(20, Offer(tokens=20, chunk_ends=(8, 16, 20), manifest=more)).detail
    assert "expected" in refusal(20, Offer(tokens=20, chunk_ends=(8, 16, 20), manifest=offer.manifest + b"x")).detail


def test_an_offer_for_another_length_is_refused():
    """The token count is compared, not only the bytes."""
    assert "20 tokens, offered 21" in refusal(20, offered(21)[0]).detail


@pytest.mark.parametrize("ends", [(), (20, 20), (8, 16), tuple(range(1, MAX_PARTS + 2))])
def test_chunk_ends_that_make_no_sense_are_refused(ends: tuple[int, ...]):
    """Nor are more parts derived than an offer can list."""
    refusal(20, Offer(tokens=20, chunk_ends=ends, manifest=b""))


def test_the_longest_offer_fits_its_frame():
    """What may be derived may be listed: the two limits agree."""
    chunks = MAX_PARTS // 2
    offer, _ = offer_for(LAYOUT, chunks, tuple(range(1, chunks + 1)))
    assert len(pack(offer)) <= LIMIT_BYTES[Kind.OFFER]
    with pytest.raises(ValueError, match="chunks make more"):
        offer_for(LAYOUT, MAX_PARTS, tuple(range(1, MAX_PARTS + 1)))


def test_a_seal_depends_on_every_checksum_and_its_place():
    _, parts = offered()
    crcs = [11, 22, 33, 44]
    digests = {seal_for(20, parts, list(order)).digest for order in itertools.permutations(crcs)}
    assert len(digests) == 24
    seal = seal_for(20, parts, crcs)
    assert (seal.tokens, seal.parts, seal.payload_bytes) == (20, 4, LAYOUT.size_bytes(20))


def part_header(part: Part, **changes: object) -> Header:
    fields = {"attempt": ATTEMPT, "generation": 5, "index": part.index, "offset": part.offset, "length": part.nbytes}
    return Header(kind=Kind.PART, **(fields | changes))


def test_a_grant_lets_each_part_in_once():
    """In any order."""
    _, parts = offered()
    grant = Grant(ATTEMPT, 5, parts)
    assert [grant.claim(part_header(part)) for part in parts[::-1]] == [*parts[::-1]]
    for part in parts:
        with pytest.raises(ProtocolError) as caught:
            grant.claim(part_header(part))
        assert caught.value.cause is Cause.DUPLICATE_PART


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"attempt": "cd" * 16}, Cause.UNKNOWN_ATTEMPT),
        ({"generation": 4}, Cause.STALE_GENERATION),
        ({"index": 4}, Cause.UNEXPECTED_PART),
        ({"index": 2}, Cause.UNEXPECTED_PART),
        ({"offset": 0}, Cause.UNEXPECTED_PART),
        ({"length": 1}, Cause.UNEXPECTED_PART),
        ({"length": 1 << 30}, Cause.UNEXPECTED_PART),
    ],
)
def test_field_B1_a_frame_that_is_not_of_this_grant_is_refused(changes: dict[str, object], cause: Cause):
    """And what it falsely claimed to be can still come."""
    _, parts = offered()
    grant = Grant(ATTEMPT, 5, parts)
    with pytest.raises(ProtocolError) as caught:
        grant.claim(part_header(parts[1], **changes))
    assert caught.value.cause is cause
    assert grant.claim(part_header(parts[1])) == parts[1]
