"""Real pumps move extents between windows: a cache's blocks and states, a sequence's span, or the rest of one."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from prfaas.kvcache.layout import Extent, Part, Window, chunk_ends
from prfaas.transfer.frames import Cause
from prfaas.transfer.pump import messages as m
from tests.integration.kv_pumps import (
    LAYOUT,
    NODE,
    POOL_BYTES,
    Line,
    Pump,
    assert_transfers,
    attempt_id,
    end,
    lost,
    pumps,
    scattered,
    taken_bytes,
)

#: Of a cache: what is not written to is found out.
EMPTY = 0x5A
TOKENS, UNIT = 640, 64
SLOW = 20e6


@pytest.fixture(scope="module", params=["crc32c", "aes-gcm"])
def pair(request: pytest.FixtureRequest) -> Iterator[list[Pump]]:
    settings = {"integrity": request.param}
    with pumps(settings, settings) as shared:
        yield shared
        for pump in shared:
            pump.assert_baseline()


@dataclass(frozen=True)
class Memory:
    """What a pump was given for an extent, and where its parts lie."""

    pump: Pump
    windows: tuple[Window, ...]
    parts: tuple[Part, ...]
    reserved: m.Reserved

    def read(self) -> list[bytes]:
        return [bytes(self.pump.pool[part.offset : part.offset + part.nbytes]) for part in self.parts]

    def fill(self, seed: int) -> None:
        draw = random.Random(seed)
        for part in self.parts:
            self.pump.pool[part.offset : part.offset + part.nbytes] = draw.randbytes(part.nbytes)


def span(
    pump: Pump, attempt: str, extent: Extent, ends: tuple[int, ...], *, receive: bool, of: Extent | None = None
) -> Memory:
    """A span for `of`, of which the extent is meant."""
    of = of or extent
    reserved = pump.reserve(attempt, of, receive=receive)
    windows = (Window(of.first, of.stop, reserved.span, state=bool(of.states)),)
    return Memory(pump, windows, LAYOUT.extent_parts(extent, ends, windows), reserved)


def brought(
    pump: Pump, attempt: str, extent: Extent, ends: tuple[int, ...], *, receive: bool, edges: tuple[int, ...] = ()
) -> Memory:
    """Windows up to each of `edges`, or for each chunk, in a part of the pool that is only theirs."""
    windows = scattered(extent, edges or ends, 7 << 20, random.Random(attempt))
    reserved = pump.bring(attempt, extent, windows, receive=receive)
    return Memory(pump, windows, LAYOUT.extent_parts(extent, ends, windows), reserved)


def ends_of(extent: Extent, unit: int = UNIT) -> tuple[int, ...]:
    return tuple(at for at in chunk_ends(extent.stop, unit) if at > extent.first)


def empty(pump: Pump) -> None:
    pump.pool[:] = bytes([EMPTY]) * POOL_BYTES


def assert_moved(attempt: str, here: Memory, there: Memory) -> None:
    """Both sides hear of it, all has arrived, and of the rest of the pool nothing was written to."""
    sent, received = here.pump.outcome(attempt), there.pump.outcome(attempt)
    assert isinstance(sent, m.Sent) and isinstance(received, m.Received), f"{sent} {received}"
    assert sent.payload_bytes == received.payload_bytes == sum(part.nbytes for part in there.parts)
    assert there.read() == here.read()
    assert_untouched(there, but=there.parts)


def assert_untouched(there: Memory, but: tuple[Part, ...] = ()) -> None:
    at = 0
    for part in sorted(but, key=lambda part: part.offset):
        assert bytes(there.pump.pool[at : part.offset]).count(EMPTY) == part.offset - at, f"written before {part}"
        at = part.offset + part.nbytes
    assert bytes(there.pump.pool[at:]).count(EMPTY) == POOL_BYTES - at, "written behind the last part"


def send(here: Memory, there: Memory, attempt: str, ends: tuple[int, ...], **settings: object) -> None:
    here.pump.send_to(there.pump, attempt, there.reserved, 0, chunk_ends=ends, **settings)


def ready(here: Memory, attempt: str, parts: slice = slice(None)) -> None:
    here.pump.tell(m.PartsReady(attempt, tuple(part.index for part in here.parts[parts])))


@pytest.mark.parametrize("unit", [UNIT, 8])
def test_a_get_gathers_blocks_and_a_state_into_one_span(pair: list[Pump], unit: int) -> None:
    """What a cache has of a prompt lies in many places there and in one at whoever asks for it."""
    source, target = pair
    attempt, extent = attempt_id(), Extent(0, TOKENS, (TOKENS,))
    ends = ends_of(extent, unit)
    empty(target)
    there = span(target, attempt, extent, ends, receive=True)
    here = brought(source, attempt, extent, ends, receive=False)
    assert here.reserved.span == -1 and here.reserved.nbytes == LAYOUT.extent_bytes(extent)
    here.fill(unit)
    send(here, there, attempt, ends)
    ready(here, attempt)
    assert_moved(attempt, here, there)
    end(attempt, source, target)


@pytest.mark.parametrize("unit", [UNIT, 8])
def test_a_put_scatters_a_sequence_into_blocks_and_states(pair: list[Pump], unit: int) -> None:
    """Rows leave the span they were computed in, states the snapshots that were kept at two boundaries; each block and
    each state of the cache is a window of its own."""
    source, target = pair
    attempt, extent = attempt_id(), Extent(128, TOKENS, (256, TOKENS))
    ends = ends_of(extent, unit)
    empty(target)
    there = brought(target, attempt, extent, ends, receive=True)
    here = brought(source, attempt, extent, ends, receive=False, edges=(TOKENS,))
    here.fill(unit)
    send(here, there, attempt, ends)
    ready(here, attempt, slice(0, 7))
    ready(here, attempt, slice(7, None))
    assert_moved(attempt, here, there)
    end(attempt, source, target)


def test_a_state_alone_is_a_transfer(pair: list[Pump]) -> None:
    """The rows are there already, or not wanted."""
    source, target = pair
    attempt, extent = attempt_id(), Extent(TOKENS, TOKENS, (TOKENS,))
    empty(target)
    there = span(target, attempt, extent, (), receive=True)
    here = brought(source, attempt, extent, (), receive=False)
    here.fill(0)
    send(here, there, attempt, ())
    ready(here, attempt)
    assert_moved(attempt, here, there)
    end(attempt, source, target)


def test_only_the_suffix_crosses_that_the_receiver_lacks(pair: list[Pump]) -> None:
    """The sender holds rows from 100 on; the receiver has those up to 512 from elsewhere, and wants the rest and the
    state at the end."""
    source, target = pair
    attempt, extent = attempt_id(), Extent(512, 1000, (1000,))
    ends = ends_of(extent, 256)
    empty(target)
    there = span(target, attempt, extent, ends, receive=True)
    assert there.reserved.nbytes == LAYOUT.window_bytes(488, True)
    here = span(source, attempt, extent, ends, receive=False, of=Extent(100, 1000, (1000,)))
    here.fill(0)
    send(here, there, attempt, ends, extent=extent)
    for number in range(len(here.parts)):
        ready(here, attempt, slice(number, number + 1))
    assert_moved(attempt, here, there)
    end(attempt, source, target)


def test_what_the_senders_memory_does_not_hold_is_not_sent(pair: list[Pump]) -> None:
    """Nor is anything else: the attempt ends before anything was offered."""
    source, target = pair
    attempt, extent = attempt_id(), Extent(64, 128)
    there = span(target, attempt, extent, (128,), receive=True)
    here = span(source, attempt, Extent(100, 128), (128,), receive=False)
    send(here, there, attempt, (128,), extent=extent)
    failure = lost(source, attempt)
    assert failure.cause == Cause.OFFER_MISMATCH.value and "no window holds the rows 64:128" in failure.detail
    end(attempt, source, target)


@pytest.mark.parametrize(
    ("offered", "cause"),
    [
        (Extent(0, TOKENS, (UNIT,)), Cause.OFFER_MISMATCH),
        (Extent(UNIT, TOKENS + UNIT, (TOKENS,)), Cause.OFFER_MISMATCH),
        (Extent(0, TOKENS), Cause.TICKET),
        (Extent(0, TOKENS, (UNIT, TOKENS)), Cause.TICKET),
        (Extent(UNIT, TOKENS, (TOKENS,)), Cause.TICKET),
    ],
)
def test_another_extent_than_was_reserved_is_refused(pair: list[Pump], offered: Extent, cause: Cause) -> None:
    """Rows of other positions and a state of another length look alike: they are compared, and nothing is written."""
    source, target = pair
    attempt, extent = attempt_id(), Extent(0, TOKENS, (TOKENS,))
    empty(target)
    there = brought(target, attempt, extent, ends_of(extent), receive=True)
    here = brought(source, attempt, offered, ends_of(offered), receive=False)
    here.fill(0)
    ready(here, attempt)
    send(here, there, attempt, ends_of(offered))
    assert lost(source, attempt).cause == cause.value
    if cause is Cause.OFFER_MISMATCH:
        failure = lost(target, attempt)
        assert failure.cause == cause.value and failure.boundary_tokens == 0
    end(attempt, source, target)
    assert_untouched(there)


def test_a_chunk_that_would_lie_in_two_windows_is_refused(pair: list[Pump]) -> None:
    """The sender cuts as the receiver's memory is cut, or not at all."""
    source, target = pair
    attempt, extent = attempt_id(), Extent(0, TOKENS)
    empty(target)
    there = brought(target, attempt, extent, ends_of(extent), receive=True)
    here = span(source, attempt, extent, ends_of(extent, 256), receive=False)
    ready(here, attempt)
    send(here, there, attempt, ends_of(extent, 256))
    failure = lost(target, attempt)
    assert failure.cause == Cause.OFFER_MISMATCH.value and "no window holds the rows 0:256" in failure.detail
    assert lost(source, attempt).cause == Cause.OFFER_MISMATCH.value
    end(attempt, source, target)
    assert_untouched(there)


