"""Continuous batching by a counter of steps is the same as making every step."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.profile import DecodeProfile
from prfaas.request import AttemptId
from prfaas.sim.decode_batch import DecodeBatch, Drawn, Sequence
from prfaas.sim.kernel import Kernel
from prfaas.sim.step_times import StepTimes

PROFILE = DecodeProfile(base_s=0.01, per_sequence_s=0.002, max_batch=3)


class Bench:
    """A batch, and what each sequence got: (when, total so far)."""

    def __init__(self, token_batch: int = 4, profile: DecodeProfile = PROFILE) -> None:
        self.kernel, self.times = Kernel(0), StepTimes()
        self.batch = DecodeBatch(self.kernel, profile, token_batch, lambda: None, self.times)
        self.got: dict[str, list[tuple[float, Drawn]]] = {}

    def come(self, name: str, at: float, tokens: int) -> None:
        def arrive() -> None:
            self.got[name] = []
            self.batch.add(
                Sequence(AttemptId(name), tokens, at, lambda drawn: self.got[name].append((self.kernel.now(), drawn)))
            )

        self.kernel.call_later(at, arrive)

    def run(self, until: float = 1000.0) -> None:
        self.kernel.run_until(until)
        self.batch.check()


@dataclass
class Stepped:
    """The same, step by step: who is there at the start of a step gets a token at its end."""

    sequences: list[tuple[float, int]]
    firsts: dict[int, float] = field(default_factory=dict)
    lasts: dict[int, float] = field(default_factory=dict)

    def play(self, profile: DecodeProfile) -> None:
        waiting = sorted(range(len(self.sequences)), key=lambda i: (self.sequences[i][0], i))
        active: dict[int, int] = {}
        now = 0.0
        while waiting or active:
            if not active:
                now = max(now, self.sequences[waiting[0]][0])
            # Who comes in the very moment a step ends may just miss it: cases are drawn so that nobody does.
            while waiting and len(active) < profile.max_batch and self.sequences[waiting[0]][0] <= now:
                active[waiting.pop(0)] = 0
            now += profile.step_s(len(active))
            for i in list(active):
                active[i] += 1
                if active[i] == 1:
                    self.firsts[i] = now
                if active[i] == self.sequences[i][1]:
                    self.lasts[i] = now
                    del active[i]


def test_a_sequence_alone_gets_a_token_each_step():
    """The first one at once, then batches, the last one marked."""
    bench = Bench(token_batch=4)
    bench.come("a", 1.0, 7)
    bench.run()
    step_s = PROFILE.step_s(1)
    assert [drawn.total for _, drawn in bench.got["a"]] == [1, 5, 7]
    assert [drawn.count for _, drawn in bench.got["a"]] == [1, 4, 2]
    assert [drawn.finished for _, drawn in bench.got["a"]] == [False, False, True]
    assert [at for at, _ in bench.got["a"]] == pytest.approx([1.0 + total * step_s for total in (1, 5, 7)])
    first = bench.got["a"][0][1]
    assert (first.queue_s, first.step_s) == (0.0, pytest.approx(step_s))
    assert bench.batch.busy_s == pytest.approx(7 * step_s)


def test_who_comes_in_the_middle_of_a_step_waits_for_its_end():
    """And makes the next ones longer for everybody."""
    bench = Bench()
    bench.come("a", 0.0, 3)
    bench.come("b", 0.005, 1)
    bench.run()
    one, two = PROFILE.step_s(1), PROFILE.step_s(2)
    assert bench.got["b"][0][0] == pytest.approx(one + two)
    assert bench.got["b"][0][1].queue_s == pytest.approx(one - 0.005)
    assert bench.got["a"][-1][0] == pytest.approx(one + two + one)


def test_a_full_batch_makes_the_next_one_wait_for_a_slot():
    """Given when somebody has finished."""
    bench = Bench()
    for name, tokens in (("a", 3), ("b", 5), ("c", 5), ("d", 1)):
        bench.come(name, 0.0, tokens)
    one, three = PROFILE.step_s(1), PROFILE.step_s(3)
    bench.run(one + 0.001)
    assert (bench.batch.active, bench.batch.waiting) == (3, 1)
    bench.run()
    # The first one began alone, before the others were there.
    assert bench.got["a"][-1][0] == pytest.approx(one + 2 * three)
    assert bench.got["d"][0][0] == pytest.approx(one + 3 * three)
    assert bench.got["d"][0][1].queue_s == pytest.approx(one + 2 * three)


def test_half_of_the_time_makes_steps_twice_as_long_from_that_moment():
    """Also the one that is under way, for what is left of it."""
    bench = Bench()
    bench.come("a", 0.0, 4)
    one = PROFILE.step_s(1)
    bench.kernel.call_later(1.5 * one, lambda: bench.batch.set_share(0.5))
    bench.run()
    assert bench.got["a"][-1][0] == pytest.approx(1.5 * one + 2.5 * 2 * one)
    # Gaps between tokens: 1.5 steps with the change in its middle, then 2, 2.
    assert bench.times.total == 3
    assert bench.times.quantile_s(0.01) == pytest.approx(1.5 * one, abs=1e-4)
    assert bench.times.quantile_s(0.99) == pytest.approx(2 * one, abs=1e-4)


def test_whoever_is_forgotten_gets_nothing_more_and_leaves_its_slot():
    """Active or waiting."""
    bench = Bench()
    for name in "abcd":
        bench.come(name, 0.0, 50)
    bench.kernel.call_later(0.1, lambda: bench.batch.forget(AttemptId("a")))
    bench.kernel.call_later(0.2, lambda: bench.batch.forget(AttemptId("b")))
    bench.run(0.15)
    assert (bench.batch.active, bench.batch.waiting) == (3, 0)
    bench.run()
    assert not bench.got["a"][-1][1].finished
    assert all(bench.got[name][-1][1].finished for name in "cd")
    assert len(bench.batch) == 0


def test_a_smaller_batch_lets_those_inside_finish():
    """Nobody is thrown out when a node's role leaves it less."""
    bench = Bench()
    for name in "abcd":
        bench.come(name, 0.0, 10)
    bench.kernel.call_later(0.05, lambda: setattr(bench.batch, "max_batch", 1))
    bench.run()
    assert all(bench.got[name][-1][1].finished for name in "abcd")


@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 60)), min_size=1, max_size=12),
    st.sampled_from([1, 4, 1000]),
)
@settings(max_examples=80, deadline=None)
def test_counting_steps_is_making_them(drawn, token_batch):
    """First and last token of everybody come when they would if each step was made."""
    # Odd fractions, so that no arrival falls on the end of a step.
    sequences = [(at / 100 + 0.00037 * (i + 1) / 13, tokens) for i, (at, tokens) in enumerate(drawn)]
    expected = Stepped(sequences)
    expected.play(PROFILE)
    bench = Bench(token_batch)
    for i, (at, tokens) in enumerate(sequences):
        bench.come(str(i), at, tokens)
    bench.run()
    for i, (_, tokens) in enumerate(sequences):
        got = bench.got[str(i)]
        assert got[0][0] == pytest.approx(expected.firsts[i], abs=1e-9)
        assert got[-1][0] == pytest.approx(expected.lasts[i], abs=1e-9)
        assert sum(each.count for _, each in got) == got[-1][1].total == tokens
    # Every token but the first of each sequence has a gap before it.
    assert bench.times.total == sum(tokens - 1 for _, tokens in sequences)
