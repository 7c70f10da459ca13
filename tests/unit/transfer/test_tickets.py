"""A ticket opens what it was minted for and nothing else; keys differ wherever they must."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.transfer.frames import Cause, ProtocolError
from prfaas.transfer.tickets import KEY_BYTES, TICKET_BYTES, keys, mint, verify

SECRET = bytes(range(32))
ATTEMPT, OTHER = "ab" * 16, "cd" * 16
RIGHT: dict[str, Any] = {"attempt": ATTEMPT, "source": "prefill-1", "incarnation": 7}


def ticket(**changes: Any) -> bytes:
    return mint(SECRET, **(RIGHT | {"nbytes": 1 << 20, "expires_at": 100.0} | changes))


def test_the_right_ticket_says_how_much_may_come():
    assert len(ticket()) == TICKET_BYTES
    assert verify(SECRET, ticket(), now=99.9, **RIGHT) == 1 << 20


@pytest.mark.parametrize(
    "wrong", [{"attempt": OTHER}, {"source": "prefill-2"}, {"source": ""}, {"incarnation": 8}, {"now": 100.0}]
)
def test_a_ticket_is_for_one_attempt_from_one_node_to_one_process_in_time(wrong: dict[str, Any]):
    with pytest.raises(ProtocolError) as caught:
        verify(SECRET, ticket(), **(RIGHT | {"now": 0.0} | wrong))
    assert caught.value.cause is Cause.TICKET


@given(st.integers(0, TICKET_BYTES * 8 - 1))
def test_no_bit_of_a_ticket_can_be_changed(bit: int):
    forged = bytearray(ticket())
    forged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        verify(SECRET, forged, now=0.0, **RIGHT)


@given(st.binary(max_size=2 * TICKET_BYTES))
def test_noise_is_no_ticket(noise: bytes):
    with pytest.raises(ProtocolError) as caught:
        verify(SECRET, noise, now=0.0, **RIGHT)
    assert caught.value.cause is Cause.TICKET


def test_a_ticket_of_another_secret_is_nothing():
    with pytest.raises(ProtocolError):
        verify(bytes(32), ticket(), now=0.0, **RIGHT)


def test_each_attempt_and_direction_has_its_own_key():
    ours, others, another_secret = keys(SECRET, ATTEMPT), keys(SECRET, OTHER), keys(bytes(32), ATTEMPT)
    all_keys = [key for pair in (ours, others, another_secret) for key in (pair.to_receiver, pair.to_sender)]
    assert len(set(all_keys)) == 6 and {len(key) for key in all_keys} == {KEY_BYTES}
    assert keys(SECRET, ATTEMPT) == ours
