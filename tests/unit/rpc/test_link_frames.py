"""Frames of the token link: however the bytes are cut the same frames come out, and nothing takes memory uninvited."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cluster import Incarnation, NodeId, WireRange
from prfaas.rpc.link_frames import (
    HEADER_BYTES,
    MAGIC,
    Frame,
    FrameReader,
    Kind,
    Malformed,
    frame,
    greeting,
    header,
    read_greeting,
    repeated,
    same_wire,
)
from prfaas.rpc.v1 import worker_pb2 as pb

MAX_BYTES = 4096
FRAMES = st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=MAX_BYTES) | st.binary(max_size=8)), max_size=8)


@given(FRAMES, st.data())
def test_any_split_gives_the_same_frames(frames: list[Frame], data: st.DataObject):
    """A TCP segment ends wherever it likes, also within a header."""
    stream = b"".join(frame(kind, body) for kind, body in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=40)))
    reader, found = FrameReader(MAX_BYTES), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += reader.feed(stream[start:end])
    assert found == frames


@given(FRAMES, st.integers(MAX_BYTES + 1, (1 << 32) - 1), st.integers(0, 255), st.integers(0, HEADER_BYTES))
def test_a_frame_that_is_too_long_is_refused_by_its_header(frames: list[Frame], length: int, kind: int, cut: int):
    """Before a byte of it has come, and wherever its header is cut."""
    stream = b"".join(frame(kind, body) for kind, body in frames) + length.to_bytes(4, "little") + bytes([kind])
    reader = FrameReader(MAX_BYTES)
    refuse = pytest.raises(Malformed, match=f"{length} bytes")
    if cut:
        reader.feed(stream[:-cut])
        with refuse:
            reader.feed(stream[-cut:])
    else:
        with refuse:
            reader.feed(stream)


@given(st.integers(0, 255).filter(lambda kind: kind not in set(Kind)))
def test_a_frame_of_an_unknown_kind_is_refused(kind: int):
    """News is for versions that greet each other as such; within one there is none."""
    with pytest.raises(Malformed, match="unknown kind"):
        FrameReader(MAX_BYTES).feed(bytes(4) + bytes([kind]))


@given(st.lists(st.binary(max_size=64), max_size=20))
def test_arbitrary_bytes_give_frames_or_are_refused(parts: list[bytes]):
    """And never hold more than a frame may have."""
    reader = FrameReader(MAX_BYTES)
    try:
        for part in parts:
            for kind, body in reader.feed(part):
                assert kind in Kind and len(body) <= MAX_BYTES
    except Malformed:
        pass
    assert reader.held_bytes < HEADER_BYTES + MAX_BYTES


def test_a_long_frame_in_small_pieces_is_put_together_once():
    """Not again with every piece: that would take time with the square of its length."""
    body, reader = bytes(4 << 20), FrameReader(4 << 20)
    stream = header(Kind.MESSAGE, len(body)) + body
    pieces = [stream[at : at + 1024] for at in range(0, len(stream), 1024)]
    assert [found for piece in pieces[:-1] for found in reader.feed(piece)] == []
    assert reader.feed(pieces[-1]) == [(Kind.MESSAGE, body)]


@given(st.lists(st.binary(min_size=16, max_size=16)), st.sampled_from([0, 1, 127, 128, 300, 70_000]))
def test_elements_put_in_a_row_are_the_message_that_holds_them(attempts: list[bytes], prompt_bytes: int):
    """What protobuf reads out of it, and what it would have written."""
    commands = [pb.Command(attempt=attempt, reserve=pb.Reserve(prompt=bytes(prompt_bytes))) for attempt in attempts]
    encoded = repeated(command.SerializeToString() for command in commands)
    assert encoded == pb.ToWorker(commands=commands).SerializeToString()
    assert list(pb.ToWorker.FromString(encoded).commands) == commands


@given(st.text(max_size=50), st.integers(0, (1 << 64) - 1), st.text(max_size=2000))
def test_greetings_say_who_and_why_not(node: str, incarnation: int, refused: str):
    """A reason is cut to what a greeting may hold."""
    sent = greeting(NodeId(node), Incarnation(incarnation), refused)
    [(kind, body)] = FrameReader(MAX_BYTES + len(MAGIC)).feed(sent)
    said = read_greeting(kind, body)
    assert (said.node, said.incarnation, said.refused) == (node, incarnation, refused[: len(said.refused)])
    assert bool(said.refused) == bool(refused)
    assert same_wire(said)


@given(st.sampled_from(Kind), st.binary(max_size=200), st.booleans())
def test_what_is_no_greeting_is_malformed(kind: Kind, body: bytes, magic: bool):
    """Whatever it is, nothing else is raised."""
    body = MAGIC + body if magic else body
    try:
        read_greeting(kind, body)
    except Malformed:
        pass
    else:
        assert kind is Kind.GREETING and body.startswith(MAGIC)


def test_versions_that_do_not_meet_are_not_the_same_wire():
    [(kind, body)] = FrameReader(MAX_BYTES).feed(greeting(NodeId("d0"), Incarnation(1), wire=WireRange(2, 3)))
    said = read_greeting(kind, body)
    assert not same_wire(said)
    assert same_wire(said, WireRange(1, 2))
