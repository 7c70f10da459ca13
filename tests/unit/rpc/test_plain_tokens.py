"""Plain tokens are the bytes that protobuf has for them, and everything else is protobuf's to read."""

from dataclasses import replace

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from prfaas.request import FinishReason, Score
from prfaas.rpc.commands import Done, Event, Tokens
from prfaas.rpc.link_frames import repeated
from prfaas.rpc.plain_tokens import encode_event, events
from prfaas.rpc.translate import pack_event
from prfaas.rpc.v1 import worker_pb2 as pb

ATTEMPT = bytes(range(16))
PLAIN = Tokens(tokens=b"1234")
EVENTS = st.sampled_from(
    [
        PLAIN,
        replace(PLAIN, tokens=b"\x0a\x04\x0a\x04"),
        replace(PLAIN, tokens=b""),
        replace(PLAIN, tokens=bytes(8)),
        replace(PLAIN, tokens=bytes(200)),
        replace(PLAIN, first_queue_s=0.0),
        replace(PLAIN, first_step_s=0.5),
        replace(PLAIN, first_took_s=0.5),
        replace(PLAIN, top_logits=(((1, 0.5),),)),
        replace(PLAIN, top_logits=(((1, 0.5),),), scores=(Score(0.5, 1.0),)),
        Done(reason=FinishReason.STOP, recomputed_tokens=1, output_tokens=2),
    ]
)
ATTEMPTS = st.binary(min_size=16, max_size=16) | st.sampled_from([ATTEMPT, b"", b"short", bytes(32)])


def read(message: bytes) -> list[tuple[bytes, pb.Event]]:
    """What comes out, plain tokens as what they stand for."""
    return [
        (attempt, pb.Event(attempt=attempt, tokens=pb.Tokens(tokens=said)) if isinstance(said, bytes) else said)
        for attempt, said in events(message)
    ]


@given(ATTEMPTS, EVENTS)
def test_an_event_is_written_as_protobuf_writes_it(attempt: bytes, event: Event):
    """Whether it takes the short way or not."""
    assert encode_event(attempt, event) == pack_event(attempt, event).SerializeToString()


@given(st.lists(st.tuples(ATTEMPTS, EVENTS), max_size=12))
def test_a_message_is_read_as_protobuf_reads_it(sent: list[tuple[bytes, Event]]):
    """All events, in their order."""
    message = repeated(encode_event(attempt, event) for attempt, event in sent)
    assert read(message) == [(event.attempt, event) for event in pb.FromWorker.FromString(message).events]


def test_a_plain_token_takes_the_short_way_and_no_other_event_does():
    others = (replace(PLAIN, first_queue_s=0.0), Done(reason=FinishReason.STOP, recomputed_tokens=1, output_tokens=2))
    message = repeated(encode_event(ATTEMPT, event) for event in (PLAIN, *others, PLAIN))
    assert [isinstance(said, bytes) for _, said in events(message)] == [True, False, False, True]


@given(st.binary(max_size=80), st.binary(max_size=80), st.lists(EVENTS, max_size=3))
@example(b"", b"\x0a", [PLAIN])
@example(b"", b"\x0a\xff\xff\xff\xff\xff\xff", [PLAIN])
@example(b"\x12\x02ab", b"", [PLAIN])
def test_arbitrary_bytes_are_read_as_protobuf_reads_them_or_not_at_all(before: bytes, after: bytes, sent: list[Event]):
    """Nothing but DecodeError is raised, and where protobuf reads something it is the same."""
    message = before + repeated(encode_event(ATTEMPT, event) for event in sent) + after
    try:
        expected = [(event.attempt, event) for event in pb.FromWorker.FromString(message).events]
    except DecodeError:
        with pytest.raises(DecodeError):
            read(message)
    else:
        assert read(message) == expected