@pytest.mark.parametrize(
    ("windows", "why"),
    [
        ((Window(0, UNIT, 0),), "no window holds the rows 64:65"),
        ((Window(0, 2 * UNIT, POOL_BYTES - 4096),), "in a pool of"),
        ((Window(0, UNIT, 0), Window(UNIT, 2 * UNIT, 64)), "where another one ends"),
        ((Window(0, UNIT, -64), Window(UNIT, 2 * UNIT, 1 << 20)), "makes no sense"),
    ],
)
def test_memory_that_cannot_be_meant_is_refused(pair: list[Pump], windows: tuple[Window, ...], why: str) -> None:
    """No thread ever writes where the node cannot have wanted it to."""
    pump, _ = pair
    attempt = attempt_id()
    pump.tell(
        m.Bring(attempt=attempt, extent=Extent(0, 2 * UNIT), windows=windows, ttl_s=60.0, receive=True, source=NODE)
    )
    refused = pump.await_event(m.Refused, attempt)
    assert why in refused.wrong and refused.needed_bytes == LAYOUT.bytes_per_token * 2 * UNIT


def test_a_reserved_span_has_states_at_its_end_only(pair: list[Pump]) -> None:
    pump, _ = pair
    attempt = attempt_id()
    pump.tell(m.Reserve(attempt=attempt, extent=Extent(0, 128, (64, 128)), ttl_s=60.0, receive=True, source=NODE))
    assert "no window holds the states at 64" in pump.await_event(m.Refused, attempt).wrong


