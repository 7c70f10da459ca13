"""Threads that block, and memory lent to them."""

import asyncio
import threading

import numpy as np
import pytest

from prfaas.blockstore.hands import Hands, Lent, Turns
from prfaas.blockstore.port import StoreFailed

LIMIT_S = 20.0
SOON_S = 0.05


@pytest.fixture
def release():
    """What a blocked call waits for; set at the latest when the test ends."""
    event = threading.Event()
    yield event
    event.set()


async def test_a_call_runs_aside_and_answers():
    """Its value or its exception comes back; meanwhile the event loop runs."""
    hands = Hands("store", 2, LIMIT_S)
    ran, release = asyncio.Event(), threading.Event()

    def blocked() -> int:
        assert release.wait(LIMIT_S)
        return 7

    call = asyncio.create_task(hands.run("get", blocked))
    asyncio.get_running_loop().call_soon(ran.set)
    await ran.wait()
    release.set()
    assert await call == 7
    with pytest.raises(ZeroDivisionError):
        await hands.run("get", lambda: 1 // 0)
    await hands.close(lambda: None)


async def test_a_call_that_hangs_is_given_up_and_keeps_its_thread(release: threading.Event):
    """The deadline ends the wait. Only when all threads hang does everything fail, and it recovers when one returns."""
    hands = Hands("store", 2, SOON_S)
    with pytest.raises(StoreFailed, match="get"):
        await hands.run("get", release.wait)
    assert await hands.run("get", lambda: "the other thread") == "the other thread"
    with pytest.raises(StoreFailed):
        await hands.run("get", release.wait)
    started = threading.Event()
    with pytest.raises(StoreFailed):
        await hands.run("get", started.set)
    assert not started.is_set(), "no thread was left to start it"
    release.set()
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                assert await hands.run("get", lambda: "again") == "again"
                break
            except StoreFailed:
                continue
    assert not started.is_set(), "what was given up before it began is never done"
    await hands.close(lambda: None)


async def test_no_more_calls_go_on_at_once_than_threads():
    """Others wait for their turn."""
    hands = Hands("store", 3, LIMIT_S)
    lock, at_work, most = threading.Lock(), 0, 0
    full = threading.Barrier(3)

    def work(number: int) -> int:
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
        if number < 3:
            full.wait(LIMIT_S)
        with lock:
            at_work -= 1
        return number

    answers = await asyncio.gather(*(hands.run("get", lambda number=number: work(number)) for number in range(40)))
    assert answers == list(range(40)) and most == 3
    await hands.close(lambda: None)


async def test_a_cancelled_call_gives_its_thread_back_when_it_is_through(release: threading.Event):
    """Cancelling one caller costs no thread for good."""
    hands = Hands("store", 1, LIMIT_S)
    began = threading.Event()

    def blocked() -> None:
        began.set()
        release.wait(LIMIT_S)

    call = asyncio.create_task(hands.run("get", blocked))
    await asyncio.to_thread(began.wait, LIMIT_S)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    release.set()
    assert await hands.run("get", lambda: 1) == 1
    await hands.close(lambda: None)


async def test_closing_waits_for_threads_before_it_takes_things_away(release: threading.Event):
    """Callers fail at once; what threads may still use is closed after the last of them."""
    hands = Hands("store", 2, LIMIT_S)
    order, began = [], threading.Event()

    def blocked() -> None:
        began.set()
        release.wait(LIMIT_S)
        order.append("thread")

    call = asyncio.create_task(hands.run("get", blocked))
    await asyncio.to_thread(began.wait, LIMIT_S)
    closing = asyncio.create_task(hands.close(lambda: order.append("closed")))
    with pytest.raises(StoreFailed):
        await call
    assert order == []
    release.set()
    await closing
    assert order == ["thread", "closed"]
    with pytest.raises(StoreFailed):
        await hands.run("get", lambda: 1)


async def test_closing_does_not_wait_for_ever(release: threading.Event):
    """A thread that hangs keeps what it may use."""
    hands = Hands("store", 1, SOON_S)
    with pytest.raises(StoreFailed):
        await hands.run("get", release.wait)
    closed = []
    async with asyncio.timeout(LIMIT_S):
        await hands.close(lambda: closed.append(1))
    assert closed == []


def test_memory_that_went_back_is_left_alone():
    """A thread that comes too late neither reads nor writes it."""
    memory = bytearray(b"mine")
    lent = Lent(memoryview(memory))
    lent.write(np.frombuffer(b"full", np.uint8))
    assert memory == b"full"
    copy = np.zeros(4, np.uint8)
    assert lent.read(copy) and copy.tobytes() == b"full"
    lent.give_back()
    lent.write(np.frombuffer(b"late", np.uint8))
    assert memory == b"full"
    memory[:] = b"next"
    assert not lent.read(copy) and copy.tobytes() == b"full"
    memory += b"may grow: no view of it is left"


def test_read_only_memory_can_be_lent_to_be_read():
    """A put needs no more."""
    copy = np.zeros(3, np.uint8)
    assert Lent(memoryview(b"abc")).read(copy) and copy.tobytes() == b"abc"


def test_one_key_has_one_turn():
    """Who changes it waits for whoever does; most other keys have turns of their own."""
    turns = Turns()
    assert turns.at(b"a") is turns.at(bytes(bytearray(b"a")))
    assert len({id(turns.at(b"%d" % number)) for number in range(1000)}) > 32
