"""What a leg hands to its reader, and what passes him by."""

import asyncio
import struct
import time

import pytest

from prfaas.cluster import NodeId
from prfaas.errors import PeerUnavailable
from prfaas.live.leg import APART, TOGETHER, Leg
from prfaas.request import AttemptId, FinishReason, Score
from prfaas.rpc.commands import Command, Done, Tokens


class Wire:
    """Carries nothing."""

    def send(self, attempt: AttemptId, command: Command) -> None:
        raise AssertionError

    def forget(self, attempt: AttemptId) -> None:
        pass


def leg(max_events: int) -> Leg:
    return Leg(Wire(), NodeId("d0"), AttemptId("a"), max_events)


def token(number: int) -> Tokens:
    return Tokens(tokens=struct.pack("<I", number), top_logits=(((number, 1.0),),), scores=(Score(float(number), 2.0),))


async def test_tokens_that_wait_long_are_kept_together():
    """A million of them for a client that does not read take a few events; each comes out once, in its place, with its
    own probabilities."""
    waiting, count = leg(10_100), 10_000
    for number in range(count):
        waiting.deliver(token(number))
    waiting.deliver(Done(reason=FinishReason.LENGTH, recomputed_tokens=1, output_tokens=count))
    events = []
    async with asyncio.timeout(10):
        while not isinstance(event := await waiting.next(), Done):
            events.append(event)
    assert len(events) <= APART + count // TOGETHER + 1
    assert {len(event.tokens) for event in events[: APART - 1]} == {4}  # few are not held back to be put together
    numbers = [number for event in events for (number,) in struct.iter_unpack("<I", event.tokens)]
    assert numbers == [*range(count)]
    assert [ids[0][0] for event in events for ids in event.top_logits] == numbers
    assert [score.logit for event in events for score in event.scores] == numbers


async def test_more_tokens_than_an_attempt_can_have_are_refused_also_together():
    """Or a worker that talks nonsense could fill the memory."""
    waiting = leg(APART * 2)
    for number in range(APART * 3):
        waiting.deliver(token(number))
    assert waiting._failure is None
    waiting.deliver(token(0))
    kept = [await waiting.next() for _ in range(APART)]
    assert sum(len(event.tokens) for event in kept if isinstance(event, Tokens)) == (APART * 3 + 1) * 4
    with pytest.raises(PeerUnavailable, match="more than"):
        await waiting.next()


def plain(number: int) -> bytes:
    return struct.pack("<I", number)


class Taker:
    """Takes tokens as long as it is willing."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.willing, self.broken = True, False

    def __call__(self, tokens: bytes, now_s: float) -> bool:
        if self.broken:
            raise ValueError(tokens)
        if self.willing:
            self.taken.append(tokens)
        return self.willing


async def test_diverted_tokens_are_taken_in_the_call_that_brings_them():
    """Nobody is woken for them; the end comes to the reader as ever."""
    diverted, taker = leg(10), Taker()
    diverted.divert(taker, every_s=60.0)
    reader = asyncio.create_task(diverted.next())
    await asyncio.sleep(0)
    diverted.deliver_plain(plain(1), time.monotonic())
    diverted.deliver_plain(plain(2), time.monotonic())
    assert taker.taken == [plain(1), plain(2)]
    end = Done(reason=FinishReason.LENGTH, recomputed_tokens=1, output_tokens=2)
    diverted.deliver(end)
    async with asyncio.timeout(10):
        assert await reader == end


async def test_tokens_that_are_not_taken_keep_their_order():
    """What comes behind one that waits for the reader waits as well, until the reader has come after."""
    diverted, taker = leg(10), Taker()
    diverted.divert(taker, every_s=60.0)
    taker.willing = False
    diverted.deliver_plain(plain(1), time.monotonic())
    taker.willing = True
    diverted.deliver_plain(plain(2), time.monotonic())
    assert [await diverted.next(), await diverted.next()] == [Tokens(tokens=plain(1)), Tokens(tokens=plain(2))]
    diverted.deliver_plain(plain(3), time.monotonic())
    assert taker.taken == [plain(3)]


async def test_tokens_with_scores_are_the_readers():
    """They are more than text."""
    diverted, taker = leg(10), Taker()
    diverted.divert(taker, every_s=60.0)
    diverted.deliver(token(1))
    assert (await diverted.next(), taker.taken) == (token(1), [])


async def test_the_reader_sees_now_and_then_that_the_stream_is_alive():
    """Or the limit that a flow puts on each wait would run out while tokens pass it by."""
    diverted, taker, now_s = leg(10), Taker(), time.monotonic()
    diverted.divert(taker, every_s=60.0)
    diverted.deliver_plain(plain(1), now_s + 59.0)
    diverted.deliver_plain(plain(2), now_s + 61.0)
    assert (taker.taken, await diverted.next()) == ([plain(1)], Tokens(tokens=plain(2)))


async def test_what_cannot_be_taken_is_for_the_reader_to_find():
    """A token that nobody can make sense of fails its own stream, not the link."""
    diverted, taker = leg(10), Taker()
    diverted.divert(taker, every_s=60.0)
    taker.broken = True
    diverted.deliver_plain(plain(1), time.monotonic())
    diverted.deliver_plain(plain(2), time.monotonic())
    assert [await diverted.next(), await diverted.next()] == [Tokens(tokens=plain(1)), Tokens(tokens=plain(2))]


async def test_a_leg_that_another_needs_ends_that_ones_wait():
    """A prefill ends when the room that it is for is lost; what has arrived counts nevertheless."""
    prefill, room = leg(10), leg(10)
    waiting = asyncio.create_task(prefill.next(needed=room))
    await asyncio.sleep(0)
    room.end(PeerUnavailable("d0", "gone"))
    async with asyncio.timeout(10):
        with pytest.raises(PeerUnavailable, match="gone"):
            await waiting
    prefill.deliver_plain(plain(1), time.monotonic())
    assert await prefill.next(needed=room) == Tokens(tokens=plain(1))
