"""What the sequences of faults are drawn from and judged by: a judge that lets things pass shows nothing."""

from dataclasses import replace

import pytest

from tests.chaos.answers import Got, differences
from tests.chaos.asked import Asked, Choice
from tests.chaos.faults import LINE, Kind, draw

PROCESSES = ("decode-0", "decode-1", "pool-a-0", "prefill-0", "router", "router-1", "wan-relay")
EXPECTED = Choice((5, 6, 7, 8), "abcd")
ASKED = Asked("one", (1, 2), 4, stream=True, shows_tokens=True, expected=(EXPECTED,))


def got(tokens: tuple[int, ...], text: str, finish: str | None = None) -> Got:
    return Got({0: list(tokens)}, {0: text}, {0: finish} if finish else {})


def test_a_seed_is_a_sequence():
    """The same seed gives the same faults, another one others."""
    assert draw(3, 20, PROCESSES) == draw(3, 20, PROCESSES) != draw(4, 20, PROCESSES)


@pytest.mark.parametrize("seed", range(50))
def test_faults_of_one_thing_follow_each_other_and_are_over_at_the_end(seed: int):
    """Different things suffer together; the line itself is cut, never killed; who is spared is not killed."""
    faults, free_s = draw(seed, 20, PROCESSES, spared=("router",)), dict[str, float]()
    assert faults
    for fault in faults:
        assert fault.at_s >= free_s.get(fault.target, 0.0) and fault.at_s + fault.lasts_s <= 20
        free_s[fault.target] = fault.at_s + fault.lasts_s
        assert (fault.target == LINE) == (fault.kind in (Kind.CUT, Kind.SLOW))
        assert fault.kind is not Kind.KILL or fault.target != "router"


def test_every_kind_of_fault_comes():
    assert {fault.kind for seed in range(20) for fault in draw(seed, 20, PROCESSES)} == set(Kind)


def test_the_reference_is_right_and_so_is_a_part_of_it():
    """A part only where the answer was not to its end."""
    assert not differences(ASKED, got((5, 6, 7, 8), "abcd", "length"), whole=True)
    assert not differences(ASKED, got((5, 6), "a"), whole=False)
    assert not differences(ASKED, Got(), whole=False)


@pytest.mark.parametrize(
    ("answer", "whole"),
    [
        (got((5, 6, 9, 8), "abcd", "length"), True),
        (got((5, 6, 7), "abcd", "length"), True),
        (got((5, 6, 7, 8), "abc", "length"), True),
        (got((5, 6, 7, 8), "abcd"), True),
        (got((5, 6, 7, 8), "abcd", "stop"), True),
        (got((5, 6, 7, 8, 8), "abcd", "length"), True),
        (got((5, 5), "a"), False),
        (got((5, 6), "b"), False),
        (Got(), True),
    ],
    ids=["another", "lost", "text lost", "no end", "another end", "repeated", "twice", "another text", "nothing"],
)
def test_anything_else_is_wrong(answer: Got, whole: bool):
    assert differences(ASKED, answer, whole)


def test_an_answer_that_stops_at_a_string():
    """Its tokens go to where the string is complete; its text does not."""
    asked = replace(ASKED, stop="c", expected=(replace(EXPECTED, text="ab"),))
    assert not differences(asked, got((5, 6, 7), "ab", "stop"), whole=True)
    assert differences(asked, got((5, 6, 7), "abc", "stop"), whole=True)
    assert differences(asked, got((5, 6, 7), "ab", "length"), whole=True)


def test_each_choice_is_looked_at():
    asked = replace(ASKED, n=2, expected=(EXPECTED, replace(EXPECTED, tokens=(4, 4, 4, 4))))
    both = Got({0: [5, 6, 7, 8], 1: [5, 6, 7, 8]}, {0: "abcd", 1: "abcd"}, {0: "length", 1: "length"})
    assert len(differences(asked, both, whole=True)) == 1