def test_an_attempt_brings_memory_once(pair: list[Pump]) -> None:
    """A late frame of it must never find it open again."""
    pump, _ = pair
    attempt, extent = attempt_id(), Extent(0, UNIT)
    brought(pump, attempt, extent, (UNIT,), receive=True)
    for _ in range(2):
        pump.tell(m.Bring(attempt=attempt, extent=extent, windows=(Window(0, UNIT, 0),), ttl_s=60.0, receive=True))
        assert pump.await_event(m.Refused, attempt).wrong == ""
        pump.release(attempt)


def test_field_B5_a_get_outlives_its_lanes(pair: list[Pump]) -> None:
    """Connections end in mid-transfer, twice: what was lost with them goes to its windows by others."""
    source, target = pair
    line = Line(target, bytes_per_s=SLOW)
    attempt, extent = attempt_id(), Extent(0, 2000, (1920, 2000))
    ends = ends_of(extent)
    before = target.assert_baseline().received_bytes_total
    empty(target)
    there = brought(target, attempt, extent, ends, receive=True)
    here = brought(source, attempt, extent, ends, receive=False, edges=(704, 2000))
    here.fill(0)
    send(here, there, attempt, ends, address=line.address)
    ready(here, attempt)
    for share in (4, 2):
        target.await_load(
            lambda load, share=share: load.received_bytes_total > before + LAYOUT.extent_bytes(extent) // share
        )
        line.cut(2)
    assert_moved(attempt, here, there)
    assert line.made > 4
    line.close()
    end(attempt, source, target)


