"""The fluid line: who gets how much, when a transfer ends, what senders count, and what a cut does."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.cluster import NodeId
from prfaas.sim.kernel import Kernel
from prfaas.sim.link import Line
from prfaas.sim.transfer import Transfer

P0, P1 = NodeId("p0"), NodeId("p1")


class Watch:
    """A line, and when each of its transfers ended."""

    def __init__(self, capacity: float = 100.0, give_up_s: float = 10.0) -> None:
        self.kernel = Kernel(0)
        self.line = Line(self.kernel, capacity, give_up_s)
        self.ended: dict[str, float] = {}
        self.failed: dict[str, float] = {}

    def open(self, name: str, source: NodeId = P0) -> Transfer:
        return self.line.open(
            source,
            lambda: self.ended.update({name: self.kernel.now()}),
            lambda: self.failed.update({name: self.kernel.now()}),
        )

    def send(self, name: str, nbytes: float, source: NodeId = P0) -> Transfer:
        transfer = self.open(name, source)
        transfer.close(nbytes)
        return transfer

    def at(self, seconds: float) -> None:
        self.kernel.run_until(seconds)
        self.line.check()


def test_alone_on_the_line_a_transfer_has_it_all():
    """Bytes over capacity."""
    watch = Watch()
    watch.send("a", 500.0)
    watch.at(60.0)
    assert watch.ended == {"a": pytest.approx(5.0)}
    watch.line.check_idle()


def test_two_share_equally_and_the_last_one_has_the_rest():
    """When the short one ends, the long one goes twice as fast."""
    watch = Watch()
    watch.send("short", 100.0)
    watch.send("long", 500.0)
    watch.at(60.0)
    assert watch.ended == {"short": pytest.approx(2.0), "long": pytest.approx(6.0)}


def test_who_is_fed_slowly_takes_no_more_than_that():
    """Max-min: what the slow one does not need belongs to the other."""
    watch = Watch()
    slow = watch.open("slow")
    slow.feed(20.0)
    watch.send("backlogged", 400.0)
    watch.at(4.0)
    assert (slow.rate, slow.queued_bytes) == (pytest.approx(20.0), pytest.approx(0.0))
    watch.at(5.5)
    assert watch.ended == {"backlogged": pytest.approx(5.0)}


def test_only_what_comes_last_is_exposed():
    """A prefill that feeds slower than the line carries leaves its state to be sent at the end, and nothing else."""
    watch = Watch()
    transfer = watch.open("kv")
    transfer.feed(50.0)
    watch.kernel.call_later(10.0, lambda: transfer.close(50.0 * 10 + 200.0))
    watch.at(60.0)
    assert watch.ended["kv"] == pytest.approx(10.0 + 200.0 / 100.0)


def test_what_the_line_could_not_carry_meanwhile_is_exposed_as_well():
    """Fed at twice the line's speed: half is left when it is computed."""
    watch = Watch()
    transfer = watch.open("kv")
    transfer.feed(200.0)
    watch.kernel.call_later(10.0, lambda: transfer.close(2000.0 + 100.0))
    watch.at(60.0)
    assert watch.ended["kv"] == pytest.approx(10.0 + (1000.0 + 100.0) / 100.0)


def test_a_line_that_steps_carries_on_at_the_new_speed():
    """100, then 10, then 100."""
    watch = Watch()
    watch.send("a", 1000.0)
    watch.kernel.call_later(5.0, lambda: watch.line.step(10.0))
    watch.kernel.call_later(15.0, lambda: watch.line.step(100.0))
    watch.at(60.0)
    assert watch.ended == {"a": pytest.approx(15.0 + (1000.0 - 500.0 - 100.0) / 100.0)}


def test_a_short_cut_only_delays():
    """Back before anybody gives up."""
    watch = Watch()
    watch.send("a", 1000.0)
    watch.kernel.call_later(5.0, lambda: watch.line.step(0.0))
    watch.kernel.call_later(14.0, lambda: watch.line.step(100.0))
    watch.at(60.0)
    assert watch.ended == {"a": pytest.approx(19.0)} and not watch.failed


def test_a_long_cut_fails_what_waits_each_after_its_own_patience():
    """Also what was begun while the line was already dead."""
    watch = Watch()
    watch.send("before", 1000.0)
    watch.kernel.call_later(5.0, lambda: watch.line.step(0.0))
    watch.kernel.call_later(9.0, lambda: watch.send("during", 100.0))
    watch.at(60.0)
    assert watch.failed == {"before": pytest.approx(15.0), "during": pytest.approx(19.0)} and not watch.ended
    watch.line.check_idle()


def test_a_cancelled_transfer_leaves_its_share_to_the_others():
    """And is never called done."""
    watch = Watch()
    cancelled = watch.send("cancelled", 1000.0)
    watch.send("other", 300.0)
    watch.kernel.call_later(2.0, cancelled.cancel)
    watch.at(60.0)
    assert watch.ended == {"other": pytest.approx(4.0)}


def test_a_sender_counts_goodput_while_backlogged_apart():
    """Only then does it learn what the line gives."""
    watch = Watch()
    transfer = watch.open("kv", P1)
    transfer.feed(20.0)
    watch.kernel.call_later(10.0, lambda: transfer.close(200.0 + 300.0))
    watch.at(60.0)
    sender = watch.line.sender(P1)
    assert sender.sent_bytes == pytest.approx(500.0)
    assert (sender.backlogged_bytes, sender.backlogged_s) == (pytest.approx(300.0), pytest.approx(3.0))


@st.composite
def loads(draw: st.DrawFn) -> list[tuple[float, float, float, float]]:
    """(start, seconds of feeding, feed, bytes at the end) of a few transfers."""
    number = st.floats(0.0, 100.0)
    return draw(st.lists(st.tuples(number, number, number, st.floats(1.0, 1000.0)), min_size=1, max_size=8))


@given(loads(), st.lists(st.tuples(st.floats(0.1, 300.0), st.floats(1.0, 200.0)), max_size=4))
@settings(max_examples=60, deadline=None)
def test_every_byte_goes_once_and_the_line_never_rests_on_a_backlog(transfers, steps):
    """Whatever starts, ends and steps: all bytes are sent, each by its sender, and not later than one after the other
    at the line's slowest."""
    watch = Watch()
    total = 0.0
    for number, (start, seconds, feed, rest) in enumerate(transfers):
        nbytes = feed * seconds + rest
        total += nbytes

        def begin(name=str(number), seconds=seconds, feed=feed, nbytes=nbytes) -> None:
            transfer = watch.open(name, P0 if int(name) % 2 else P1)
            transfer.feed(feed)
            watch.kernel.call_later(seconds, lambda: transfer.close(nbytes))

        watch.kernel.call_later(start, begin)
    slowest = 100.0
    for at, capacity in steps:
        slowest = min(slowest, capacity)
        watch.kernel.call_later(at, lambda capacity=capacity: watch.line.step(capacity))
    watch.at(200.0 + total / slowest + 1.0)
    assert len(watch.ended) == len(transfers)
    sent = sum(watch.line.sender(node).sent_bytes for node in (P0, P1))
    assert sent == pytest.approx(total, rel=1e-6, abs=2.0 * len(transfers))
    watch.line.check_idle()
