"""The events of a message from a worker, read and written with no message object for those that are nearly all of them.

A plain token is a Tokens event of one token and nothing else. It is read and written here as the bytes that protobuf
has for it, which are always as many and always in the same places; everything else goes the usual way. A peer cannot
tell the difference.
"""

from collections.abc import Iterator

from google.protobuf.message import DecodeError

from prfaas.request import TOKEN_BYTES
from prfaas.rpc.commands import Event, Tokens
from prfaas.rpc.translate import ATTEMPT_BYTES, pack_event
from prfaas.rpc.v1 import worker_pb2 as pb

#: Before the attempt, field 1 of the event; before the token, field 4 of the event and field 1 in it.
_ATTEMPT, _TOKEN = bytes([0x0A, ATTEMPT_BYTES]), bytes([0x22, 2 + TOKEN_BYTES, 0x0A, TOKEN_BYTES])
_BYTES = len(_ATTEMPT) + ATTEMPT_BYTES + len(_TOKEN) + TOKEN_BYTES
#: Before the event, field 1 of the message.
_EVENT = bytes([0x0A, _BYTES]) + _ATTEMPT
_FROM, _TO = len(_EVENT), len(_EVENT) + ATTEMPT_BYTES
_AT, _END = _TO + len(_TOKEN), _TO + len(_TOKEN) + TOKEN_BYTES


def encode_event(attempt: bytes, event: Event) -> bytes:
    """A serialized pb.Event."""
    if type(event) is Tokens and _is_plain(event) and len(attempt) == ATTEMPT_BYTES:
        return _ATTEMPT + attempt + _TOKEN + event.tokens
    encoded: bytes = pack_event(attempt, event).SerializeToString()
    return encoded


def _is_plain(event: Tokens) -> bool:
    return (
        len(event.tokens) == TOKEN_BYTES
        and not event.top_logits
        and not event.scores
        and event.first_queue_s is None
        and event.first_step_s is None
        and event.first_took_s is None
    )


def events(message: bytes) -> Iterator[tuple[bytes, bytes | pb.Event]]:
    """The events of a serialized pb.FromWorker, each with its packed attempt; of a plain token its packed id. Raises
    DecodeError for what is no such message, at the first event that cannot be read."""
    start, end = 0, len(message)
    while start < end:
        stop = start + _END
        if message.startswith(_EVENT, start) and message.startswith(_TOKEN, start + _TO) and stop <= end:
            yield message[start + _FROM : start + _TO], message[start + _AT : stop]
        else:
            stop = _end_of_field(message, start)
            for event in pb.FromWorker.FromString(message[start:stop]).events:
                yield event.attempt, event
        start = stop


def _end_of_field(message: bytes, start: int) -> int:
    """Of field 1 when that is what begins here. Other fields are news: all that follows is protobuf's to skip."""
    if message[start] != _EVENT[0]:
        return len(message)
    length, shift, at = 0, 0, start + 1
    while at < len(message) and shift < 35:
        length |= (message[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not message[at - 1] & 0x80:
            if at + length > len(message):
                break
            return at + length
    raise DecodeError("an event that does not end")