def test_a_get_that_is_stopped_keeps_the_blocks_that_have_come(pair: list[Pump]) -> None:
    """Rows without states are good up to the first that lacks; with states nothing is before all is. What is kept is
    counted from where the extent begins."""
    source, target = pair
    for extent, kept in ((Extent(128, TOKENS), 128 + 3 * UNIT), (Extent(128, TOKENS, (TOKENS,)), 128)):
        attempt, ends = attempt_id(), ends_of(extent)
        before = target.assert_baseline().received_bytes_total
        empty(target)
        there = brought(target, attempt, extent, ends, receive=True)
        here = brought(source, attempt, extent, ends, receive=False)
        here.fill(0)
        send(here, there, attempt, ends)
        here.pump.tell(m.PartsReady(attempt, (0, 1, 2, 4)))
        came = sum(here.parts[index].nbytes for index in (0, 1, 2, 4))
        target.await_load(lambda load, total=before + came: load.received_bytes_total == total)
        target.tell(m.Stop(attempt))
        assert lost(target, attempt).boundary_tokens == kept
        assert lost(source, attempt).cause == Cause.ABORTED.value
        assert there.read()[:3] == here.read()[:3]
        assert_untouched(there, but=tuple(there.parts[index] for index in (0, 1, 2, 4)))
        end(attempt, source, target)


def test_field_A1_nothing_writes_into_windows_that_were_given_back(pair: list[Pump]) -> None:
    """After Released they are somebody else's, although the sender goes on; and those of its neighbours are filled all
    the while."""
    source, target = pair
    extent, draw = Extent(0, 3000), random.Random(13)
    ends = ends_of(extent)
    for _ in range(12):
        attempt, neighbour = attempt_id(), attempt_id()
        before = target.assert_baseline().received_bytes_total
        empty(target)
        there = brought(target, attempt, extent, ends, receive=True)
        here = brought(source, attempt, extent, ends, receive=False, edges=(3000,))
        beside = Window(0, TOKENS, (7 << 20) + taken_bytes(there.windows))
        near = target.bring(neighbour, Extent(0, TOKENS), (beside,), receive=True)
        far = source.bring(neighbour, Extent(0, TOKENS), (Window(0, TOKENS, 0),), receive=False)
        assert near.generation != there.reserved.generation and far.span == -1
        ready(here, attempt)
        send(here, there, attempt, ends)
        source.tell(m.PartsReady(neighbour, tuple(range(len(ends_of(Extent(0, TOKENS)))))))
        source.send_to(target, neighbour, near, TOKENS)
        if draw.random() < 0.7:
            target.await_load(lambda load, before=before: load.received_bytes_total > before)
        target.release(attempt)
        at, stop = 7 << 20, beside.offset
        target.pool[at:stop] = bytes([EMPTY]) * (stop - at)
        source.outcome(attempt)
        assert isinstance(target.outcome(neighbour), m.Received)
        assert bytes(target.pool[at:stop]).count(EMPTY) == stop - at, "written to after its release"
        end(attempt, source)
        end(neighbour, source, target)


def test_plain_hand_offs_go_on_beside(pair: list[Pump]) -> None:
    """What was brought is no span, and is not taken for free memory or for taken."""
    source, target = pair
    attempt, extent = attempt_id(), Extent(0, UNIT)
    brought(target, attempt, extent, (UNIT,), receive=True)
    assert target.assert_baseline().free_bytes == POOL_BYTES
    assert_transfers(source, target)
    end(attempt, target)
