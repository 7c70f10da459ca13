"""Tickets and keys travel in messages and values that may be shown; they themselves are not."""

from typing import Any

import msgspec
import pytest
from rich.pretty import pretty_repr

from prfaas.transfer.outgoing import Destination
from prfaas.transfer.pump import messages
from prfaas.transfer.tickets import Keys

SECRET = b"open sesame 1234"
PERMIT = {"ticket": SECRET, "key_out": SECRET, "key_back": SECRET}


@pytest.mark.parametrize(
    "carrier",
    [
        messages.Reserved(attempt="a", span=0, nbytes=1, generation=1, **PERMIT),
        messages.Send(attempt="a", address="h:1", peer_incarnation=1, generation=1, chunk_ends=(), **PERMIT),
        Destination(
            address="h:1", incarnation=1, generation=1, ticket=SECRET, keys=Keys(to_receiver=SECRET, to_sender=SECRET)
        ),
        Keys(to_receiver=SECRET, to_sender=SECRET),
    ],
    ids=lambda carrier: type(carrier).__name__,
)
def test_what_carries_a_secret_does_not_show_it(carrier: Any):
    """Neither as text nor in a pretty traceback."""
    for text in (repr(carrier), str(carrier), pretty_repr(carrier)):
        assert "sesame" not in text and SECRET.hex() not in text
        assert text.startswith(type(carrier).__name__)


def test_the_rest_is_shown_and_all_of_it_crosses():
    """Only the text is without secrets; the message to the pump has them."""
    reserved = messages.Reserved(attempt="a", span=8, nbytes=1, generation=3, **PERMIT)
    assert repr(reserved) == "Reserved(attempt='a', span=8, nbytes=1, generation=3)"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(reserved), type=messages.Event) == reserved
