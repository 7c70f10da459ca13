"""Prefills of one instance: their order, their times at any rate, and what is reported of them."""

import pytest

from prfaas.request import AttemptId
from prfaas.sim.kernel import Kernel
from prfaas.sim.prefill_queue import PrefillJob, PrefillQueue


class Desk:
    """A queue, and what came of its jobs: (when, seconds queued, seconds computed)."""

    def __init__(self, chunk_tokens: int = 100) -> None:
        self.kernel = Kernel(0)
        self.empty = 0
        self.queue = PrefillQueue(self.kernel, chunk_tokens, self._changed)
        self.done: dict[str, tuple[float, float, float]] = {}
        self.fed: list[tuple[str, float, float]] = []

    def _changed(self) -> None:
        self.empty += not len(self.queue)

    def add(self, name: str, tokens: int, work_s: float, cached: int = 0, begins: bool = True) -> None:
        def feed(rate: float) -> None:
            self.fed.append((name, self.kernel.now(), rate))

        self.queue.add(
            PrefillJob(
                attempt=AttemptId(name),
                tokens=tokens,
                arrived_s=self.kernel.now(),
                begin=lambda: (cached, work_s) if begins else None,
                feed=feed,
                done=lambda queue_s, compute_s: self.done.update({name: (self.kernel.now(), queue_s, compute_s)}),
                uncached_tokens=tokens + 1,
            )
        )

    def run(self, until: float) -> None:
        self.kernel.run_until(until)
        self.queue.check()


def test_first_come_first_served_one_at_a_time():
    """Who waits knows for how long it did."""
    desk = Desk()
    desk.add("a", 1000, 2.0)
    desk.add("b", 1000, 3.0)
    desk.run(10.0)
    assert desk.done == {"a": (2.0, 0.0, 2.0), "b": (5.0, 2.0, 3.0)}
    assert desk.queue.busy_s == pytest.approx(5.0)
    assert desk.empty == 1


def test_half_of_the_time_makes_it_take_twice_as_long():
    """Progress made so far is kept when the rate changes."""
    desk = Desk()
    desk.add("a", 1000, 4.0)
    desk.kernel.call_later(2.0, lambda: desk.queue.set_rate(0.5))
    desk.run(10.0)
    assert desk.done["a"] == (pytest.approx(6.0), 0.0, pytest.approx(6.0))
    assert [rate for _, _, rate in desk.fed] == [250.0, 125.0]


def test_progress_shows_by_whole_chunks():
    """What is left to compute, as a report has it; who has not begun counts whole."""
    desk = Desk(chunk_tokens=100)
    desk.add("a", 999, 10.0)
    desk.add("b", 499, 5.0)
    assert desk.queue.tokens == 1500
    desk.run(2.5)
    assert desk.queue.tokens == 1500 - 200
    desk.run(12.0)
    assert desk.queue.tokens == 500 - 200
    desk.run(20.0)
    assert desk.queue.tokens == 0


def test_what_is_cached_is_neither_computed_nor_counted_once_it_has_begun():
    """Found when it begins."""
    desk = Desk()
    desk.add("a", 999, 1.0, cached=900)
    assert desk.queue.tokens == 100
    assert desk.fed == [("a", 0.0, 99.0)]


@pytest.mark.parametrize("at", [0.5, 2.5])
def test_whoever_is_forgotten_makes_way(at):
    """Waiting or under way."""
    desk = Desk()
    desk.add("a", 1000, 2.0)
    desk.add("b", 1000, 2.0)
    desk.add("c", 1000, 1.0)
    desk.kernel.call_later(at, lambda: desk.queue.forget(AttemptId("b")))
    desk.run(10.0)
    assert "b" not in desk.done
    assert desk.done["c"][0] == pytest.approx(max(2.0, at) + 1.0)
    assert desk.queue.tokens == 0


def test_who_cannot_begin_is_passed_over():
    """The next one begins in the same moment."""
    desk = Desk()
    desk.add("a", 1000, 2.0)
    desk.add("full", 1000, 2.0, begins=False)
    desk.add("c", 1000, 1.0)
    desk.run(10.0)
    assert desk.done.keys() == {"a", "c"}
    assert desk.done["c"][0] == pytest.approx(3.0)
